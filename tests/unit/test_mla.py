"""Multi-latent attention against its formulas; what it refuses, ignores, counts and decays."""

import math
from itertools import product

import pytest
import torch

from megatron.core import rng, sharding
from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Axis, Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import grouping
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.mla import MultiLatentAttention, attention_scale
from megatron.core.transformer.position import rotary_tables
from megatron.core.transformer.saving import Saving
from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun, parse
from megatron.training.config import RunConfig
from megatron.training.plan import operations_gpt, parameter_shapes
from megatron.training.plan.report import report

F64 = torch.float64
SIZES = {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 8, "v_head_dim": 5}
WORDS = "--kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 8 --v-head-dim 5"


def config(**choices: object) -> TransformerConfig:
    values = {
        "num_layers": 1,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "init_method_std": 0.3,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "multi_latent_attention": True,
        **SIZES,
    }
    return TransformerConfig.resolve(**{**values, **choices})


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(x: torch.Tensor, position: int, angles: list[float]) -> torch.Tensor:
    """Rotate the leading pairs of neighbours, then part even from odd ones, as Megatron-LM does."""
    first, second = [], []
    for i, angle in enumerate(angles):
        a, b = x[2 * i], x[2 * i + 1]
        cos, sin = math.cos(position * angle), math.sin(position * angle)
        first.append(a * cos - b * sin)
        second.append(b * cos + a * sin)
    return torch.cat((torch.stack(first + second), x[2 * len(angles) :]))


def written_out(
    model: TransformerConfig, weights: dict[str, torch.Tensor], x_SH: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention's output of one sample, head by head and query by query."""
    latent, length = model.mla, x_SH.shape[0]
    share = model.position.rotary_percent if latent.rope_type == "rope" else 1.0
    dim = int(latent.qk_pos_emb_head_dim * share)
    angles = [10000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    mixed = x_SH @ weights["linear_kv_down_proj.weight"].t()
    kv_latent, shared = mixed[:, :10], mixed[:, 10:]
    if "kv_layernorm.weight" in weights:
        kv_latent = normed(kv_latent, weights["kv_layernorm.weight"])
    queries = x_SH
    if latent.q_lora_rank is None:
        up = weights["linear_q_proj.weight"]
    else:
        up = weights["linear_q_up_proj.weight"]
        queries = x_SH @ weights["linear_q_down_proj.weight"].t()
        if "q_layernorm.weight" in weights:
            queries = normed(queries, weights["q_layernorm.weight"])
    q, kv = queries @ up.t(), kv_latent @ weights["linear_kv_up_proj.weight"].t()
    out = x_SH.new_zeros(length, 4 * 5)
    for head, i in product(range(4), range(length)):
        own, turning = q[i, head * 14 : head * 14 + 14].split((6, 8))
        rotated, scores = turned(turning, i, angles), []
        for j in range(i + 1):
            key = kv[j, head * 11 : head * 11 + 6]
            scores.append(own @ key + rotated @ turned(shared[j], j, angles))
        values = kv[: i + 1, head * 11 + 6 : head * 11 + 11]
        out[i, head * 5 : head * 5 + 5] = torch.softmax(torch.stack(scores) * scale, 0) @ values
    return out @ weights["linear_proj.weight"].t()


def block_of(
    model: TransformerConfig, mesh: Mesh, *, sequence_parallel: bool = False
) -> MultiLatentAttention:
    return MultiLatentAttention(
        model,
        0,
        mesh,
        F64,
        choose_backends(model, mesh.device, F64),
        Saving(model.recompute, model.offload, mesh),
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"q_lora_rank": 7},
        {"q_lora_rank": 7, "qk_layernorm": True, "normalization": "RMSNorm"},
        {"rope_type": "rope", "rotary_percent": 0.5, "qk_layernorm": True},
    ],
)
def test_it_is_what_the_formulas_say(choices: dict[str, object]) -> None:
    model = config(**{"add_bias_linear": False, "normalization": "RMSNorm", **choices})
    mesh = Mesh.serial()
    block = block_of(model, mesh)
    rng.initialize(block, seed=4)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter), dtype=F64))
    x_SBH = torch.randn(7, 2, 24, dtype=F64, generator=torch.Generator().manual_seed(2))
    tables = rotary_tables(model, mesh, F64)
    assert tables is not None
    y_SBH = block(x_SBH, Context(rotary=tables(7, None)))
    weights = {name: parameter.detach() for name, parameter in block.named_parameters()}
    for sample in range(2):
        expected = written_out(model, weights, x_SBH[:, sample], 1 / math.sqrt(14))
        torch.testing.assert_close(y_SBH[:, sample], expected, rtol=1e-11, atol=1e-12)


def test_the_scale_has_yarns_temperature() -> None:
    """DeepSeek-V3: 40 times the context, 128 + 64 channels; (0.1 ln 40 + 1)^2 / sqrt(192)."""
    v3 = config(
        rotary_scaling_factor=40, mscale_all_dim=1.0, qk_head_dim=128, qk_pos_emb_head_dim=64
    )
    assert attention_scale(v3.mla) == pytest.approx(0.13523377, rel=1e-7)
    assert attention_scale(config(rotary_scaling_factor=40).mla) == pytest.approx(14**-0.5)


def test_the_default_frequencies_are_yarns() -> None:
    assert config().mla.rope_type == "yarn"
    assert TransformerConfig.resolve(
        num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=4
    ).mla.rope_type == "rope"  # fmt: skip
    stretched = rotary_tables(
        config(rotary_scaling_factor=4, original_max_position_embeddings=16), Mesh.serial(), F64
    )
    assert stretched is not None
    # Of four frequencies over 16 positions the last turns less than once: it is stretched.
    plain = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=F64)
    assert stretched.frequencies[-1] == pytest.approx(plain[-1] / 4)
    assert stretched.frequencies[0] == pytest.approx(plain[0])


def test_packed_documents_are_as_if_alone() -> None:
    model = GPTModel(
        config(q_lora_rank=7, qk_layernorm=True, num_layers=2, position_embedding_type="rope"),
        Mesh.serial(),
        vocab_size=30,
        dtype=F64,
    )
    rng.initialize(model, seed=3)
    tokens = torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    packing = Packing(torch.tensor([0, 5, 12], dtype=torch.int32))
    together = model(tokens, position_ids_BS=positions, packing=packing)
    apart = torch.cat((model(tokens[:, :5]), model(tokens[:, 5:])), 1)
    torch.testing.assert_close(together, apart, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_down_projections_are_whole_and_partial_only_with_sequence_parallelism(
    sequence_parallel: bool,
) -> None:
    serial = Mesh.serial()
    mesh = Mesh({**serial.axes, "tp": Axis("tp", (0, 1), 1, None)}, 0, serial.device)
    model = config(q_lora_rank=7, qk_layernorm=True)
    block = block_of(model, mesh, sequence_parallel=sequence_parallel)
    summed = ("tp",) if sequence_parallel else ()
    found = {name: sharding.of(parameter) for name, parameter in block.named_parameters()}
    for name, record in found.items():
        (region,) = record.regions
        if "down" in name or "norm" in name or "proj.bias" in name:
            assert (region.replicated, region.summed) == (("tp",), summed), name
            assert region.local == region.logical == tuple((0, size) for size in record.shape)
        else:
            assert (region.replicated, region.summed) == ((), ()), name
        assert record.matrix == ("proj.weight" in name), name
    # The second of two ranks has the rows of the last two heads of four.
    assert found["linear_q_up_proj.weight"].regions[0].logical == ((28, 56), (0, 7))
    assert found["linear_kv_up_proj.weight"].regions[0].logical == ((22, 44), (0, 10))
    assert found["linear_proj.weight"].regions[0].logical == ((0, 24), (10, 20))


def test_apply_wd_to_qk_layernorm_decays_the_queries_gain_alone() -> None:
    """Megatron-LM looks for q_layernorm and k_layernorm in a name; kv_layernorm is neither."""
    mesh = Mesh.serial()
    model = config(q_lora_rank=7, qk_layernorm=True, normalization="RMSNorm")
    block = block_of(model, mesh)
    settings = OptimizerConfig.resolve(apply_wd_to_qk_layernorm=True)
    group = grouping(settings)
    decay = {name: group(sharding.of(p)) for name, p in block.named_parameters()}
    assert decay["q_layernorm.weight"] == decay["linear_q_up_proj.weight"]
    assert decay["kv_layernorm.weight"] == decay["linear_proj.bias"] != decay["q_layernorm.weight"]


@pytest.mark.parametrize(
    ("choices", "flags"),
    [
        ({"group_query_attention": True}, "--group-query-attention"),
        ({"qk_l2_norm": True}, "--qk-l2-norm"),
        ({"rotary_interleaved": True}, "--rotary-interleaved"),
        ({"position_embedding_type": "alibi"}, "alibi"),
        ({"multi_latent_attention": False, "rope_type": "yarn"}, "--position-embedding-type yarn"),
        ({"beta_fast": 1.0}, "--beta-slow"),
        ({"rotary_base": 1}, "--rotary-base"),
        ({"kv_lora_rank": 0}, "--kv-lora-rank"),
        ({"rotary_scaling_factor": 0.5}, "--rotary-scaling-factor"),
    ],
)
def test_what_does_not_go_together_is_refused(choices: dict[str, object], flags: str) -> None:
    with pytest.raises(UserError, match=flags):
        config(**choices)


BASE = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --lr 1e-3 --mock-data "
    "--micro-batch-size 2 --train-iters 10 --vocab-size 30 --dry-run"
)


def run(text: str, base: str = BASE) -> ParsedRun[RunConfig]:
    return parse(f"{base} {text}".split())


def test_rotary_channels_are_pairs() -> None:
    with pytest.raises(UserError, match=r"--qk-pos-emb-head-dim \(7\) makes 7"):
        run("--multi-latent-attention --qk-pos-emb-head-dim 7")
    with pytest.raises(UserError, match=r"--rotary-percent \(0.5\) of --qk-pos-emb-head-dim \(6\)"):
        run("--multi-latent-attention --qk-pos-emb-head-dim 6 --rope-type rope --rotary-percent .5")
    run("--multi-latent-attention --qk-pos-emb-head-dim 6 --rotary-percent .5")


def test_heads_need_not_share_the_hidden_size() -> None:
    wide = BASE.replace("--num-attention-heads 4", "--num-attention-heads 5")
    with pytest.raises(UserError, match="--hidden-size"):
        run("", wide)
    assert run("--multi-latent-attention", wide).config.model.attention.num_attention_heads == 5


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ("--q-lora-rank 8 --mscale 0.7 --rope-type rope", "--q-lora-rank --mscale --rope-type"),
        ("--beta-fast 16", "--beta-fast"),
        ("--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor"),
        ("--multi-latent-attention --q-lora-rank 8 --mscale 0.7 --rotary-base 500", ""),
        (
            "--multi-latent-attention --kv-channels 8 --add-qkv-bias --softmax-scale 2 "
            "--no-rope-freq 2 --use-rope-scaling --yarn-mscale 2 --rotary-percent 0.5",
            "--kv-channels --add-qkv-bias --softmax-scale --no-rope-freq --use-rope-scaling "
            "--yarn-mscale --rotary-percent",
        ),
        (
            "--multi-latent-attention --rope-type rope --beta-slow 2 --mscale 2 "
            "--original-max-position-embeddings 9 --mscale-all-dim 2 --rotary-percent 0.5",
            "--beta-slow --mscale --original-max-position-embeddings",
        ),
    ],
)
def test_settings_without_effect_are_listed(given: str, idle: str) -> None:
    found = {note.split()[0] for note in run(given).no_effect}
    assert found == set(idle.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--q-lora-rank 7 --qk-layernorm --normalization RMSNorm --disable-bias-linear",
        "--q-lora-rank 7 --qk-layernorm --softmax-type learnable",
        "--qk-layernorm --position-embedding-type rope --untie-embeddings-and-output-weights",
    ],
)
def test_every_parameter_is_the_built_models_in_its_order(text: str) -> None:
    model = run(f"--multi-latent-attention {WORDS} {text}").config.model
    built = GPTModel(model, Mesh.serial(), vocab_size=30)
    planned = [
        (p.name, p.shape) for p in parameter_shapes.stage_parameters(model, 30, Stage(range(2)))
    ]
    assert planned == [(name, tuple(p.shape)) for name, p in built.named_parameters()]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_planned_to_be_summed_as_they_are(sequence_parallel: bool) -> None:
    words = f"--multi-latent-attention {WORDS} --q-lora-rank 7 --qk-layernorm"
    model, serial = run(words).config.model, Mesh.serial()
    mesh = Mesh({**serial.axes, "tp": Axis("tp", (0, 1), 0, None)}, 0, serial.device)
    built = GPTModel(model, mesh, vocab_size=30, sequence_parallel=sequence_parallel)
    planned = parameter_shapes.stage_parameters(
        model, 30, Stage(range(2)), 2, sequence_parallel=sequence_parallel
    )
    records = {name: sharding.of(p) for name, p in built.named_parameters()}
    assert {p.name: (p.summed, p.qk_norm) for p in planned} == {
        name: (record.regions[0].summed, record.qk_norm) for name, record in records.items()
    }


V3 = (
    "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--position-embedding-type rope --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm "
    "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --seq-length 4096 --lr 1e-4 "
    "--micro-batch-size 1 --train-iters 10 --mock-data --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 129279 --make-vocab-size-divisible-by 1 --dry-run"
)


def test_a_dense_model_of_deepseek_v3s_shape_is_planned() -> None:
    """The matrices of its attention have 187,105,280 elements a layer, the latents' gains 2,048."""
    plan = run("--dry-run-world-size 64 --pipeline-model-parallel-size 8 "
               "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6 "
               "--tensor-model-parallel-size 8 --sequence-parallel", V3)  # fmt: skip
    model = plan.config.model
    q = 7168 * 1536 + 1536 * 128 * (128 + 64)
    kv = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    output = 128 * 128 * 7168
    assert q + kv + output == 187_105_280
    kinds = parameter_shapes.parameters_by_kind(model, 129280)
    assert kinds["attention"] == 61 * (187_105_280 + 2048)
    total = kinds["attention"] + 61 * (3 * 7168 * 18432 + 2 * 7168) + 7168 + 2 * 129280 * 7168
    assert sum(parameter_shapes.parameters_by_kind(model, 129280).values()) == total
    assert f"{total:,}" in report(plan, "pretrain_gpt")
    # Megatron-LM's formula: the latents' gains count, causal scores by half.
    scores = 128 * (128 + 64 + 128) * 4096 / 2
    layer = q + kv + 2048 + scores + output + 3 * 7168 * 18432
    expected = 6 * 4096 * (61 * layer + 7168 * 129280)
    assert operations_gpt.flops_per_sample(model, 4096, 129280) == pytest.approx(
        expected, rel=1e-12
    )
