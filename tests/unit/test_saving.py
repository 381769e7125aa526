"""Recomputation and offload in a model: equal bit for bit, and as many bytes as planned.

Every kind of model trains two microbatches, dropout on, in every way to keep what backward needs.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import pretrain_gpt
from megatron.core import rng, saved_tensors
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import Ahead
from megatron.core.rng import DropoutKey
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import activations
from megatron.training.plan.ledger import Footprint

SMALL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 72 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 50 --device cpu --dry-run"
)
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --qk-head-dim 8 --kv-lora-rank 12 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6"
)
MODELS = {
    "gpt": "",
    "llama": "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type "
    "rope --group-query-attention --num-query-groups 2 --qk-layernorm --hidden-dropout 0 "
    "--attention-dropout 0 --untie-embeddings-and-output-weights",
    "latents": f"{LATENT} --q-lora-rank 10 --qk-layernorm --normalization RMSNorm",
    "plain latents, bf16": f"{LATENT} --bf16",
    "ahead": "--mtp-num-layers 2 --position-embedding-type rope",
}
FULL = "--recompute-granularity full --recompute-num-layers"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
MOVED = "--min-offloaded-tensor-size 0 --fine-grained-activation-offloading --offload-modules"
WAYS = {
    "uniform": f"{FULL} 1 --recompute-method uniform",
    "uniform by two": f"{FULL} 2 --recompute-method uniform",
    "block": f"{FULL} 2 --recompute-method block",
    "core": "--recompute-activations",
    "norms": f"{SELECTIVE} layernorm",
    "parts": f"{SELECTIVE} core_attn layernorm mlp",
    "latents": f"{SELECTIVE} mla_up_proj",
    "latents and parts": f"{SELECTIVE} mla_up_proj core_attn layernorm mlp",
    "layers moved": "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 0",
    "large ones moved": "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 5000",
    "attention moved": f"{MOVED} core_attn attn_proj",
    "parts moved": f"{MOVED} attn_norm qkv_linear core_attn attn_proj mlp_norm",
    "inputs moved": f"{FULL} 1 --recompute-method uniform {MOVED} layer_input",
    "both": f"{SELECTIVE} layernorm mlp {MOVED} attn_norm mlp_norm core_attn attn_proj",
}
EVERYWHERE = ("uniform", "parts", "parts moved", "both", "latents and parts")
"""Ways that every test of every model goes; the others are gone by the first one, or slowly."""
PAIRS = [
    pytest.param(
        *(model, way), marks=[] if model == "gpt" or way in EVERYWHERE else [pytest.mark.slow]
    )
    for model in MODELS
    for way in WAYS
    if "latents" in model or not way.startswith("latents")
]
WITHIN = 0.001


def config(model: str, way: str) -> RunConfig:
    return parse(f"{SMALL} {MODELS[model]} {WAYS.get(way, '')}".split()).config


def built(run: RunConfig) -> GPTModel:
    """Return the model, with buffers for its gradients."""
    vocabulary = resolve_vocabulary(run.tokenizer, 50, 1)
    (model,) = pretrain_gpt.build_model(run, Mesh.serial(), vocabulary, run.stages)
    rng.initialize(model, 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def loss_of(model: GPTModel, number: int) -> Tensor:
    """Return the sum of all losses of a microbatch."""
    generator = torch.Generator().manual_seed(number)
    depths = model.config.mtp.depths

    def made(*more: int) -> Tensor:
        return torch.randint(0, 50, (2, 72, *more), generator=generator)

    tokens, labels = made(), made()
    ahead = Ahead(*(made(depths) for _ in range(3))) if depths else None
    losses = model(tokens, labels, dropout=DropoutKey(1, 1, number), ahead=ahead)
    weights = torch.rand(losses.shape, generator=generator, dtype=losses.dtype)
    return (losses * weights).sum()


def trained(run: RunConfig) -> tuple[list[Tensor], list[str]]:
    """Return losses and gradients of two microbatches, and whose hooks ran, in order."""
    model, told = built(run), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.append(name))
    losses = [loss_of(model, number) for number in (1, 2)]
    for loss in losses:
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(loss.detach() for loss in losses), *grads], told


@pytest.fixture(scope="module")
def as_it_is() -> dict[str, tuple[list[Tensor], list[str]]]:
    """Return what each model gives that keeps everything."""
    return {model: trained(config(model, "as it is")) for model in MODELS}


@pytest.mark.parametrize(("model", "way"), PAIRS)
def test_losses_and_gradients_are_the_same_bit_for_bit(
    as_it_is: dict[str, tuple[list[Tensor], list[str]]], model: str, way: str
) -> None:
    (expected, hooks), (found, told) = as_it_is[model], trained(config(model, way))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sorted(told) == sorted(hooks)


def planned(run: RunConfig) -> Footprint:
    (stage,) = run.stages
    return activations.footprint(run, 128, stage, 2)


def measured(run: RunConfig) -> tuple[int, int, saved_tensors.Saved]:
    """Return the bytes kept on the device and in the host, and the meter after the backward."""
    model = built(run)
    known = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
    known += model.rotary(72, None) if model.rotary is not None else ()
    with saved_tensors.counting(known) as meter:
        loss = loss_of(model, 1)
        kept, offloader = meter.now, model.saving._offloader
        host = 0 if offloader is None else offloader._copies.pool.bytes  # type: ignore[attr-defined]
        loss.backward()
    return kept, host, meter


@pytest.mark.parametrize(("model", "way"), PAIRS)
def test_bytes_are_those_of_the_plan(model: str, way: str) -> None:
    """What is kept, what is in the host, and the most there is in a backward."""
    run = config(model, way)
    plan, (kept, host, meter) = planned(run), measured(run)
    assert plan.kept == pytest.approx(kept, rel=WITHIN)
    assert plan.host == host
    assert plan.kept + plan.backward == pytest.approx(meter.most, rel=WITHIN)
    assert meter.now == 0


def test_evaluation_keeps_nothing_and_runs_nothing_twice() -> None:
    for way in ("uniform", "parts", "parts moved"):
        model, calls = built(config("gpt", way)), list[nn.Module]()
        model.decoder.layers["1"].register_forward_pre_hook(lambda one, _, to=calls: to.append(one))
        with torch.no_grad(), saved_tensors.counting([]) as meter:
            loss_of(model, 1)
        assert meter.most == 0 and len(calls) == 1
        offloader = model.saving._offloader
        assert offloader is None or not offloader._copies.pool.bytes  # type: ignore[attr-defined]


def test_units_by_hand() -> None:
    def units(words: str, layers: Sequence[int]) -> list[tuple[int, ...]]:
        return parse(f"{SMALL} {words}".split()).config.model.recompute.units(layers)

    assert units(WAYS["uniform by two"], range(4, 9)) == [(4, 5), (6, 7), (8,)]
    assert units(WAYS["block"], range(4, 9)) == [(4,), (5,)]
    assert units(f"{FULL} 9 --recompute-method block", range(4, 6)) == [(4,), (5,)]
    assert units(f"{FULL} 9 --recompute-method uniform", range(4, 6)) == [(4, 5)]
    assert units(f"{FULL} 0 --recompute-method block", range(4, 6)) == []
    assert units(WAYS["parts"], range(3)) == units("", range(3)) == []


def test_bytes_by_hand() -> None:
    """144 tokens of 32 channels in fp32: a layer's input is 18,432 bytes."""
    stream = 144 * 32 * 4
    plain, whole = planned(config("gpt", "")), planned(config("gpt", "uniform"))
    two, host = planned(config("gpt", "block")), planned(config("gpt", "inputs moved"))
    layer = (plain.kept - two.kept) // 2 + stream
    assert plain.kept - whole.kept == 3 * (layer - stream)
    assert planned(config("gpt", "uniform by two")).kept == whole.kept - stream
    assert host.kept == whole.kept - 3 * stream and host.host == 3 * stream
    assert (plain.host, plain.backward) == (0, 0)
    # The MLP alone: its 4 x 32 inner channels before and after the activation.
    mlp = planned(parse(f"{SMALL} {SELECTIVE} mlp".split()).config)
    assert plain.kept - mlp.kept == 3 * 2 * 4 * stream
    # The norms' outputs, and two numbers of four bytes for each of their rows.
    norms = planned(config("gpt", "norms"))
    assert plain.kept - norms.kept == 3 * 2 * (stream + 144 * 8)
