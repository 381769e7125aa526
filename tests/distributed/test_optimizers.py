"""Muon and Lion on layouts: equal to the serial run, and every byte between ranks as planned.

Lion steps by signs, so a gradient that is nothing but rounding would make a whole step: its model
has no biases that attention cannot see. Weights are compared after three steps.
"""

import math
from dataclasses import replace

import pytest
import torch

import pretrain_gpt
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import read_settings
from megatron.training.build import build_chunks, build_run_optimizer
from megatron.training.config import RunConfig
from megatron.training.processes import setup
from megatron.training.verification import equality
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import compare
from megatron.training.verification.small_run import SmallRun
from tests.harness import Pool
from tests.outcome_cache import OutcomeCache
from tools.verify_layout import case, closed_form

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1"
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --position-embedding-type rope --mtp-num-layers 1"
)
MUON = "--optimizer muon --muon-nesterov"
VARIANTS = {
    "muon": MUON,
    "muon llama": f"{LLAMA} {MUON} --decoupled-lr 2e-2 --muon-scale-mode shape_scaling",
    "muon distributed": f"{LLAMA} {MUON} --muon-tp-mode distributed --decoupled-lr 3e-2",
    "muon one matrix": f"{MUON} --muon-no-split-qkv --muon-tp-mode distributed "
    "--muon-coefficient-type polar_express --muon-scale-mode unit_rms_norm",
    "muon latent": f"{LATENT} {MUON} --no-decoupled-weight-decay "
    "--param-group-overrides mtp.*:lr_mult=0.5 *.linear_proj.weight:optimizer=adam,wd_mult=2",
    "lion": f"{LLAMA} --weight-decay 0.1",
}
FAST = [
    ("muon", "tp2"),
    ("muon llama", "tp4 pp2"),
    ("muon distributed", "tp4 dp2"),
    ("muon", "dp3 optim overlap --ddp-bucket-size 4000 --overlap-param-gather"),
    ("muon llama", "tp4 sp dp2 optim_grads_params"),
    ("lion", "tp2 dp2 optim"),
]
SLOW = [
    ("muon", "tp4 sp; dp2; pp2; pp2 zb-v dp2; cp2; tp2 pp2 dp2; dp2 overlap --ddp-bucket-size 900"),
    ("muon", "dp4 optim; dp2 optim_grads; dp3 optim_grads_params overlap; pp2 zb-v dp2 optim"),
    ("muon", "dp4 optim --num-distributed-optimizer-instances 2; cp2 optim_grads"),
    ("muon llama", "tp2 sp; tp8; dp3; pp4; tp2 cp2 pp2; tp2 pp2 cp2 dp2 optim"),
    ("muon distributed", "tp2; tp8 sp; tp2 pp2; tp4 dp2 optim; tp2 sp dp2 optim_grads"),
    ("muon one matrix", "tp2; tp2 sp dp2"),
    ("muon latent", "tp2; tp4 sp; pp2 dp2"),
    ("lion", "tp4 sp; pp4; cp2 dp2"),
]
MATRIX = [
    *FAST,
    *(
        pytest.param(variant, text.strip(), marks=pytest.mark.slow)
        for variant, texts in SLOW
        for text in texts.split(";")
    ),
]


def with_lion(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, optimizer="lion"))


def on(variant: str, text: str) -> tuple[RunConfig, RunConfig]:
    """Return the run of a variant on a layout, and the serial one."""
    small = SmallRun(read_settings(f"{MODEL} {VARIANTS[variant]}".split(), "test").values)
    layout = parse_layout(text, "test")
    both = small.on(layout), small.reference(layout)
    return (with_lion(both[0]), with_lion(both[1])) if variant == "lion" else both


@pytest.fixture(scope="module")
def serial(pool: Pool) -> OutcomeCache:
    """Return serial runs."""
    return OutcomeCache(pool)


@pytest.mark.parametrize(("variant", "text"), MATRIX)
def test_equals_the_serial_run(serial: OutcomeCache, variant: str, text: str) -> None:
    config, reference = on(variant, text)
    outcome = equality.run(serial.pool, case(config))
    apart = compare(outcome, serial.of(reference))
    assert apart.largest <= 1e-10, apart
    assert outcome.traffic == closed_form(config)


def _norms(rank: int, config: RunConfig) -> dict[str, float]:
    """Return the norm of each group's gradient, which is made the weight itself here."""
    mesh = setup.connected_mesh(config, torch.device("cpu"))
    tp = config.parallel.tensor_model_parallel_size
    vocabulary = resolve_vocabulary(config.tokenizer, 61, tp)
    chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    optimizer = build_run_optimizer(config, chunks, mesh)
    for buffer in optimizer.data_parallel.buffers:
        buffer.grad.copy_(buffer.data)
    norms = {name: float(norm) for name, norm in optimizer.norms.by_group(2.0).items()}
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    assert whole == pytest.approx(2.0 * float(optimizer.norms.weights()), rel=1e-12)
    return norms


@pytest.mark.parametrize("text", ["tp4 sp pp2", "tp2 dp2 optim", "pp2 zb-v dp2"])
def test_norms_of_groups_are_those_of_the_serial_run(pool: Pool, text: str) -> None:
    """Also of groups that one end of the pipeline has alone."""
    config, reference = on("muon llama", text)
    (expected,) = pool.run(1, _norms, reference)
    assert len(expected) == 3 and min(expected.values()) > 0
    for norms in pool.run(config.process.world_size, _norms, config):
        assert norms == pytest.approx(expected, rel=1e-12)


def test_blockwise_is_another_update(serial: OutcomeCache) -> None:
    """The comparison can fail: parts that are orthogonal by themselves are no orthogonal whole."""
    config, reference = on("muon", "tp2")
    optimizer = replace(config.optimizer, muon_tp_mode="blockwise")
    outcome = equality.run(serial.pool, case(replace(config, optimizer=optimizer)))
    apart = compare(outcome, serial.of(reference))
    assert apart.gradients <= 1e-10 and apart.weights > 1e-3
    assert ("tp", "all_gather") not in outcome.traffic[0]
