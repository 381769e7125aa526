"""Parameters, buffers and operations of a run, against models that are known or built."""

import pytest
import torch

from megatron.core.distributed.buffers import build_buffers
from megatron.core.distributed.layout import plan_buffers
from megatron.core.distributed.pieces import Shares
from megatron.core.mesh import Axis, Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import groups
from megatron.core.pipeline_parallel.stages import Stage, make_stages
from megatron.core.transformer.config import TransformerConfig
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import buffer_plans, operations_gpt, parameter_shapes

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100"
)
CHOICES = [
    "",
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
    "--softmax-type learnable --kv-channels 24 --add-qkv-bias --disable-bias-linear",
    "--qk-layernorm --geglu --apply-layernorm-1p --max-position-embeddings 50",
    "--qk-layernorm --normalization RMSNorm --squared-relu --position-embedding-type none",
    "--position-embedding-type rope --mtp-num-layers 2",
    "--position-embedding-type rope --mtp-num-layers 1 --untie-embeddings-and-output-weights",
]


def parameter_count(model: TransformerConfig, rows: int) -> int:
    """Return the parameters of the whole model."""
    return sum(parameter_shapes.parameters_by_kind(model, rows).values())


def config(text: str = "") -> RunConfig:
    return parse(f"{SMALL} {text} --dry-run".split()).config


@pytest.mark.parametrize("text", CHOICES)
def test_every_parameter_is_the_built_models(text: str) -> None:
    run = config(text)
    model, (stage,) = run.model, run.stages
    built = GPTModel(model, Mesh.serial(), vocab_size=100, padded_vocab_size=128)
    planned = {p.name: p.shape for p in parameter_shapes.stage_parameters(model, 128, stage)}
    assert planned == {name: tuple(p.shape) for name, p in built.named_parameters()}
    assert parameter_count(model, 128) == sum(p.numel() for p in built.parameters())


def test_published_sizes() -> None:
    gpt2 = TransformerConfig.resolve(
        num_layers=12, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024
    )
    assert parameter_count(gpt2, 50257) == 124_439_808
    llama = {
        "num_attention_heads": 32,
        "num_layers": 32,
        "hidden_size": 4096,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }
    llama_2_7b = TransformerConfig.resolve(**llama, ffn_hidden_size=11008)
    assert parameter_count(llama_2_7b, 32000) == 6_738_415_616
    llama_3_8b = TransformerConfig.resolve(
        **llama, ffn_hidden_size=14336, group_query_attention=True, num_query_groups=8
    )
    assert parameter_count(llama_3_8b, 128256) == 8_030_261_248


@pytest.mark.parametrize(("text", "tp"), [("", 2), ("", 4), (CHOICES[1], 2)])
def test_tensor_parallel_ranks_hold_the_model_together(text: str, tp: int) -> None:
    model = config(f"{text} --dry-run-world-size {tp} --tensor-model-parallel-size {tp}").model
    stage = Stage(range(3))
    whole = {p.name: p.numel for p in parameter_shapes.stage_parameters(model, 128, stage)}
    for part in parameter_shapes.stage_parameters(model, 128, stage, tp):
        repeated = "norm" in part.name or "position" in part.name
        repeated |= part.name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        assert part.numel * (1 if repeated else tp) == whole[part.name]


def test_stages_hold_the_model_together() -> None:
    model = config("--untie-embeddings-and-output-weights").model
    parts = [
        p.name
        for stage in make_stages(3, 2)
        for p in parameter_shapes.stage_parameters(model, 128, stage)
    ]
    assert parts == [p.name for p in parameter_shapes.stage_parameters(model, 128, Stage(range(3)))]


def test_a_tied_head_is_repeated_on_the_last_stage() -> None:
    model = config().model
    last = make_stages(3, 2)[1]
    names = [p.name for p in parameter_shapes.stage_parameters(model, 128, last)]
    assert "output_layer.weight" in names


def test_operations_by_hand() -> None:
    model = TransformerConfig.resolve(
        num_layers=2, hidden_size=4, num_attention_heads=2, ffn_hidden_size=16
    )
    # Multiply-adds of a layer and token: qkv 4 x 12, out 4 x 4, fc1 and fc2 4 x 16 each; of scores
    # and values 2 x 4 x 8 over a full square of 8 keys, half of it when causal. Head: 4 x 10.
    per_token = 2 * (48 + 16 + 128 + 32) + 40
    assert operations_gpt.flops_per_sample(model, 8, 10) == 8 * per_token * 2 * 3


def test_operations_are_megatrons_formula() -> None:
    layers, hidden, heads, groups, inner, seq, rows = 5, 128, 8, 2, 352, 256, 1024
    model = TransformerConfig.resolve(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=inner,
        group_query_attention=True, num_query_groups=groups, swiglu=True,
    )  # fmt: skip
    attention = 12 * layers * hidden**2 * (1 + groups / heads + seq / hidden / 2)
    mlp = 12 * layers * hidden * inner * 3 / 2
    expected = seq * (attention + mlp + 6 * hidden * rows)
    assert operations_gpt.flops_per_sample(model, seq, rows) == pytest.approx(expected, rel=1e-12)


def test_operations_of_prediction_ahead() -> None:
    """Each depth: a layer, a projection of 2 x 4 to 4, three norms of 4, and the head again."""
    sizes = {"num_layers": 2, "hidden_size": 4, "num_attention_heads": 2, "ffn_hidden_size": 16}
    sizes["position_embedding_type"] = "rope"
    per_layer, head = 48 + 16 + 128 + 32, 40
    model = TransformerConfig.resolve(**sizes, mtp_num_layers=2)
    per_token = 4 * per_layer + 2 * (2 * 16 + 3 * 4) + 3 * head
    assert operations_gpt.flops_per_sample(model, 8, 10) == 8 * per_token * 2 * 3


@pytest.mark.parametrize("text", [*CHOICES, "--qk-layernorm --untie-embeddings-and-output-weights"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_buffers_are_planned_as_they_are_built(
    text: str, replicas: int, sequence_parallel: bool
) -> None:
    run, serial = config(text), Mesh.serial()
    tp = Axis("tp", (0, 1), 0, None)  # a model is built without a word between the two
    mesh = Mesh({**serial.axes, "tp": tp}, 0, serial.device)
    model = GPTModel(
        run.model,
        mesh,
        vocab_size=100,
        padded_vocab_size=128,
        sequence_parallel=sequence_parallel,
    )
    buffers = build_buffers(
        model.parameters(),
        torch.float32,
        group_of=groups.grouping(run.optimizer),
        shares=Shares("no_shard", mesh.alone, Axis("dp_cp", tuple(range(replicas)), 0, None)),
    )
    (stage,) = run.stages
    items = buffer_plans.buffer_items(
        list(
            parameter_shapes.stage_parameters(
                run.model, 128, stage, 2, sequence_parallel=sequence_parallel
            )
        )
    )
    planned = plan_buffers(items, replicas)
    assert sorted(plan.size for plan in planned) == sorted(b.plan.size for b in buffers)
    assert {frozenset(slot.name for slot in plan.slots) for plan in planned} == {
        frozenset(slot.name for slot in buffer.plan.slots) for buffer in buffers
    }


def test_tied_ends_of_two_stages_have_buffers_of_their_own() -> None:
    model = config().model
    for stage, name in zip(
        make_stages(3, 2), ("embedding.word_embeddings.weight", "output_layer.weight"), strict=True
    ):
        items = buffer_plans.buffer_items(
            list(parameter_shapes.stage_parameters(model, 128, stage))
        )
        alone = [plan for plan in plan_buffers(items, 1) if len(plan.slots) == 1]
        assert [plan.slots[0].name for plan in alone] == [name]


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_end_that_predicts_ahead_holds_the_embedding_too(untied: bool, schedule: str) -> None:
    """As a copy in a buffer of its own, or as the very parameter where both ends meet."""
    text = (
        "--position-embedding-type rope --mtp-num-layers 1 --num-layers 4 "
        f"--dry-run-world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    )
    run = config(text + " --untie-embeddings-and-output-weights" * untied)
    first, *_, last = (
        {p.name: p for p in parameter_shapes.stage_parameters(run.model, 128, stage)}
        for stage in run.stages
    )
    name, meet = "embedding.word_embeddings.weight", schedule == "zb-v"
    assert (first[name].tied, first[name].apart) == (not meet, meet)
    assert (name in last) == (not meet) and all(p.tied == (p.name == name) for p in last.values())
    assert ("output_layer.weight" in last) == untied
    assert "mtp.layers.0.eh_proj.weight" in last and not any("mtp" in other for other in first)
