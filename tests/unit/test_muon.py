"""Muon against torch.optim.Muon, its own formula, and on parts of matrices."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from megatron.core import sharding
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.matrices import Matrix
from megatron.core.optimizer.muon import scale
from megatron.core.optimizer.newton_schulz import orthogonalise, schedule
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from megatron.core.transformer.attention import qkv_record
from megatron.core.transformer.config import TransformerConfig
from tests.unit.test_newton_schulz import torchs_own

PRECISION = {
    torch.float32: PrecisionConfig.resolve(),
    torch.float64: PrecisionConfig.resolve(fp64=True),
    torch.bfloat16: PrecisionConfig.resolve(bf16=True),
}
F64 = torch.float64


class Tiny(nn.Module):
    """Two matrices, one taller and one wider, with biases, behind a table that is no matrix."""

    def __init__(self, dtype: torch.dtype, fused: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(6, 5, dtype=dtype)
        self.first = nn.Linear(5, 12, dtype=dtype)
        self.second = nn.Linear(12, 3, dtype=dtype)
        for name, parameter in self.named_parameters():
            record = sharding.whole(
                tuple(parameter.shape),
                Init(),
                decay=parameter.dim() > 1,
                matrix=parameter.dim() > 1 and "table" not in name,
            )
            sharding.attach(parameter, replace(record, embedding="table" in name))
        record = sharding.of(self.first.weight)
        sharding.attach(self.first.weight, replace(record, fused=fused))
        sharding.name_parameters(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.table(tokens))))

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [self.first.weight, self.second.weight]

    @property
    def others(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if all(p is not m for m in self.matrices)]


def optimizer_of(model: nn.Module, dtype: torch.dtype, **fields: object) -> Optimizer:
    config = OptimizerConfig.resolve(optimizer="muon", **fields)
    return build_optimizer(config, [model], Mesh.serial(), PRECISION[dtype])


def batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randint(0, 6, (8,), generator=generator)


@pytest.mark.parametrize(
    ("mode", "theirs", "factor"),
    [("shape_scaling", "original", 1.0), ("spectral", "match_rms_adamw", 0.2)],
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_ten_steps_equal_torch_in_float64(
    mode: str, theirs: str, factor: float, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's Muon for matrices beside its AdamW for the rest; the table is decayed, too."""
    monkeypatch.setattr(
        _muon, "_zeropower_via_newtonschulz", lambda grad, c, steps, eps: torchs_own(grad, steps)
    )
    ours, other = Tiny(F64), Tiny(F64)
    optimizer = optimizer_of(
        ours,
        F64,
        clip_grad=0.0,
        muon_momentum=0.95,
        muon_nesterov=nesterov,
        muon_scale_mode=mode,
        muon_extra_scale_factor=factor,
        muon_coefficient_type="simple",
    )
    muon = torch.optim.Muon(
        other.matrices, momentum=0.95, nesterov=nesterov, adjust_lr_fn=theirs, weight_decay=0.0
    )
    vectors = [p for p in other.others if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": [other.table.weight]}, {"params": vectors, "weight_decay": 0.0}], foreach=False
    )
    for step, tokens in enumerate(batches(10)):
        lr, decay = 0.01 * (step + 1), 0.1 + 0.02 * step
        optimizer.zero_grad()
        ours(tokens).square().sum().backward()
        optimizer.step(0.25, lr=lr, weight_decay=decay)
        for group in (*muon.param_groups, *adam.param_groups):
            group["lr"] = lr
        muon.param_groups[0]["weight_decay"] = adam.param_groups[0]["weight_decay"] = decay
        other.zero_grad()
        (other(tokens).square().sum() * 0.25).backward()
        muon.step()
        adam.step()
    for mine, its in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-11)


def test_ten_steps_are_the_formula() -> None:
    """L2 instead of decoupled decay, another scale, fused rows, a gradient that is clipped."""
    fused = (("gate", 2), ("value", 4))  # rows 0-1, 6-7 and rows 2-5, 8-11
    model = Tiny(F64, fused)
    optimizer = optimizer_of(
        model,
        F64,
        clip_grad=0.5,
        decoupled_weight_decay=False,
        muon_momentum=0.8,
        muon_nesterov=True,
        muon_scale_mode="unit_rms_norm",
        muon_num_ns_steps=3,
    )
    p, m = model.first.weight.detach().clone(), torch.zeros(12, 5, dtype=F64)
    rows = [[0, 1, 6, 7], [2, 3, 4, 5, 8, 9, 10, 11]]
    for tokens in batches(10):
        optimizer.zero_grad()
        model(tokens).square().sum().backward()
        squares = sum((q.grad.square().sum() for q in model.parameters()), torch.zeros(()))
        norm = squares.sqrt()
        g = model.first.weight.grad * min(1.0, 0.5 / (norm.item() + 1e-6)) + 0.3 * p
        m = 0.8 * m + 0.2 * g
        u = 0.2 * g + 0.8 * m
        for part in rows:
            x = orthogonalise(u[part], schedule("quintic", 3))
            p[part] -= 0.05 * math.sqrt(len(part) / 5) * x
        optimizer.step(1.0, lr=0.05, weight_decay=0.3)
        torch.testing.assert_close(model.first.weight.detach(), p, rtol=1e-10, atol=1e-12)


def test_scales_of_updates() -> None:
    def of(mode: str, rows: int, columns: int) -> float:
        config = OptimizerConfig.resolve(muon_scale_mode=mode, muon_extra_scale_factor=0.5)
        return scale(config, rows, columns)

    assert of("spectral", 4, 9) == of("spectral", 9, 4) == 1.5
    assert of("shape_scaling", 16, 4) == 1.0 and of("shape_scaling", 4, 16) == 0.5
    assert of("unit_rms_norm", 16, 4) == 1.0 and of("unit_rms_norm", 4, 16) == 0.25


@pytest.mark.parametrize("scalar", ["adam", "lion"])
def test_a_gradient_that_is_not_finite_changes_nothing(scalar: str) -> None:
    model = Tiny(torch.float32)
    optimizer = optimizer_of(model, torch.float32, muon_scalar_optimizer=scalar)

    def held() -> list[Tensor]:
        states = [state.tensor for state in optimizer.tensors()]
        return [t.detach().clone() for t in (*model.parameters(), *states)]

    def train(spoil: float) -> None:
        optimizer.zero_grad()
        model(next(batches(1))).square().sum().backward()
        model.second.weight.grad[0, 0] *= spoil
        optimizer.step(1.0, lr=0.1, weight_decay=0.1)

    train(1.0)
    before = held()
    train(math.nan)
    train(math.inf)
    assert all(map(torch.equal, before, held()))
    train(1.0)
    assert not any(map(torch.equal, before[:2], held()[:2]))


def test_bf16_weights_have_masters_that_are_updated_a_matrix_at_a_time() -> None:
    """As an fp32 copy of the model is, given the same gradients."""
    half, wide = Tiny(torch.bfloat16), Tiny(torch.float32)
    with torch.no_grad():
        for to, source in zip(wide.parameters(), half.parameters(), strict=True):
            to.copy_(source)
    first = optimizer_of(half, torch.bfloat16, clip_grad=0.0)
    second = optimizer_of(wide, torch.float32, clip_grad=0.0)
    for tokens in batches(3):
        first.zero_grad()
        second.zero_grad()
        half(tokens).float().square().sum().backward()
        for to, source in zip(wide.parameters(), half.parameters(), strict=True):
            to.grad.copy_(source.grad)
        first.step(1.0, lr=1e-4, weight_decay=0.1)
        second.step(1.0, lr=1e-4, weight_decay=0.1)
    masters = {t.key: t.tensor for t in first.tensors() if ".master." in t.key}
    for name, parameter in wide.named_parameters():
        assert torch.equal(masters[f"optimizer.master.{name}"].view_as(parameter), parameter)
        assert torch.equal(half.get_parameter(name), parameter.bfloat16())


def test_qkv_is_taken_apart_unless_told_otherwise() -> None:
    fused = (("query", 2), ("key", 1), ("value", 1))
    made = {}
    for split in (True, False):
        model = Tiny(F64, fused)
        optimizer = optimizer_of(model, F64, muon_split_qkv=split, clip_grad=0.0)
        before = model.first.weight.detach().clone()
        optimizer.zero_grad()
        model(next(batches(1))).square().sum().backward()
        gradient = model.first.weight.grad.clone()
        optimizer.step(1.0, lr=1.0, weight_decay=0.0)
        made[split] = before - model.first.weight.detach()
        if not split:
            whole = orthogonalise(gradient, schedule("quintic", 5)) * math.sqrt(12)
            torch.testing.assert_close(made[split], whole, rtol=1e-8, atol=1e-8)
        else:  # a first momentum points where the gradient does
            keys = orthogonalise(gradient[2::4], schedule("quintic", 5)) * math.sqrt(5)
            torch.testing.assert_close(made[split][2::4], keys, rtol=1e-8, atol=1e-8)
    assert not torch.allclose(made[True], made[False])


def _rank(tp: int, rank: int, sharers: int) -> Mesh:
    serial = Mesh.serial()
    axes = {
        "tp": Axis("tp", tuple(range(tp)), rank, None),
        "kv_replica": Axis("kv_replica", tuple(range(sharers)), rank % sharers, None),
    }
    return Mesh({**serial.axes, **axes}, 0, serial.device)


@pytest.mark.parametrize(("heads", "groups", "tp"), [(4, 4, 2), (8, 2, 2), (8, 2, 4), (8, 1, 4)])
def test_blocks_of_the_parts_are_the_blocks_of_the_whole(heads: int, groups: int, tp: int) -> None:
    """Each row of queries, keys and values is answered for once, also where ranks hold copies."""
    config = TransformerConfig.resolve(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else None,
        kv_channels=2,
        position_embedding_type="rope",
    )
    sharers = max(1, tp // groups)
    serial = Mesh.serial()
    record = qkv_record(config, serial)
    whole = Matrix(record, record.shape, record.fused, serial, serial.tp)
    answered = torch.zeros(record.shape[0], dtype=torch.int64)
    for rank in range(tp):
        mesh = _rank(tp, rank, sharers)
        mine = qkv_record(config, mesh)
        rows = max(region.local[0][1] for region in mine.regions)
        matrix = Matrix(mine, (rows, 16), mine.fused, mesh, mesh.tp)
        logical = torch.cat([torch.arange(*region.logical[0]) for region in mine.regions])
        for block, all_of_it in zip(matrix.blocks, whole.blocks, strict=True):
            assert block.shape == all_of_it.shape
            assert set(logical[block.local_rows].tolist()) <= set(all_of_it.rows.tolist())
            answered[logical[block.local_rows]] += block.is_owner
    assert answered.tolist() == [1] * record.shape[0]
    query, key, value = (set(block.rows.tolist()) for block in whole.blocks)
    assert len(query) == heads * 2 and len(key) == len(value) == groups * 2
    assert min(query) == 0 and max(value) == record.shape[0] - 1
