"""What a microbatch keeps of an encoder-decoder: planned bytes against what autograd saves."""

import pytest
import torch

import pretrain_t5
from megatron.core import rng, saved_tensors
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import activations

SMALL = (
    "--encoder-num-layers 3 --decoder-num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--encoder-seq-length 160 --decoder-seq-length 96 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --vocab-size 100 --tokenizer-type NullTokenizer --device cpu --dry-run"
)
RELATIVE = "--position-embedding-type relative"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
CHOICES = [
    "",
    "--bf16",
    "--fp64 --hidden-dropout 0 --attention-dropout 0",
    f"{RELATIVE} --normalization RMSNorm --relu --disable-bias-linear",
    f"{RELATIVE} --geglu-tanh --untie-embeddings-and-output-weights --bf16 --kv-channels 24",
    f"{RELATIVE} --fp16 --fp32-residual-connection",
    "--position-embedding-type rope --logits-at-once 1000",
    "--attention-backend unfused --attention-dropout 0",
    f"{RELATIVE} --attention-backend unfused --bf16",
    f"{WHOLE} 2",
    f"{WHOLE} 2 {RELATIVE} --bf16 --fp32-residual-connection",
    f"{RELATIVE} --recompute-granularity selective --recompute-modules core_attn layernorm mlp",
]
STAGES = {
    "whole": Stage(range(5)),
    "encoder's": Stage(range(2), True, False),
    "encoder's end": Stage(range(1, 3), False, False),
    "both": Stage(range(2, 4), False, False),
    "decoder's": Stage(range(3, 4), False, False),
    "decoder's end": Stage(range(3, 5), False, True),
    "head": Stage(range(5, 5), False, True),
}
PARTS = ((160, range(3)), (96, range(3, 5)))
"""Positions of each text, and the layers that read it."""


def config(text: str) -> RunConfig:
    return parse(f"{SMALL} {text}".split(), "pretrain_t5").config


def saved(run: RunConfig, stage: Stage) -> int:
    """Return the bytes that the forward of one microbatch saves in one stage."""
    samples, lengths = run.training.micro_batch_size, (160, 96)
    (chunk,) = pretrain_t5.build_model(
        run, Mesh.serial(), resolve_vocabulary(run.tokenizer, 101, 1), [stage]
    )
    rng.initialize(chunk, 1)
    optimizer = build_optimizer(run.optimizer, [chunk], Mesh.serial(), run.precision)
    known = [x for b in optimizer.data_parallel.buffers for x in (b.data, b.grad)]
    if chunk.rotary is not None:  # made once for all microbatches
        known += [table for length in lengths for table in chunk.rotary(length, None)]
    batch = {}
    for text, length in zip(("encoder", "decoder"), lengths, strict=True):
        batch[f"{text}_tokens"] = torch.randint(0, 100, (samples, length))
        batch[f"{text}_valid"] = torch.ones(samples, length, dtype=torch.bool)
    batch["labels"] = torch.randint(0, 100, (samples, 96))
    batch["loss_mask"] = torch.ones(samples, 96)
    x_XBH = None
    if not stage.is_first:
        dtype = getattr(torch, run.residual_dtype)
        x_XBH = torch.randn(256, samples, 64, dtype=dtype).requires_grad_()
    with saved_tensors.counting(known) as meter:
        out = pretrain_t5.forward_step(chunk, batch, x_XBH, DropoutKey(1, 1, 1))
        if stage.is_last:
            out = (out.losses_BS * out.mask_BS.to(out.losses_BS.dtype)).sum(), out
    assert out is not None
    return meter.now


def held(run: RunConfig, stage: Stage) -> int:
    """Return the bytes that a second run reads, which are there and which autograd does not save.

    These are biases of the attention that runs again and, of whole layers, the encoder's output
    unless it is a part of what the stage was sent.
    """
    size, wide = (
        torch.finfo(getattr(torch, x)).bits // 8
        for x in (run.precision.params_dtype, run.residual_dtype)
    )
    recompute, total = run.model.recompute, 0
    stacks = {length: [n for n in stage.layers if n in numbers] for length, numbers in PARTS}
    if recompute.granularity is None:
        return 0
    if run.model.position.position_embedding_type == "relative":
        total += sum(4 * length * length * size for length, here in stacks.items() if here)
    is_sent = not stage.is_first and 2 not in stage.layers and size == wide
    if recompute.granularity == "full" and stacks[96] and not is_sent:
        total += 2 * 160 * 64 * size
    return total


@pytest.mark.parametrize("text", CHOICES)
@pytest.mark.parametrize("name", STAGES)
def test_planned_bytes_are_those_that_autograd_saves(text: str, name: str) -> None:
    run, stage = config(text), STAGES[name]
    planned = activations.footprint(run, 128, stage, 2).kept
    assert planned == pytest.approx(saved(run, stage) + held(run, stage), rel=0.001)
