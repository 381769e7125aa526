"""Optimizer groups: who is updated by which rule with which settings, in runs and in plans."""

import pytest
import torch
from torch import nn

from megatron.core import rng, sharding
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import groups
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import Rates, Settings
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.optimizer.overrides import Override, read_override
from megatron.core.precision.config import PrecisionConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.plan import parameter_shapes
from tests.unit.test_buffers import parameter

ROW, COLUMN = "decoder.layers.*.mlp.linear_fc2.weight", "decoder.layers.*.mlp.linear_fc1.weight"
QKV = "decoder.layers.*.self_attention.linear_qkv.weight"
PROJ = "decoder.layers.*.self_attention.linear_proj.weight"
TABLES = "embedding.position_embeddings.weight, embedding.word_embeddings.weight"


def model_of(**fields: object) -> GPTModel:
    config = TransformerConfig.resolve(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=16,
        max_position_embeddings=4,
        **fields,
    )
    return GPTModel(config, Mesh.serial(), vocab_size=10)


def optimizer_of(model: nn.Module, **fields: object) -> Optimizer:
    config = OptimizerConfig.resolve(**fields)
    return build_optimizer(config, [model], Mesh.serial(), PrecisionConfig.resolve())


def test_groups_are_described_and_qk_norms_can_be_decayed() -> None:
    # Tables of 10 and 4 rows; in each layer 8 x (24 + 8 + 16 + 16) of matrices.
    decay, rest = optimizer_of(model_of(qk_layernorm=True)).describe()
    assert decay == (
        f"decay (adam): 10 parameters, 1.14K elements: {COLUMN}, {ROW}, {PROJ}, {QKV}, {TABLES}"
    )
    assert rest.startswith("no_decay (adam, no weight decay): 26 parameters, ")
    assert "q_layernorm.weight" in rest and "q_layernorm.bias" in rest
    model = model_of(qk_layernorm=True)
    decay, rest = optimizer_of(model, apply_wd_to_qk_layernorm=True).describe()
    assert "decoder.layers.*.self_attention.q_layernorm.weight" in decay
    assert "decoder.layers.*.self_attention.k_layernorm.weight" in decay
    assert "q_layernorm.weight" not in rest and "q_layernorm.bias" in rest


def test_matrices_are_muons_and_all_else_is_adams() -> None:
    model = model_of(untie_embeddings_and_output_weights=True)
    lines = optimizer_of(model, optimizer="muon", decoupled_lr=0.5).describe()
    assert lines[0] == (
        "adam decay (adam): 1 parameters, 32 elements: embedding.position_embeddings.weight"
    )
    assert lines[1] == (
        "adam decay decoupled (adam, --decoupled-lr): 2 parameters, 160 elements: "
        "embedding.word_embeddings.weight, output_layer.weight"
    )
    assert lines[2].startswith("adam no_decay (adam, no weight decay): ")
    assert lines[3] == (
        f"muon decay (muon): 8 parameters, 1.02K elements: {COLUMN}, {ROW}, {PROJ}, {QKV}"
    )
    assert len(lines) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--optimizer muon --untie-embeddings-and-output-weights --decoupled-lr 1e-2",
        "--optimizer muon --muon-scalar-optimizer lion --swiglu --qk-layernorm "
        "--group-query-attention --num-query-groups 2 "
        "--param-group-overrides *.mlp.*:lr_mult=0.5,optimizer=lion *.bias:wd_mult=0",
        "--optimizer muon --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope",
        "--mtp-num-layers 1 --position-embedding-type rope --apply-wd-to-qk-layernorm",
    ],
)
def test_a_plan_has_the_groups_of_the_run(text: str) -> None:
    """What `stage_parameters` says of each parameter decides as its record does."""
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        f"--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --dry-run {text}"
    )
    run = parse(words.split()).config
    model = GPTModel(run.model, Mesh.serial(), vocab_size=100, padded_vocab_size=128)
    group_of = groups.grouping(run.optimizer)
    mine = {sharding.of(p).name: group_of(sharding.of(p)) for p in model.parameters()}
    (stage,) = run.stages
    planned = parameter_shapes.stage_parameters(run.model, 128, stage)
    assert mine == {p.traits.name: group_of(p.traits) for p in planned}
    assert len(set(mine.values())) >= 2


def test_settings_follow_from_rates() -> None:
    rates = Rates(lr=0.1, weight_decay=0.5, decoupled_lr=0.3)
    text = ("a.*:lr_mult=0.5,wd_mult=2", "*.b:lr_mult=0", "table:wd_mult=0")
    group_of = groups.grouping(
        OptimizerConfig.resolve(decoupled_lr=1.0, param_group_overrides=text)
    )

    def settings(name: str, decay: bool = True, embedding: bool = False) -> Settings:
        return group_of(groups.Traits(name, decay, True, False, embedding)).settings(rates)

    assert settings("w") == Settings(0.1, 0.5)
    assert settings("w", decay=False) == Settings(0.1, 0.0)
    assert settings("w", embedding=True) == Settings(0.3, 0.5)
    assert settings("a.b") == Settings(0.05, 1.0)  # the first pattern that fits holds
    assert settings("c.b", embedding=True) == Settings(0.0, 0.5)
    assert settings("a.b", decay=False) == Settings(0.05, 0.0)
    assert settings("table", embedding=True) == Settings(0.3, 0.0)
    without = Rates(lr=0.1, weight_decay=0.5)
    table = group_of(groups.Traits("w", True, False, False, True))
    assert table.settings(without) == Settings(0.1, 0.5)


def test_overrides_are_read() -> None:
    assert read_override("a.*:lr_mult=0.5, wd_mult=2,optimizer=adam") == Override(
        "a.*", 0.5, 2.0, "adam"
    )
    for text in ("a.*", "a:lr=1", ":lr_mult=1", "a:", "a:lr_mult=1,lr_mult=2", "a:lr_mult"):
        with pytest.raises(UserError, match="--param-group-overrides"):
            read_override(text)
    for value in ("x", "-1", "nan", "inf"):
        with pytest.raises(UserError, match="is no factor"):
            read_override(f"a:lr_mult={value}")
    with pytest.raises(UserError, match="has the rules adam, not muon"):
        OptimizerConfig.resolve(param_group_overrides=("a:optimizer=muon",))
    with pytest.raises(UserError, match="has the rules muon and adam, not lion"):
        OptimizerConfig.resolve(optimizer="muon", param_group_overrides=("a:optimizer=lion",))


def test_an_override_that_nothing_takes_is_refused() -> None:
    config = OptimizerConfig.resolve(param_group_overrides=("a.*:lr_mult=2", "a.b:lr_mult=3"))
    with pytest.raises(UserError, match=r"a\.b:lr_mult=3: patterns before it take all"):
        groups.check_overrides(config, ["a.b", "a.c"])
    with pytest.raises(UserError, match=r"a\.\*:lr_mult=2: no parameter has such a name.* b\.a"):
        groups.check_overrides(config, ["b.a"])
    optimizer = optimizer_of(model_of(), param_group_overrides=("*.linear_fc3.*:lr_mult=0.1",))
    with pytest.raises(UserError, match="no parameter has such a name"):
        optimizer.describe()
    matrix = OptimizerConfig.resolve(
        optimizer="muon", param_group_overrides=("*.bias:optimizer=muon",)
    )
    with pytest.raises(UserError, match="which is no matrix"):
        groups.grouping(matrix)(groups.Traits("a.bias", False, False, False, False))


def test_an_override_moves_the_weights_it_names() -> None:
    """A rate of zero keeps a matrix as it is, also its decay, which goes with the rate."""
    first, second = parameter(3, 4, name="a.w"), parameter(3, 4, name="b.w")
    model = nn.ParameterList([first, second])
    before = [p.detach().clone() for p in model]
    optimizer = optimizer_of(model, param_group_overrides=("a.*:lr_mult=0", "b.*:lr_mult=0.5"))
    optimizer.zero_grad()
    for p in model:
        assert p.grad is not None
        p.grad.fill_(1.0)
    optimizer.step(1.0, lr=0.1, weight_decay=0.0)
    assert torch.equal(first, before[0])
    # Adam's first step is the rate.
    torch.testing.assert_close(second.detach(), before[1] - 0.05, rtol=1e-6, atol=1e-6)


def test_decoupled_rate_is_the_embeddings() -> None:
    model = model_of()
    rng.initialize(model, seed=1)
    optimizer = optimizer_of(model, optimizer="sgd", sgd_momentum=0.0, decoupled_lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(1e-3)
    optimizer.step(1.0, lr=0.1, weight_decay=0.0, decoupled_lr=0.4)
    for name, p in model.named_parameters():
        rate = 0.4 if name == "embedding.word_embeddings.weight" else 0.1
        torch.testing.assert_close(p.detach(), before[name] - rate * 1e-3, rtol=1e-5, atol=1e-7)
