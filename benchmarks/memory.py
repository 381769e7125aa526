"""What sharding saves: bytes per rank of one model, planned and measured, on 1 to 8 replicas.

    python benchmarks/memory.py [--replicas 1 2 4 8] [--fp32] [--json FILE]

For each strategy and number of replicas the ranks of a run train two iterations, and every category
is measured on every rank: weights, gradients, masters and optimizer states as the bytes of their
buffers, communication as what comes and goes beside them, at most. The program stops unless weights
to states equal the plan to the byte, and communication to five percent. Nothing is timed, so what
else a machine does does not matter.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import pretrain_gpt
from megatron.core import held
from megatron.core.distributed.config import STRATEGIES
from megatron.core.tokenizers.vocabulary import Vocabulary
from megatron.training.arguments import parse
from megatron.training.build import build_chunks, build_passes, build_run_optimizer
from megatron.training.config import RunConfig
from megatron.training.health import Health
from megatron.training.plan.memory import MemoryPlan, RankMemory
from megatron.training.planner import Planner
from megatron.training.processes import setup
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.timers import Timers
from megatron.training.verification.worker_pool import Pool

LAYERS, HIDDEN, HEADS, LENGTH, IDS = 16, 128, 4, 64, 2048
"""The model: 3.4 million parameters, tied; deep enough for units to be small parts of it."""
TOLERATED = 0.05
"""Share by which communication may differ from its plan."""
EXACT = ("weights", "gradients", "masters", "states")


def run_of(strategy: str, replicas: int, formats: Sequence[str]) -> RunConfig:
    """Return the run of one row of the table."""
    text = (
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} "
        f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --vocab-size {IDS} "
        "--make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 8 --lr 3e-4 "
        "--mock-data --train-iters 2 --device cpu "
        f"--data-parallel-sharding-strategy {strategy} --overlap-grad-reduce"
    )
    return parse([*text.split(), *formats], "pretrain_gpt", world_size=replicas).config


def train(rank: int, config: RunConfig) -> dict[str, int]:
    """Be one rank: train two iterations and return what it held."""
    mesh = setup.connected_mesh(config, torch.device("cpu"))
    vocabulary = Vocabulary(ids_in_use=IDS, rows=IDS, padded_rows=IDS)
    chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    optimizer = build_run_optimizer(config, chunks, mesh)
    passes = build_passes(config, mesh, chunks, pretrain_gpt.forward_step, Timers(0))
    step = TrainStep(passes, optimizer, Health(config.health), seed=0)
    plan, count, nominal = Planner(config, mesh).after(TrainState())
    shape = (config.training.micro_batch_size, config.data.seq_length)
    tokens = torch.randint(IDS, shape, generator=torch.Generator().manual_seed(rank))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": torch.ones(shape)}
    with held.counting() as passing:
        for _ in range(2):  # the second knows in which order units come
            step.run(plan, [batch] * count, count, nominal, lambda: (False,) * 3)
    return {**optimizer.memory(), "communication": passing.most}


def check(found: Sequence[Mapping[str, int]], planned: RankMemory) -> None:
    """Compare what the ranks held with the plan.

    Raises:
        AssertionError: they differ.
    """
    for rank, held_here in enumerate(found):
        for name in EXACT:
            assert held_here[name] == planned.fixed[name], (rank, name, held_here, planned)
        wanted = planned.communication
        assert abs(held_here["communication"] - wanted) <= TOLERATED * wanted, (rank, wanted)


@dataclass(frozen=True)
class Row:
    """One strategy on one number of replicas."""

    strategy: str
    replicas: int
    measured: Mapping[str, int]
    """Of the rank that has most."""
    planned: RankMemory

    def cells(self) -> list[str]:
        """Return the row as it is printed: bytes, and for what is not exact the plan's beside."""
        numbers = [f"{self.measured[name]:,}" for name in EXACT]
        whole = sum(self.measured[name] for name in EXACT)
        passing = f"{self.measured['communication']:,} ({self.planned.communication:,})"
        return [self.strategy, str(self.replicas), *numbers, f"{whole:,}", passing]

    def to_json(self) -> dict[str, Any]:
        """Return the row with all that was planned."""
        return {
            "strategy": self.strategy,
            "replicas": self.replicas,
            "measured": dict(self.measured),
            "planned": self.planned.categories() | {"total": self.planned.total},
        }


def main() -> int:
    """Run what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--fp32", action="store_true", help="train in fp32, not in bf16")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows, formats = list[Row](), [] if options.fp32 else ["--bf16"]
    head = ["strategy", "replicas", *EXACT, "all of these", "communication (planned)"]
    print(f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}")
    with Pool(preload=["pretrain_gpt"]) as pool:
        for strategy in STRATEGIES:
            for replicas in options.replicas:
                config = run_of(strategy, replicas, formats)
                (planned,) = MemoryPlan(config, IDS).ranks()
                found = pool.run(replicas, train, config, timeout=600.0)
                check(found, planned)
                most = {name: max(one[name] for one in found) for name in found[0]}
                rows.append(Row(strategy, replicas, most, planned))
                print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
