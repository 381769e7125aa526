"""The equality matrix: every layout trains as one process does, number by number.

A layout passes when every loss, gradient, gradient norm and weight of three iterations equals the
serial run's to 1e-10, when ranks agree on what they hold alike, and when every rank has moved
exactly the bytes of the closed form.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import Tensor

from megatron.core import comm
from megatron.core.comm import Handle
from megatron.core.mesh import Axis
from megatron.training.arguments import read_settings
from megatron.training.config import RunConfig
from megatron.training.verification import equality
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import Outcome, Share, compare, join
from megatron.training.verification.small_run import SmallRun
from tests.harness import Pool
from tests.outcome_cache import OutcomeCache
from tools.verify_layout import case, closed_form

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1"
)
ROTARY = "--position-embedding-type rope"
# Every vocabulary has 61 ids, which no layout divides, and samples differ in how many tokens count.
VARIANTS = {
    "gpt2": "",
    "llama": f"{ROTARY} --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "one-group": f"{ROTARY} --group-query-attention --num-query-groups 1 --add-qkv-bias "
    "--disable-bias-linear --micro-batch-size 2",
    "window": f"{ROTARY} --window-size 3,0 --window-attn-skip-freq 2 --qk-layernorm "
    "--rotary-percent 0.5 --no-calculate-per-token-loss",
    "alibi": "--position-embedding-type alibi --softmax-type learnable --squared-relu "
    "--apply-layernorm-1p --untie-embeddings-and-output-weights",
    "packed": f"{ROTARY} --reset-position-ids --reset-attention-mask --eod-mask-loss",
    "pieces": f"{ROTARY} --logits-at-once 300 --no-calculate-per-token-loss --label-smoothing 0.1",
    "recomputed": f"{ROTARY} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 3 --mtp-num-layers 1",
    "offloaded": f"{ROTARY} --optimizer-cpu-offload --optimizer-offload-fraction 0.4",
    "pairs": "--micro-batch-size 2",
    "packed-means": "--reset-position-ids --reset-attention-mask --eod-mask-loss "
    "--no-calculate-per-token-loss --optimizer sgd --micro-batch-size 2",
}
LAYOUTS = {
    "gpt2": """
        tp2; tp4; tp8; tp2 sp; tp4 sp; tp2 sp --tp-comm-overlap
        pp2 gpipe; pp2 1f1b; pp2 zb-h1; pp2 zb-v; pp2 vpp2; pp3; pp4; pp4 zb-h1
        pp2 --decoder-first-pipeline-num-layers 1; pp2 --decoder-last-pipeline-num-layers 1
        pp3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        pp2 --pipeline-model-parallel-layout 'E|t|tt|tL'; pp2 --no-overlap-p2p-communication
        pp2 vpp2 --microbatch-group-size-per-virtual-pipeline-stage 4
        cp2; cp2 all_gather; cp2 a2a; cp4 a2a+p2p
        dp2; dp3; dp4 overlap --ddp-bucket-size 900; dp2 overlap --ddp-num-buckets 3
        dp3 optim; dp4 optim overlap --ddp-bucket-size 900 --overlap-param-gather
        dp2 optim_grads
        dp3 optim_grads_params --init-model-with-meta-device; dp4 optim_grads_params overlap
        dp4 optim --num-distributed-optimizer-instances 2; cp2 optim_grads overlap
        dp4 optim_grads_params --num-distributed-optimizer-instances 2
        dp2 torch_fsdp2; dp3 torch_fsdp2 --init-model-with-meta-device; cp2 torch_fsdp2
        dp2 torch_fsdp2 --torch-fsdp2-no-reshard-after-forward; tp2 sp dp2 torch_fsdp2
        dp4 torch_fsdp2 --num-distributed-optimizer-instances 2
        pp2 zb-h1 dp2 optim_grads overlap; pp2 zb-v dp2 optim --overlap-param-gather
        tp2 sp pp2 zb-v dp2 optim_grads_params overlap; pp2 dp2 optim --ddp-num-buckets 3
        tp2 sp pp2 vpp2 dp2 optim_grads_params; tp2 sp pp2 vpp2 cp2 dp2 optim_grads
        tp2 pp2 dp2; tp2 sp pp2 zb-v dp2 overlap --ddp-bucket-size 900
        tp2 sp pp2 vpp2 cp2 dp2
        tp2 cp2 pp2 dp2 --use-tp-pp-dp-mapping
    """,
    "llama": """
        tp4; tp4 sp; tp8 sp; pp2 zb-v overlap dp2; cp4 a2a; cp4; tp2 cp2 all_gather
        tp4 sp cp2; tp2 sp cp2 pp2; tp4 sp pp4; tp2 sp pp2 vpp2 dp2 --use-tp-pp-dp-mapping
        tp2 pp2 cp2 a2a --pipeline-model-parallel-layout 'Ettt|tL'
        tp4 sp pp2 zb-v --tp-comm-overlap; tp4 sp dp2 optim; tp4 sp dp2 optim_grads_params overlap
        pp2 zb-v dp2 optim_grads_params; cp2 dp2 optim_grads_params; dp4 torch_fsdp2
        tp2 sp cp2 torch_fsdp2 --tp-comm-overlap
    """,
    "one-group": """
        tp2; tp8 sp; cp2 a2a; tp2 cp4 a2a+p2p; tp2 sp pp2 gpipe cp2 all_gather
    """,
    "window": """
        tp2 sp; cp2; cp4 all_gather; cp2 a2a; cp4 a2a+p2p; tp4 sp pp2 zb-h1
        cp2 dp2 --cp-comm-type p2p a2a all_gather p2p
    """,
    "alibi": """
        tp4; tp2 sp; cp2; cp4 all_gather; cp2 a2a; cp4 a2a+p2p; pp2 zb-v; tp2 sp cp2 pp2
    """,
    "packed": """
        tp2 sp; cp2; cp4; cp4 all_gather; cp2 a2a; cp4 a2a+p2p; pp4; dp4 overlap
        tp2 sp cp2 pp2 zb-v
    """,
    "pieces": """
        tp2; tp2 sp pp2 zb-v; cp2 tp2 sp; tp4 pp2 zb-h1; tp2 sp dp2 torch_fsdp2
    """,
    "recomputed": """
        dp2 optim_grads_params; pp2 dp2 optim_grads_params overlap; pp2 zb-v dp2 optim_grads_params
        dp2 torch_fsdp2
    """,
    "offloaded": "dp3 optim; tp2 sp pp2 dp2 optim_grads_params",
    "packed-means": """
        tp2; cp4; dp4; pp2 vpp2; cp2 a2a pp2 dp2; tp2 sp cp2 dp2
    """,
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
        words = f"{MODEL} {VARIANTS[variant]}".split()
        small = SmallRun(read_settings(words, "test").values)
        layout = parse_layout(text, "test")
        return small.on(layout), small.reference(layout)

    def serial(self, config: RunConfig) -> Outcome:
        return self._serial.of(config)


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Iterator[Runs]:
    yield Runs(pool)


@pytest.mark.parametrize(("variant", "text"), MATRIX, ids=lambda value: value)
def test_equals_the_serial_run(runs: Runs, variant: str, text: str) -> None:
    config, reference = runs.on(variant, text)
    outcome, expected = equality.run(runs.pool, case(config)), runs.serial(reference)
    apart = compare(outcome, expected)
    assert apart.largest <= 1e-10, apart
    assert outcome.traffic == closed_form(config)


def test_the_matrix_is_large() -> None:
    """At least 40 layouts of 2 to 16 processes, each axis alone and all together."""
    worlds = {parse_layout(text, "test").world_size for _, text in MATRIX}
    assert len(MATRIX) >= 40 and {2, 3, 4, 8, 16} == worlds
    assert len(set(MATRIX)) == len(MATRIX)


def with_dropout(config: RunConfig, of_attention: float = 0.2) -> RunConfig:
    attention = replace(config.model.attention, attention_dropout=of_attention)
    return replace(config, model=replace(config.model, attention=attention, hidden_dropout=0.2))


@pytest.mark.parametrize("text", ["dp2", "pp2 vpp2", "pp2 zb-v dp2", "pp4 dp2"])
def test_dropout_is_that_of_the_serial_run(runs: Runs, text: str) -> None:
    """Masks belong to a microbatch of the global batch, whoever works on it."""
    config, reference = (with_dropout(one) for one in runs.on("gpt2", text))
    outcome, expected = equality.run(runs.pool, case(config)), runs.serial(reference)
    assert compare(outcome, expected).largest <= 1e-10
    without = runs.serial(runs.on("gpt2", text)[1])
    assert compare(expected, without).loss > 1e-4


@pytest.mark.parametrize("text", ["tp2", "tp2 pp2 dp2"])
def test_dropout_of_what_no_axis_cuts_is_that_of_the_serial_run(runs: Runs, text: str) -> None:
    """Tensor parallelism alone cuts heads, not the stream; ranks have it in another order."""
    config, reference = (with_dropout(one, 0.0) for one in runs.on("pairs", text))
    outcome, expected = equality.run(runs.pool, case(config)), runs.serial(reference)
    assert compare(outcome, expected).largest <= 1e-10


def _without_sums(rank: int, one: equality.Case, along: str) -> Share:
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
    ("variant", "text", "along"),
    [
        ("gpt2", "tp2 sp", "tp"),
        ("gpt2", "dp2", "dp_cp"),
        ("gpt2", "cp2", "dp_cp"),
        ("gpt2", "pp2", "ends"),
        ("llama", "tp4", "kv_replica"),
        ("window", "cp2", "cp"),
    ],
)
def test_a_sum_that_is_missing_is_found(runs: Runs, variant: str, text: str, along: str) -> None:
    """The comparison can fail: each kind of sum, left out, is seen in the gradients."""
    config, reference = runs.on(variant, text)
    shares = runs.pool.run(config.process.world_size, _without_sums, case(config), along)
    apart = compare(join(shares), runs.serial(reference))
    assert not apart.are_equal and apart.gradients > 1e-4
    assert apart.worst.startswith("gradient of ") or apart.worst.startswith("weight ")
