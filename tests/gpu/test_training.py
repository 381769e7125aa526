"""Training on one CUDA device: as on the CPU, repeatable, with checkpoints that go both ways."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core.mesh import Mesh
from megatron.core.precision.config import PrecisionConfig
from megatron.training.arguments import read_settings
from megatron.training.config import RunConfig
from megatron.training.verification import equality
from megatron.training.verification.layout_words import SERIAL
from megatron.training.verification.outcomes import Outcome, compare, join
from megatron.training.verification.small_run import SmallRun
from tests.gpu import needs
from tests.gpu.needs import DEVICE
from tests.programs import ROOT, Rows, assert_rows_equal, metrics
from tools.verify_layout import case

pytestmark = needs.CUDA

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1"
)
ROTARY = "--position-embedding-type rope"
VARIANTS = {
    "gpt2": "",
    "llama": f"{ROTARY} --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "window": f"{ROTARY} --window-size 3,0 --window-attn-skip-freq 2 --qk-layernorm",
    "alibi": "--position-embedding-type alibi --softmax-type learnable --squared-relu "
    "--apply-layernorm-1p",
    "packed": f"{ROTARY} --reset-position-ids --reset-attention-mask --eod-mask-loss",
    "cap": f"{ROTARY} --attention-softcap 5 --logit-softcap 10 --softmax-type off-by-one",
    "latent": f"{ROTARY} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 "
    "--mtp-num-layers 1",
}


def small(words: str) -> RunConfig:
    """Return the float64 run of `tools/verify_layout.py` for these flags, on one process."""
    return SmallRun(read_settings(f"{MODEL} {words}".split(), "test").values).reference(SERIAL)


def trained(config: RunConfig, device: torch.device | str) -> Outcome:
    return join([equality.train(case(config), Mesh.serial(device))])


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_iterations_are_those_of_the_cpu(variant: str) -> None:
    """Losses, norms, the first gradient and the last weight of every parameter, in float64."""
    config = small(VARIANTS[variant])
    apart = compare(trained(config, DEVICE), trained(config, "cpu"))
    assert apart.largest <= 1e-10, apart


@pytest.mark.parametrize("precision", [{"bf16": True}, {"fp16": True, "loss_scale": 64.0}])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "latent"])
def test_half_is_as_near_to_float64_as_on_the_cpu(
    variant: str, precision: dict[str, object]
) -> None:
    """Within four times the distance of the CPU's half, and within two percent.

    Rounding goes another way on each device. On the CPU products are summed in fp32, as on CUDA.
    """
    exact = small(VARIANTS[variant])
    half = replace(exact, precision=PrecisionConfig.resolve(**precision))
    want = trained(exact, "cpu")
    here, there = (_distance(trained(half, device), want) for device in (DEVICE, "cpu"))
    assert 0 < here <= min(4 * max(there, 1e-3), 0.02), (here, there)


def _distance(outcome: Outcome, want: Outcome) -> float:
    pairs = zip(outcome.losses, want.losses, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def test_dropout_comes_from_its_keys() -> None:
    """Not from the device's generator, which moves on; another seed drops others."""
    plain = small(VARIANTS["gpt2"])
    attention = replace(plain.model.attention, attention_dropout=0.2)
    config = replace(plain, model=replace(plain.model, attention=attention, hidden_dropout=0.2))
    once = trained(config, DEVICE)
    torch.randn(10, device=DEVICE)
    # float64: sums by atomic additions may come in another order.
    assert compare(trained(config, DEVICE), once).largest <= 1e-10
    assert compare(trained(plain, DEVICE), once).loss > 1e-4
    # The first iteration starts from one model if only the masks' keys differ.
    other = replace(config, training=replace(config.training, seed=config.training.seed + 1))
    assert not math.isclose(trained(other, DEVICE).losses[0], once.losses[0], rel_tol=1e-6)


RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 99 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant --eval-iters 0 "
    "--log-interval 1 --num-workers 0"
)
SAVED = "--save-interval 2 --exit-interval 2"


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield


def run(device: str, folder: Path, words: str) -> Rows:
    """Run pretrain_gpt in this process and return what its metrics file says."""
    flags = f"{RUN} {words} --device {device} --metrics-file {folder / 'metrics.jsonl'}"
    assert pretrain_gpt.main(flags.split()) == 0
    return metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("order", [(str(DEVICE), "cpu"), ("cpu", str(DEVICE))], ids=str)
def test_a_checkpoint_of_one_device_goes_on_on_the_other(
    no_launcher: None, tmp_path: Path, order: tuple[str, str]
) -> None:
    exact = "--fp64 --attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-3"
    folder = tmp_path / "checkpoint"
    run(order[0], tmp_path, f"{exact} --save {folder} {SAVED}")
    found = run(order[1], tmp_path, f"{exact} --load {folder}")
    (tmp_path / "whole").mkdir()
    assert_rows_equal(found, run("cpu", tmp_path / "whole", exact))
    assert [row["iteration"] for row in found] == [1, 2, 3, 4]


def program(folder: Path, words: str) -> None:
    """Run pretrain_gpt in a process of its own: cuBLAS reads its workspace's setting but once."""
    folder.mkdir(exist_ok=True)
    flags = f"{RUN} {words} --device {DEVICE} --metrics-file {folder / 'metrics.jsonl'}"
    ended = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags.split()],
        capture_output=True,
        text=True,
        env={name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]


@pytest.mark.parametrize(
    "model",
    [
        "--bf16",
        "--bf16 --position-embedding-type rope --swiglu --normalization RMSNorm "
        "--disable-bias-linear --reset-attention-mask --reset-position-ids",
        "--position-embedding-type rope --window-size 8,0",
    ],
    ids=["gpt2", "packed", "window fp32"],
)
def test_a_resume_is_bit_for_bit_in_deterministic_mode(tmp_path: Path, model: str) -> None:
    """With dropout: the masks too are those of the run that was not interrupted."""
    words, folder = f"{model} --deterministic-mode", tmp_path / "checkpoint"
    program(tmp_path / "whole", words)
    program(tmp_path / "halves", f"{words} --save {folder} {SAVED}")
    program(tmp_path / "halves", f"{words} --load {folder}")
    whole, halves = (metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "halves"))
    assert len(whole) == 4 and halves == whole
