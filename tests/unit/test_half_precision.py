"""Models in bf16 and fp16: near the fp32 model, and dtypes where the flags say."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import rng
from megatron.core.kernels import matmul
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context

VOCABULARY, LENGTH, SAMPLES = 50, 24, 2
HALVES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 12,
}
MODELS: dict[str, dict[str, object]] = {
    "gpt": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
    },
    "alibi": {"position_embedding_type": "alibi", "squared_relu": True, "window_size": (8, 0)},
    "caps": {"attention_softcap": 20.0, "logit_softcap": 10.0, "geglu": True, "qk_l2_norm": True},
    "sinks": {"softmax_type": "learnable", "apply_layernorm_1p": True, "quick_geglu": True},
    "latents": {**LATENT, "qk_layernorm": True},
    "unfused": {"attention_backend": "unfused", "transformer_impl": "local"},
    "pieces": {"logits_at_once": 500},
}


def config(**changes: object) -> TransformerConfig:
    return TransformerConfig.resolve(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        **changes,
    )


def build(dtype: torch.dtype, stage: Stage | None = None, **changes: object) -> GPTModel:
    model = GPTModel(
        config(**changes), Mesh.serial(), vocab_size=VOCABULARY, dtype=dtype, stage=stage
    )
    rng.initialize(model, 3)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def gradients(model: GPTModel) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss, and its gradients at a loss scale of 1024."""
    loss = model(*tokens()).mean()
    (loss * 1024).backward()
    named = {name: p.grad.float() / 1024 for name, p in model.named_parameters()}
    return loss.item(), named


def upcasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the detour through fp32 on every CPU."""
    monkeypatch.setattr(matmul, "cpu_features", frozenset)


@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_near_the_fp32_one(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within some roundings: more where there are fewer bits."""
    upcasting(monkeypatch)
    half, exact = build(dtype, **MODELS[name]), build(torch.float32, **MODELS[name])
    exact.load_state_dict({key: x.float() for key, x in half.state_dict().items()})
    loss, found = gradients(half)
    expected_loss, expected = gradients(exact)
    assert loss == pytest.approx(expected_loss, rel=4 * UNIT[dtype])
    size = torch.cat([x.flatten() for x in expected.values()]).norm()
    error = torch.cat([(found[key] - x).flatten() for key, x in expected.items()]).norm()
    assert error < 8 * UNIT[dtype] * size


def hidden(model: GPTModel, x_SBH: Tensor | None = None) -> tuple[Tensor, list[torch.dtype]]:
    """Return what a first stage gives, and the dtypes that its blocks are given."""
    seen: list[torch.dtype] = []
    hooks = [
        part.block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
        for layer in model.decoder.layers.values()
        for part in layer.sublayers
    ]
    out = model(tokens()[0], x_SBH=x_SBH)
    for hook in hooks:
        hook.remove()
    return out, seen


FIRST = Stage(range(2), is_first=True, is_last=False)
LAST = Stage(range(2, 2), is_first=False, is_last=True)


@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
def test_an_fp32_stream_runs_between_half_blocks(dtype: torch.dtype) -> None:
    model = build(dtype, FIRST, fp32_residual_connection=True)
    out, seen = hidden(model)
    assert out.dtype == torch.float32 and seen == [dtype] * 4
    assert {p.dtype for p in model.parameters()} == {dtype}
    plain, _ = hidden(build(dtype, FIRST))
    assert plain.dtype == dtype


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
def test_an_fp32_stream_equals_its_sums_written_out(dtype: torch.dtype, normalization: str) -> None:
    kind = {"fp32_residual_connection": True, "normalization": normalization}
    model = build(dtype, **kind)
    text, labels = tokens()
    losses = model(text, labels)

    def norm(module: nn.Module, x: Tensor) -> Tensor:
        """Normalise in fp32, gains included, and round once."""
        size, gain = x.shape[-1:], module.weight.float()
        if normalization == "RMSNorm":
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.epsilon) * gain
        else:
            y = F.layer_norm(x, size, gain, module.bias.float(), module.epsilon)
        return y.to(dtype)

    embedding = model.embedding
    x = (embedding.word_embeddings(text) + embedding.position_embeddings(LENGTH, None)).float()
    context = Context(None, None, None, None, None)
    for layer in model.decoder.layers.values():
        for part in layer.sublayers:
            x = x + part.block(norm(part.norm, x), context).float()
    final = norm(model.decoder.final_layernorm, x)
    logits = (final.float() @ model.output_layer.weight.float().t()).to(dtype).float()
    expected = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=UNIT[dtype], atol=UNIT[dtype])


def test_an_fp32_stream_keeps_what_a_half_one_loses() -> None:
    """A stream of thousands: what a block adds is less than a step of bf16."""

    @torch.no_grad()
    def added(**changes: object) -> float:
        """Return how much of the stream its blocks are."""
        model = build(torch.bfloat16, FIRST, embedding_multiplier=3e4, **changes)
        start = model.embedding(tokens()[0], None, None).float()
        return float((hidden(model)[0].float() - start).abs().median())

    assert added() == 0.0
    assert added(fp32_residual_connection=True) > 0.1


def test_an_fp32_stream_has_room_for_what_overflows_fp16() -> None:
    for fp32, finite in ((False, False), (True, True)):
        model = build(torch.float16, fp32_residual_connection=fp32)
        model.embedding.register_forward_hook(lambda module, inputs, x: x * 2e5)
        assert bool(model(*tokens()).isfinite().all()) == finite


@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
def test_a_later_stage_takes_an_fp32_stream(dtype: torch.dtype) -> None:
    """Two stages in a row are the whole model, to the last bit."""
    kind = {"fp32_residual_connection": True}
    whole, first, last = (
        build(dtype, **kind),
        build(dtype, FIRST, **kind),
        build(dtype, LAST, **kind),
    )
    text, labels = tokens()
    weights = whole.state_dict()
    first.load_state_dict(weights, strict=False)
    last.load_state_dict(weights, strict=False)
    last.output_layer.weight.data.copy_(weights["embedding.word_embeddings.weight"])
    assert torch.equal(last(None, labels, x_SBH=first(text)), whole(text, labels))


def test_fp16_losses_are_those_of_the_flag() -> None:
    """The head hands its flag on, also where it works in pieces."""
    changes: list[dict[str, object]] = [{}, {"logits_at_once": 500}]
    for pieces in changes:
        plain, half = (
            build(torch.float16, **pieces),
            build(torch.float16, fp16_lm_cross_entropy=True, **pieces),
        )
        found, expected = half(*tokens()), plain(*tokens())
        assert found.dtype == expected.dtype == torch.float32
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
