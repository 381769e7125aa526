"""What is told of the loads of experts, against choices counted one by one."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import pretrain_gpt
from megatron.core.mesh import Mesh
from megatron.core.rng import DropoutKey
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.routing import Routing
from megatron.training import expert_loads
from megatron.training.arguments import parse
from megatron.training.build import build_chunks, build_passes
from megatron.training.expert_loads import Counted, LayerRow, Loads
from megatron.training.log_config import LoggingConfig
from megatron.training.passes import Passes
from megatron.training.records.metrics import Metrics
from megatron.training.records.writers import JsonLines, TensorBoard, last_attempt, tags
from megatron.training.timers import Timers
from tests.unit.test_metrics import NOW, facts, iteration

EXPERTS, TOPK, SAMPLES, LENGTH, MICROBATCHES = 4, 2, 2, 8, 3
WORDS = (
    "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --micro-batch-size 2 --mock-data "
    f"--global-batch-size 6 --seq-length {LENGTH} --train-iters 1 --lr 1 --fp64 --device cpu "
    "--tokenizer-type NullTokenizer --vocab-size 31 --init-method-std 0.5 --hidden-dropout 0 "
    f"--attention-dropout 0 --num-experts {EXPERTS} --moe-router-topk {TOPK} "
    "--moe-layer-freq [1,0,1] --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 "
    "--moe-z-loss-coeff 0.1 --position-embedding-type rope --mtp-num-layers 1 "
    "--recompute-granularity selective --recompute-modules moe --dry-run"
)


def passes_of(words: str) -> Passes:
    config, mesh = parse(f"{WORDS} {words}".split()).config, Mesh.serial()
    vocabulary = resolve_vocabulary(config.tokenizer, 32, 1)
    chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    return build_passes(config, mesh, chunks, pretrain_gpt.forward_step, Timers(0))


def microbatches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(MICROBATCHES):
        text = torch.randint(32, (SAMPLES, LENGTH + 1), generator=generator)
        mask = torch.ones(SAMPLES, LENGTH)
        mask[0, : number + 1] = 0
        positions = torch.arange(LENGTH).expand(SAMPLES, -1)
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
        found.append({**batch, "position_ids": positions})
    return found


class Watched:
    """Counts what each router chooses, choice by choice; a recomputed forward says the same."""

    def __init__(self, chunk: nn.Module) -> None:
        self.tokens: dict[tuple[str, int], Counter[int]] = {}
        self.kept: dict[tuple[str, int], int] = {}
        self.losses: dict[tuple[str, int], dict[str, float]] = {}
        self.calls = 0
        self.names = [name for name, m in chunk.named_modules() if isinstance(m, Router)]
        for name in self.names:
            router = chunk.get_submodule(name)
            router.register_forward_hook(
                lambda m, given, out, name=name: self.see(name, given, out)
            )

    def see(self, name: str, given: tuple[Any, ...], routing: Routing) -> None:
        context: Context = given[1]
        assert context.dropout is not None and context.valid_SB is not None
        self.calls += 1
        key, valid = (name, context.dropout.microbatch), context.valid_SB.flatten().tolist()
        experts, kept_TK = routing.experts_TK.tolist(), routing.kept_TK
        kept = [[True] * TOPK] * len(experts) if kept_TK is None else kept_TK.tolist()
        self.tokens[key], self.kept[key] = Counter(), 0
        for token, chosen in enumerate(experts):
            for choice, expert in enumerate(chosen):
                if valid[token]:
                    self.tokens[key][expert] += 1
                    self.kept[key] += kept[token][choice]
        self.losses[key] = {name: loss.item() for name, loss in routing.losses.items()}


@pytest.mark.parametrize("words", ["", "--moe-expert-capacity-factor 0.5"])
def test_every_valid_token_of_a_microbatch_is_counted_once_in_each_layer(words: str) -> None:
    passes, given = passes_of(words), microbatches()
    watched, sums = Watched(passes.chunks[0]), passes.accumulator()

    def key_of(number: int) -> DropoutKey:
        return DropoutKey(1, 1, number, 0)

    passes.train(given, MICROBATCHES, sums, divisor=1.0, key_of=key_of)
    totals = sums.reduce()
    assert totals.loads is not None and watched.calls == 2 * 3 * MICROBATCHES  # recomputed
    (layers,) = expert_loads.rows([totals.loads])
    assert [row["layer"] for row in layers] == [0, 2, 3]  # and one that looks ahead
    weights = [one["loss_mask"].sum().item() for one in given]
    for name, row in zip(watched.names, layers, strict=True):
        keys = [(name, number) for number in range(MICROBATCHES)]
        tokens = sum((watched.tokens[key] for key in keys), Counter())
        counts = [tokens[expert] for expert in range(EXPERTS)]
        # The layer that looks ahead has targets one token later: of each microbatch one sample
        # loses a valid token, the other one its first, which is not.
        fewer = MICROBATCHES if row["layer"] == 3 else 0
        chosen = TOPK * (sum(weights) - fewer)
        kept = sum(watched.kept[key] for key in keys)
        assert sum(counts) == chosen and row["tokens"] == counts
        assert row["imbalance"] == pytest.approx(max(counts) / (chosen / EXPERTS), rel=1e-12)
        assert row["dropped"] == pytest.approx((chosen - kept) / chosen, abs=1e-15)
        assert (kept < chosen) == bool(words)
        for loss in ("load_balancing_loss", "z_loss"):
            parts = zip(keys, weights, strict=True)
            wanted = sum(watched.losses[key][loss] * weight for key, weight in parts)
            assert row[loss] == pytest.approx(wanted / sum(weights), rel=1e-12)
    for loss in ("load_balancing_loss", "z_loss"):
        mean = sum(float(row[loss]) for row in layers) / 3  # type: ignore[arg-type]
        assert totals.auxiliary_losses[loss] == pytest.approx(mean, rel=1e-12)


def test_one_rank_with_all_experts_has_no_overload() -> None:
    """As a run says of --log-moe-overload-factor: without effect."""
    passes = passes_of("--log-moe-overload-factor")
    sums = passes.accumulator()
    passes.train(
        microbatches(), MICROBATCHES, sums, divisor=1.0, key_of=lambda n: DropoutKey(1, 1, n, 0)
    )
    (layers,) = expert_loads.rows([sums.reduce().loads])
    assert all("overload" not in row for row in layers)
    assert "expert_overload" not in expert_loads.summary(layers)


def test_losses_of_balance_are_means_over_the_layers_that_choose_by_score() -> None:
    passes, given = passes_of("--moe-n-hash-layers 1"), microbatches()
    sums = passes.accumulator()

    def key_of(number: int) -> DropoutKey:
        return DropoutKey(1, 1, number, 0)

    passes.train(given, MICROBATCHES, sums, divisor=1.0, key_of=key_of)
    totals = sums.reduce()
    assert totals.loads is not None
    (layers,) = expert_loads.rows([totals.loads])
    # Layer 0 and the layer that looks ahead, whose own number is 0, go by token ids.
    losses = [row.get("load_balancing_loss") for row in layers]
    assert losses[0] is losses[2] is None and losses[1] is not None
    assert totals.auxiliary_losses["load_balancing_loss"] == pytest.approx(losses[1], rel=1e-12)
    mean = sum(float(row["z_loss"]) for row in layers) / 3  # type: ignore[arg-type]
    assert totals.auxiliary_losses["z_loss"] == pytest.approx(mean, rel=1e-12)


def test_an_evaluation_counts_nothing() -> None:
    passes = passes_of("")
    sums = passes.accumulator(trains=False)
    passes.evaluate(microbatches(), MICROBATCHES, sums)
    assert sums.reduce().loads is None


def loads(*sums: list[float], denominator: float = 2.0) -> Loads:
    counted = Counted((1, 3), 4, ("z_loss",))
    return Loads(counted, torch.tensor(sums, dtype=torch.float64), denominator)


LOADS = loads([4, 0, 2, 2, 6, 3.0], [2, 2, 2, 2, 8, 5.0])
ROWS: list[LayerRow] = [
    {
        "layer": 1,
        "tokens": [4, 0, 2, 2],
        "imbalance": 2.0,
        "idle": 0.25,
        "dropped": 0.25,
        "z_loss": 1.5,
    },
    {
        "layer": 3,
        "tokens": [2, 2, 2, 2],
        "imbalance": 1.0,
        "idle": 0.0,
        "dropped": 0.0,
        "z_loss": 2.5,
    },
]


def test_the_fullest_rank_is_told_where_it_is_asked_for() -> None:
    """Of two ranks with two experts each: 6 of 10 choices are 1.2 of an even share."""
    counted = Counted((1, 3), 4, (), ranks=2)
    sums = torch.tensor([[1, 5, 2, 2, 10], [0, 0, 4, 4, 8]], dtype=torch.float64)
    (layers,) = expert_loads.rows([Loads(counted, sums, 2.0)])
    assert [row["overload"] for row in layers] == pytest.approx([1.2, 2.0])
    found = expert_loads.summary(layers)
    assert found["expert_overload"] == pytest.approx(1.6)
    assert found["worst_expert_overload"] == pytest.approx(2.0)
    assert "expert_overload" not in expert_loads.summary(ROWS)


def test_layers_are_told_in_file_line_and_board(tmp_path: Path) -> None:
    lines: list[str] = []
    config = LoggingConfig.resolve(moe_per_layer_logging=True)
    writers = [
        JsonLines(str(tmp_path / "m.jsonl")),
        TensorBoard(str(tmp_path / "board"), config, 0),
    ]
    metrics = Metrics(facts(), writers, lines.append, show_experts=True)
    metrics.add(iteration(1, loads=LOADS))
    metrics.add(iteration(2, left_out=True, skipped=True))
    metrics.add(iteration(3, loads=loads([8, 0, 0, 0, 8, 1.0], [8, 0, 0, 0, 8, float("nan")])))
    metrics.print_line(NOW)
    metrics.close()
    first, second, third = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["experts"] == ROWS
    assert (first["expert_imbalance"], first["worst_expert_imbalance"]) == (1.5, 2.0)
    assert first["dropped_choices"] == 0.125 and "experts" not in second
    assert third["experts"][1]["z_loss"] is None
    wanted = (
        "| expert imbalance: 2.7500 | worst expert imbalance: 3.0000 | dropped choices: 0.0625 |"
    )
    assert wanted in lines[0]
    assert lines[1:] == [
        " experts of layer    1 | imbalance: 4.0000 | idle: 0.7500 | dropped: 0.0000 |"
        " z_loss: 0.5000 | tokens: 8 0 0 0 |",
        " experts of layer    3 | imbalance: 4.0000 | idle: 0.7500 | dropped: 0.0000 |"
        " z_loss: nan | tokens: 8 0 0 0 |",
    ]
    board = EventAccumulator(str(tmp_path / "board"), {"histograms": 0, "scalars": 0}).Reload()
    for tag, value in {
        "moe/imbalance": 1.5,
        "moe/worst_imbalance": 2.0,
        "moe/dropped": 0.125,
        "moe/dropped_layer_1": 0.25,
        "moe/imbalance_layer_3": 1.0,
        "moe/z_loss_layer_3": 2.5,
    }.items():
        point = board.Scalars(tag)[0]
        assert (point.step, point.value) == (1, value)
    bars = board.Histograms("moe/tokens_layer_1")[0].histogram_value
    assert (bars.num, list(bars.bucket)) == (8, [4, 0, 2, 2])


def test_layers_are_told_on_request(tmp_path: Path) -> None:
    lines: list[str] = []
    metrics = Metrics(facts(), [], lines.append)
    metrics.add(iteration(1, loads=LOADS))
    metrics.print_line(NOW)
    assert len(lines) == 1 and "expert imbalance: 1.5000 |" in lines[0]
    row = {**iteration(1).__dict__, "global_batch_size": 4, "group_names": {}, "loss_names": {}}
    row |= {"experts": ROWS, **expert_loads.summary(ROWS)}
    named = tags(row, LoggingConfig.resolve())
    assert {tag for tag in named if tag.startswith("moe/")} == {
        "moe/imbalance",
        "moe/worst_imbalance",
        "moe/dropped",
    }


def test_attempts_are_found_behind_long_rows(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    row = {"attempt": 3, "experts": [{"tokens": [1] * 40_000}]}
    path.write_text('{"attempt": 2}\n' + json.dumps(row) + "\n")
    assert last_attempt(str(path)) == 3
