"""An encoder-decoder trains on every layout as on one process, number by number.

A layout passes when every loss, gradient, gradient norm and weight of three iterations equals the
serial run's to 1e-10, and ranks move what the closed form says. Samples have unequal lengths and
unequal padding.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron.core import comm
from megatron.core.comm import Handle
from megatron.core.context_parallel import partition
from megatron.core.mesh import Axis
from megatron.core.models.t5 import T5Model
from megatron.core.rng import DropoutKey
from megatron.training.arguments import read_settings
from megatron.training.batches import Batch
from megatron.training.config import RunConfig
from megatron.training.verification import equality
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import Outcome, Share, compare, join
from megatron.training.verification.small_run import SmallRun
from pretrain_t5 import forward_step
from tests.distributed.test_layouts import with_dropout
from tests.harness import Pool
from tests.outcome_cache import OutcomeCache
from tools.verify_layout import case, closed_form

MODEL = (
    "--encoder-num-layers 3 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 8 "
    "--kv-channels 6 --encoder-seq-length 24 --decoder-seq-length 16 --micro-batch-size 2"
)
VARIANTS = {
    "learned": "",
    "relative": "--position-embedding-type relative --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 10 --normalization RMSNorm --geglu-tanh "
    "--disable-bias-linear --untie-embeddings-and-output-weights --softmax-scale 1",
    "tied": "--position-embedding-type relative --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 20 --normalization RMSNorm --relu --disable-bias-linear "
    "--logit-multiplier 0.2 --no-calculate-per-token-loss",
    "rotary": "--position-embedding-type rope --recompute-granularity full --recompute-method "
    "uniform --recompute-num-layers 2 --logits-at-once 300",
    "parts": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
}
LAYOUTS = {
    "learned": """
        tp2 sp pp2 cp2; dp2 optim_grads_params; tp2; dp3; tp4 sp dp2 optim; dp2 torch_fsdp2
        pp2 gpipe; pp2 1f1b; pp3; pp5; pp2 vpp2; pp2 zb-h1; pp2 zb-v
        pp2 --pipeline-model-parallel-split-rank 1; pp3 --pipeline-model-parallel-split-rank 2
        pp2 --pipeline-model-parallel-layout 'E|ttt|t|tL'; cp2; cp2 all_gather; cp2 a2a; cp4 a2a+p2p
        pp2 --decoder-first-pipeline-num-layers 1; tp2 sp cp2 a2a pp2 vpp2 dp2 optim_grads overlap
    """,
    "relative": """
        tp2 sp dp2 optim_grads_params overlap; tp4; dp4 optim overlap; cp2; cp4; cp2 all_gather
        pp2 vpp2; pp3; tp2 sp pp2 cp2 --pipeline-model-parallel-split-rank 1; pp2 zb-v
        pp2 vpp2 dp2 optim_grads_params overlap
    """,
    "tied": """
        tp2 sp; dp2 optim_grads; pp2 --pipeline-model-parallel-split-rank 1; pp2 vpp2; pp4
        cp2 pp2 dp2 optim; pp3 zb-h1; pp2 zb-v dp2 optim_grads overlap
    """,
    "rotary": "tp2 sp dp2 optim_grads_params; tp2; cp2; pp2 vpp2; tp2 sp cp2 pp2",
    "parts": "tp2 sp; pp2 cp2; cp2",
}
BY_DEFAULT = {
    ("learned", "pp2 vpp2"),
    ("learned", "cp2 a2a"),
    ("relative", "tp2 sp pp2 cp2 --pipeline-model-parallel-split-rank 1"),
    ("relative", "pp2 vpp2 dp2 optim_grads_params overlap"),
    ("tied", "pp2 zb-v dp2 optim_grads overlap"),
    ("rotary", "tp2 sp dp2 optim_grads_params"),
}
MATRIX = [
    (variant, text.strip())
    for variant, texts in LAYOUTS.items()
    for text in texts.replace("\n", ";").split(";")
    if text.strip()
]


class Runs:
    """Small runs of a variant on layouts, and the serial ones, each made once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._serial = OutcomeCache(pool)

    def on(self, variant: str, text: str) -> tuple[RunConfig, RunConfig]:
        """Return the run of a variant on a layout, and the serial one."""
        small = SmallRun(read_settings(f"{MODEL} {VARIANTS[variant]}".split(), "test").values)
        layout = parse_layout(text, "test")
        return small.on(layout), small.reference(layout)

    def serial(self, config: RunConfig) -> Outcome:
        return self._serial.of(config)


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Iterator[Runs]:
    yield Runs(pool)


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        pytest.param(*one, marks=[] if one in BY_DEFAULT else pytest.mark.slow, id="-".join(one))
        for one in MATRIX
    ],
)
def test_equals_the_serial_run(runs: Runs, variant: str, text: str) -> None:
    config, reference = runs.on(variant, text)
    assert config.model.has_two_stacks and config.data.t5.decoder_seq_length
    outcome, expected = equality.run(runs.pool, case(config)), runs.serial(reference)
    apart = compare(outcome, expected)
    assert apart.largest <= 1e-10, apart
    assert outcome.traffic == closed_form(config)


def test_the_matrix_is_large() -> None:
    assert len(set(MATRIX)) == len(MATRIX) >= 16 and set(MATRIX) >= BY_DEFAULT


@pytest.mark.parametrize("text", ["pp2 vpp2 dp2", "pp2 --pipeline-model-parallel-split-rank 1"])
def test_dropout_is_that_of_the_serial_run(runs: Runs, text: str) -> None:
    """Masks belong to a microbatch and a place, of which both embeddings have one each."""
    config, reference = (with_dropout(one) for one in runs.on("learned", text))
    outcome, expected = equality.run(runs.pool, case(config)), runs.serial(reference)
    assert compare(outcome, expected).largest <= 1e-10
    assert compare(expected, runs.serial(runs.on("learned", text)[1])).loss > 1e-4


def with_the_mask(rank: int, one: equality.Case) -> Share:
    """Train with the decoder's padding hidden from its own attention by a mask as well."""

    def step(model: T5Model, batch: Batch, x: Tensor | None, key: DropoutKey | None) -> Any:
        cp, counts_TB = model.mesh.cp, batch["loss_mask"].t().contiguous()
        valid_BT = partition.unzigzag(comm.all_gather(counts_TB, cp), cp.size).t() > 0
        real = model.decoder.forward
        model.decoder.forward = lambda x_TBH, context: real(
            x_TBH, replace(context, valid_BT=valid_BT)
        )
        try:
            return forward_step(model, batch, x, key)
        finally:
            model.decoder.forward = real

    program = replace(one.program, forward_step=step)
    return equality.train_on_rank(rank, replace(one, program=program))


@pytest.mark.parametrize("text", ["dp1", "tp2", "cp2"])
def test_padding_at_the_decoders_end_needs_no_mask(runs: Runs, text: str) -> None:
    """A token that counts sees none after it, and what padding sees counts for nothing."""
    config, reference = runs.on("relative", text)
    shares = runs.pool.run(config.process.world_size, with_the_mask, case(config))
    assert compare(join(shares), runs.serial(reference)).largest <= 1e-10


def without_sums(rank: int, one: equality.Case, along: str) -> Share:
    """Train without any all-reduce over one axis."""
    real = comm.all_reduce

    def broken(x: Tensor, axis: Axis, op: comm.Op = "sum", *, async_op: bool = False) -> Handle:
        return Handle(None) if axis.name == along else real(x, axis, op, async_op=async_op)

    comm.all_reduce = broken
    try:
        return equality.train_on_rank(rank, one)
    finally:
        comm.all_reduce = real


@pytest.mark.parametrize(
    ("text", "along", "worst"),
    [("pp2", "pp", "_relative_pos_emb.weight"), ("cp2", "dp_cp", "")],
)
def test_a_sum_that_is_missing_is_found(runs: Runs, text: str, along: str, worst: str) -> None:
    config, reference = runs.on("relative", text)
    shares = runs.pool.run(config.process.world_size, without_sums, case(config), along)
    apart = compare(join(shares), runs.serial(reference))
    assert apart.gradients > 1e-4 and worst in apart.worst, apart
