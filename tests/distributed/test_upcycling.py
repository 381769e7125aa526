"""A dense checkpoint turned into experts: outputs as before on any layout, and runs that go on."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.core import rng
from megatron.core.mesh import Mesh
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import load_checkpoint
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import save_checkpoint
from megatron.training.config import RunConfig
from megatron.training.processes.setup import connected_mesh
from megatron.training.state import TrainState
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics
from tests.unit.test_gpt_trajectories import DATA, Training

IDS, SHAPE = 31, (2, 16)
BASE = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 "
    f"--fp64 --init-method-std 0.2 --device cpu --tokenizer-type NullTokenizer --vocab-size {IDS} "
    "--make-vocab-size-divisible-by 4 --train-iters 4"
)
WIDE = "--ffn-hidden-size 24"
GATED = "--swiglu --disable-bias-linear"
UPCYCLED = "--moe-use-upcycling --num-experts 4 --moe-router-topk 2"
SLICES = f"{UPCYCLED} --moe-upcycling-granularity 2"
EP, ETP, TP = (
    f"--{name}-parallel-size 2" for name in ("expert-model", "expert-tensor", "tensor-model")
)
SIGMOID = "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5"
CASES = [
    (1, WIDE, "", UPCYCLED),
    (1, WIDE, "--geglu", f"{UPCYCLED} --moe-router-topk-scaling-factor 1.7"),
    (1, WIDE, "", f"{SLICES} --moe-ffn-hidden-size 12"),
    (1, WIDE, GATED, f"{SLICES} --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 12"),
    (1, WIDE, "--swiglu", f"{SLICES} --moe-ffn-hidden-size 12 {SIGMOID} --moe-layer-freq [0,1,1]"),
    (1, WIDE, "", f"{UPCYCLED} --moe-router-topk 4 --moe-router-pre-softmax"),
    (2, WIDE, "--swiglu", f"{SLICES} --moe-ffn-hidden-size 12 {EP}"),
    (2, WIDE, "", f"{UPCYCLED} {TP}"),
    (2, WIDE, "--swiglu", f"{SLICES} --moe-ffn-hidden-size 12 {TP} --sequence-parallel"),
    (4, WIDE, GATED, f"{SLICES} --moe-ffn-hidden-size 12 {EP} {ETP}"),
]


def config_of(words: str, world: int = 1) -> RunConfig:
    return parse(f"{BASE} {words}".split(), world_size=world).config


def run_of(config: RunConfig, mesh: Mesh, ids: int = IDS + 1) -> CheckpointedRun:
    """Return a run whose model has started at random."""
    vocabulary = resolve_vocabulary(config.tokenizer, ids, mesh.tp.size)
    chunks = pretrain_gpt.build_model(config, mesh, vocabulary, list(config.stages))
    for chunk in chunks:
        rng.initialize(chunk, config.training.seed)
        chunk.eval()
    facts = RunFacts(
        config=config.flatten(),
        schedule=None,
        tokenizer="",
        vocabulary=vocabulary.ids_in_use,
        vocabulary_rows=vocabulary.rows,
        objective="tokens",
    )
    return CheckpointedRun(config.checkpoint, mesh, chunks, None, facts, lambda line: None)


@torch.no_grad()
def outputs(run: CheckpointedRun) -> tuple[Tensor, Tensor]:
    """Return logits (this rank's share of them) and the loss of each token."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(IDS, SHAPE, generator=generator) for _ in range(2))
    (model,) = run.models
    return model(tokens, None), model(tokens, labels)


def save_dense(folder: Path, words: str) -> tuple[Tensor, Tensor]:
    config = config_of(f"{words} --save {folder}")
    run, generator = run_of(config, Mesh.serial()), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in run.models[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).double() / 5)
    save_checkpoint(run, TrainState(iteration=3))
    return outputs(run)


def load_upcycled(rank: int, world: int, words: str) -> tuple[Tensor, Tensor]:
    config = config_of(words, world)
    mesh = connected_mesh(config, torch.device("cpu")) if world > 1 else Mesh.serial()
    run = run_of(config, mesh)
    loaded = load_checkpoint(run, config.schedule)
    assert loaded.parts == ("weights",) and loaded.state == TrainState()
    return outputs(run)


@pytest.mark.parametrize(("world", "width", "model", "experts"), CASES)
def test_outputs_are_those_of_the_dense_model(
    pool: Pool, tmp_path: Path, world: int, width: str, model: str, experts: str
) -> None:
    logits, losses = save_dense(tmp_path / "dense", f"{width} {model}")
    words = f"{width} {model} {experts} --load {tmp_path / 'dense'}"
    if world == 1:
        found, each = load_upcycled(0, 1, words)
        torch.testing.assert_close(found, logits, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(each, losses, rtol=1e-10, atol=1e-10)
        return
    for _, each in pool.run(world, load_upcycled, world, words):
        torch.testing.assert_close(each, losses, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("experts", ["", f" {SIGMOID}", " --moe-router-dtype fp32"])
def test_slices_of_a_copy_stay_together_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    """Logits of two copies are equal for some tokens, and outputs still differ by rounding alone.

    A slice of another copy has other channels: a token without one of its slices is far off. What
    rounding does is told by copies that are whole.
    """
    words = BASE.replace("--fp64", "--bf16").replace("--seq-length 16", "--seq-length 256")
    monkeypatch.setitem(globals(), "BASE", words)
    monkeypatch.setitem(globals(), "SHAPE", (8, 256))
    wide = "--ffn-hidden-size 32 --swiglu --position-embedding-type rope"
    _, losses = save_dense(tmp_path / "dense", wide)
    many = f"--moe-use-upcycling --num-experts 16 --moe-router-topk 4{experts}"
    off = []
    for slices in (1, 4):
        size = f"--moe-upcycling-granularity {slices} --moe-ffn-hidden-size {32 // slices}"
        _, each = load_upcycled(0, 1, f"{wide} {many} {size} --load {tmp_path / 'dense'}")
        off.append(float((each.float() - losses.float()).abs().max()))
    assert off[1] < 3 * off[0] + 0.02, off


def test_a_run_upcycles_and_goes_on_elsewhere(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first loss is that of the dense model; stopped and taken up, it is the unbroken run."""

    def trained(world: int, more: str, says: str = "") -> None:
        words = f"{BASE} {WIDE} --num-workers 0 --log-interval 1 {more}".split()
        ended = launch(pool, world, "pretrain_gpt", *words, folder=tmp_path)
        assert [one.code for one in ended] == [0] * world, ended[0].err
        assert says in ended[0].out

    def refused(more: str, says: str) -> None:
        with monkeypatch.context() as context, pytest.raises(UserError, match=re.escape(says)):
            context.chdir(tmp_path)
            load_upcycled(0, 1, f"{WIDE} {more}")

    experts = f"{SLICES} --moe-ffn-hidden-size 12"
    plain = experts.replace("--moe-use-upcycling", "").replace("--moe-upcycling-granularity 2", "")
    trained(1, "--save dense --train-iters 2")
    trained(1, "--load dense --finetune --train-iters 1 --metrics-file first.jsonl")
    trained(1, f"{experts} --load dense --metrics-file whole.jsonl", "one of 2 slices of its dense")
    (first, *_), (expected, *_) = (metrics(tmp_path / f"{n}.jsonl") for n in ("whole", "first"))
    assert abs(first["lm_loss"] - expected["lm_loss"]) < 1e-10
    parts = "--metrics-file parts.jsonl --save moe --exit-interval"
    trained(2, f"{experts} {EP} --use-distributed-optimizer --load dense {parts} 2")
    trained(1, f"{plain} --load moe {parts} 3", "weights loaded, optimizer loaded")
    # What a restarted script says: the dense checkpoint at first, its own afterwards.
    restarted = f"{experts} --pretrained-checkpoint dense --load moe {parts} 9"
    trained(1, restarted, "nothing is upcycled")
    assert_rows_equal(metrics(tmp_path / "parts.jsonl"), metrics(tmp_path / "whole.jsonl"))

    refused(f"{experts} --load moe", "holds experts already; drop the flag")
    refused(f"{experts} --load dense --save moe", "to go on from those, name that folder by --load")
    refused(f"{experts} --load empty", "--load (empty) holds none")
    refused(f"{UPCYCLED} --moe-ffn-hidden-size 20 --load dense", "--moe-ffn-hidden-size of 24")


@torch.no_grad()
def test_a_checkpoint_of_megatron_core_is_upcycled() -> None:
    """Logits are those that Megatron-core recorded of its dense model."""
    training = Training("llama")
    words = (
        f"{training.case['flags']} --train-iters 1 --mock-data --device cpu --vocab-size 127 "
        f"--tokenizer-type NullTokenizer {SLICES} --moe-ffn-hidden-size 32 "
        f"--load {DATA / 'llama' / 'dist_ckpt'}"
    )
    run = run_of(config := parse(words.split()).config, Mesh.serial(), 128)
    load_checkpoint(run, config.schedule)
    logits = run.models[0](training.batches["tokens"][0, 0])
    expected = torch.from_numpy(np.load(DATA / "llama" / "logits.npz")["logits"])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
