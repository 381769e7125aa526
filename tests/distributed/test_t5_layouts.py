"""An encoder-decoder trains on every layout as on one process, number by number.

A layout passes when every loss, gradient, gradient norm and weight of three iterations equals the
serial run's to 1e-10. Samples have unequal lengths and unequal padding.
"""

from collections.abc import Iterator

import pytest

from megatron.training.arguments import read_settings
from megatron.training.config import RunConfig
from megatron.training.verification import equality
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import Outcome, compare
from megatron.training.verification.small_run import SmallRun
from tests.harness import Pool
from tests.outcome_cache import OutcomeCache
from tools.verify_layout import case

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
        tp2 sp; dp2 optim_grads_params; tp2; dp3; tp4 sp dp2 optim; dp2 torch_fsdp2
    """,
    "relative": "tp2 sp dp2 optim_grads_params overlap; tp4; dp4 optim overlap",
    "tied": "tp2 sp; dp2 optim_grads",
    "rotary": "tp2 sp dp2 optim_grads_params; tp2",
    "parts": "tp2 sp",
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


@pytest.mark.parametrize(("variant", "text"), MATRIX, ids=lambda value: value)
def test_equals_the_serial_run(runs: Runs, variant: str, text: str) -> None:
    config, reference = runs.on(variant, text)
    assert config.model.has_two_stacks and config.data.t5.decoder_seq_length
    outcome, expected = equality.run(runs.pool, case(config)), runs.serial(reference)
    apart = compare(outcome, expected)
    assert apart.largest <= 1e-10, apart
