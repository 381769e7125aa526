"""Memory of ranks that train: planned bytes of every category against those that are there.

Weights, gradients, masters and states are compared to the byte. What is there for communication is
counted where it is made (`core/held`), what autograd saves as in `test_activations`; the most of
each, and of both at one time, over two iterations: in the first the order of units is learned.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron.core import held, saved_tensors
from megatron.core.held import Held
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.build import build_run_optimizer
from megatron.training.config import RunConfig
from megatron.training.plan.gathered import gathered
from megatron.training.plan.memory import MemoryPlan
from megatron.training.processes import setup
from megatron.training.verification import equality
from tests.harness import Pool
from tools.verify_layout import case

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--device cpu --dry-run"
)


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank."""

    fixed: dict[str, int]
    activations: int
    communication: int
    together: int


class Both:
    """Follows two counts, and the most of their sum."""

    def __init__(
        self, saved: saved_tensors.Saved, passing: Held, patch: pytest.MonkeyPatch
    ) -> None:
        self.saved, self.passing, self.most = saved, passing, 0
        see, change = saved.see, passing.change
        patch.setattr(saved, "see", lambda x: (see(x), self._look())[0])
        patch.setattr(passing, "change", lambda size: (change(size), self._look())[0])

    def _look(self) -> None:
        self.most = max(self.most, self.saved.now + self.passing.now)


def train(rank: int, run: RunConfig) -> Measured:
    """Train two iterations and return what was there."""
    mesh = setup.connected_mesh(run, torch.device("cpu"))
    built: list[Optimizer] = []
    with pytest.MonkeyPatch.context() as patch, saved_tensors.counting([]) as meter:

        def build(*arguments: Any) -> Optimizer:
            optimizer = build_run_optimizer(*arguments)
            for buffer in optimizer.data_parallel.buffers:
                meter.ignore([buffer.data, buffer.grad])
            built.append(optimizer)
            return optimizer

        patch.setattr(equality, "build_run_optimizer", build)
        with held.counting() as passing:
            both = Both(meter, passing, patch)
            equality.train(replace(case(run), vocabulary=100), mesh)
            assert passing.now == 0
    return Measured(built[0].memory(), meter.most, passing.most, both.most)


def config(text: str) -> RunConfig:
    return parse(f"{SMALL} {text}".split()).config


DP2, DP3, DP4 = (f"--dry-run-world-size {n} --global-batch-size {2 * n}" for n in (2, 3, 4))
TP2, PP2 = (f"{DP4} --{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline"))
STATES = "--use-distributed-optimizer"
GRADS, ALL = (
    f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params")
)
OVERLAP = "--overlap-grad-reduce"
NARROW = "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32"
SHORT = (
    "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    "--main-grads-dtype bf16 --main-params-dtype fp16 --adam-beta2 0.95"
)
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
RUNS = {
    "dp2, states, copies in half": f"{DP2} {STATES} {NARROW}",
    "dp3, gradients, overlap": f"{DP3} {GRADS} {OVERLAP} --optimizer sgd",
    "dp4, all": f"{DP4} {ALL} {OVERLAP}",
    "dp4, all in two groups": f"{DP4} {ALL} --num-distributed-optimizer-instances 2",
    "dp2, short formats": f"{DP2} {GRADS} {SHORT}",
    "tp2 sp dp2, all": f"{TP2} --sequence-parallel {ALL} {OVERLAP}",
    "pp2 zb-v dp2, all": f"{PP2} --pipeline-schedule zb-v {ALL} --global-batch-size 8",
    "dp2, all, layers in pairs run again": f"{DP2} {ALL} {WHOLE} 2",
}
MORE = {
    "dp2": DP2,
    "dp2, copies in half": f"{DP2} {NARROW}",
    "nobody to send to": f"--dry-run-world-size 1 {NARROW}",
    "dp2, states": f"{DP2} {STATES} {OVERLAP} --ddp-num-buckets 3",
    "dp2, gradients": f"{DP2} {GRADS} --bf16",
    "dp2, gradients, copies in half": f"{DP2} {GRADS} {NARROW}",
    "dp2, all": f"{DP2} {ALL}",
    "dp2, all, moments with scales": f"{DP2} {ALL} --bf16 --use-precision-aware-optimizer "
    "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
    "dp3, all": f"{DP3} {ALL} {OVERLAP} --untie-embeddings-and-output-weights",
    "dp2, all, short formats": f"{DP2} {ALL} {OVERLAP} {SHORT}",
    "dp4, states in two groups": f"{DP4} {STATES} --num-distributed-optimizer-instances 2",
    "tp2 dp2, states, one key head": f"{TP2} {STATES} --group-query-attention --num-query-groups 1",
    "tp2 sp dp2, states, buckets": f"{TP2} --sequence-parallel {STATES} --ddp-bucket-size 9000",
    "tp2 dp2, gradients, muon": f"{TP2} {GRADS} --optimizer muon",
    "cp4, all": f"--dry-run-world-size 4 --context-parallel-size 4 {ALL}",
    "cp2": "--dry-run-world-size 2 --context-parallel-size 2",
    "cp2, gathered": "--dry-run-world-size 2 --context-parallel-size 2 --cp-comm-type all_gather",
    "pp2 dp2, all": f"{PP2} {ALL} --global-batch-size 8",
    "pp2 vpp2 dp2, all": f"{PP2} --num-virtual-stages-per-pipeline-rank 2 {ALL} "
    "--global-batch-size 8",
    "pp2 zb-h1 dp2, all": f"{PP2} --pipeline-schedule zb-h1 {ALL} --global-batch-size 8",
    "pp2 zb-v dp2, states": f"{PP2} --pipeline-schedule zb-v {STATES} --global-batch-size 8",
    "pp2 zb-v dp2, gradients": f"{PP2} --pipeline-schedule zb-v {GRADS} --global-batch-size 8",
    "dp2, all, ahead": f"{DP2} {ALL} --mtp-num-layers 2 --position-embedding-type rope",
    "dp2, all, muon": f"{DP2} {ALL} --optimizer muon",
    "dp2, all, layers run again": f"{DP2} {ALL} {WHOLE} 1",
    "dp2, all, a stage runs again": f"{DP2} {ALL} {WHOLE} 4 {OVERLAP}",
    "dp2, all, parts run again": f"{DP2} {ALL} --recompute-granularity selective "
    "--recompute-modules core_attn mlp",
}
EXACT, WITHIN = 0.005, 0.05
"""Of activations and communication, and of both at one time."""


def check(pool: Pool, text: str) -> None:
    """Compare what the ranks of a run have with its plan."""
    check_run(pool, config(text))


def check_run(pool: Pool, run: RunConfig, within: float = WITHIN) -> None:
    rows = resolve_vocabulary(run.tokenizer, 100, run.parallel.tensor_model_parallel_size)
    plan = MemoryPlan(run, rows.padded_rows).ranks()
    found = pool.run(run.process.world_size, train, run)
    per_stage = len(found) // len(plan)
    # Gloo's threads may hold what was gathered until they have something else to do: never less.
    moments = [gathered(run, stage, 1).values() for stage in run.stages]
    late = max((size for sizes in moments for size in sizes), default=0)
    # A second copy of the logits is planned beside what autograd saves.
    copied = 2 * 64 * rows.padded_rows if run.precision.bf16 else 0
    for stage, planned in enumerate(plan):
        mine = found[stage * per_stage : (stage + 1) * per_stage]
        for measured in mine:
            assert measured.fixed == planned.fixed
            margin = copied + EXACT * planned.activations
            assert measured.activations == pytest.approx(planned.activations, abs=margin)
            assert measured.together == pytest.approx(planned.together, rel=within)
        most = max(measured.communication for measured in mine)
        margin = EXACT * planned.communication
        assert planned.communication - margin <= most <= planned.communication + margin + late


@pytest.mark.parametrize("name", RUNS)
def test_planned_bytes_are_those_of_a_run(pool: Pool, name: str) -> None:
    check(pool, RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_planned_bytes_are_those_of_more_runs(pool: Pool, name: str) -> None:
    check(pool, MORE[name])


TWO_STACKS = SMALL.replace(
    "--num-layers 4", "--encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length 32"
)
RELATIVE = "--position-embedding-type relative"
OF_TWO_STACKS = {
    "dp2, all": f"{DP2} {ALL} {OVERLAP}",
    "tp2 sp dp2, gradients": f"{TP2} --sequence-parallel {GRADS} {RELATIVE} --bf16",
    "pp2": f"--dry-run-world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
    f"{RELATIVE}",
}
MORE_OF_TWO_STACKS = {
    "dp2, all, biases": f"{DP2} {ALL} {RELATIVE} --untie-embeddings-and-output-weights",
    "dp2, all, layers run again": f"{DP2} {ALL} {WHOLE} 2",
    "pp2 dp2, all": f"{PP2} {ALL} --global-batch-size 8",
    "pp2 vpp2": "--dry-run-world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
    f"--num-virtual-stages-per-pipeline-rank 2 {RELATIVE}",
    "pp2 zb-v": "--dry-run-world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
    "--pipeline-schedule zb-v",
    "pp2 zb-h1": "--dry-run-world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
    "--pipeline-schedule zb-h1",
    "cp2": f"--dry-run-world-size 2 --context-parallel-size 2 {RELATIVE}",
    "cp2, gathered": "--dry-run-world-size 2 --context-parallel-size 2 --cp-comm-type all_gather",
    "cp2, heads": "--dry-run-world-size 2 --context-parallel-size 2 --cp-comm-type a2a",
}


@pytest.mark.parametrize(
    "name",
    [*OF_TWO_STACKS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE_OF_TWO_STACKS)],
)
def test_planned_bytes_are_those_of_an_encoder_with_a_decoder(pool: Pool, name: str) -> None:
    text = {**OF_TWO_STACKS, **MORE_OF_TWO_STACKS}[name]
    # What cross-attention gathers is planned at the fullest moment of its layer, be it another's.
    run = parse(f"{TWO_STACKS} {text}".split(), "pretrain_t5").config
    check_run(pool, run, 0.08 if "gathered" in name else WITHIN)


def test_copies_of_what_travels_are_gone_when_it_has_arrived(pool: Pool) -> None:
    """The plan has those of all buckets; with overlap, whether one is there is a matter of time."""
    run = config(f"{DP2} {STATES} {OVERLAP} {NARROW} --ddp-num-buckets 5")
    (planned,) = MemoryPlan(run, 128).ranks()
    for measured in pool.run(2, train, run):
        assert planned.communication / 3 <= measured.communication <= planned.communication


EXPERTS = "--num-experts 4 --expert-model-parallel-size 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"{DP4} {EXPERTS} {STATES} --num-distributed-optimizer-instances 2",
        f"{TP2} --dry-run-world-size 8 --expert-tensor-parallel-size 1 {EXPERTS} {ALL} "
        "--num-distributed-optimizer-instances 2 --global-batch-size 8",
        f"{TP2} {EXPERTS} {GRADS} --optimizer muon",
        f"{DP4} {EXPERTS} {STATES} --optimizer muon",
    ],
)
def test_what_is_kept_of_experts_is_as_planned(pool: Pool, text: str) -> None:
    """Whatever tokens choose: weights, gradients and states of each rank."""
    run = config(text)
    rows = resolve_vocabulary(run.tokenizer, 100, run.parallel.tensor_model_parallel_size)
    (planned,) = MemoryPlan(run, rows.padded_rows).ranks()
    for measured in pool.run(run.process.world_size, train, run):
        assert measured.fixed == planned.fixed
