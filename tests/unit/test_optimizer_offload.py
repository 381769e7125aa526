"""Masters and states on the host: the same weights, bit for bit, and bytes as predicted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.distributed.ranges import first_part
from megatron.core.mesh import Mesh
from megatron.core.optimizer import memory
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.offload import HostShard
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from megatron.core.utils import UserError
from megatron.training.arguments import parse

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64": {"fp64": True},
    "bf16": {"bf16": True},
    "fine": {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    "scaled": {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "fp16",
        "exp_avg_sq_dtype": "fp16",
    },
}


def model_of(dtype: torch.dtype) -> nn.Module:
    """Two matrices and a bias, of odd sizes."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(17, 29, dtype=dtype), nn.Linear(29, 5, bias=False, dtype=dtype))
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values)
        decays = parameter.dim() > 1
        sharding.attach(parameter, sharding.whole(parameter.shape, Init(), decay=decays))
    sharding.name_parameters(model)
    return model


def make(precision: str, **settings: Any) -> tuple[nn.Module, Optimizer]:
    config = PrecisionConfig.resolve(**PRECISIONS[precision])
    model = model_of(getattr(torch, config.params_dtype))
    optimizer = build_optimizer(OptimizerConfig.resolve(**settings), [model], Mesh.serial(), config)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    """Run steps from gradients of their own; return the weights."""
    for number in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step(0.5, lr=0.01 * number, weight_decay=0.1)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_the_same_bit_for_bit(
    precision: str, rule: str, fraction: float, overlaps: bool
) -> None:
    settings = {"optimizer": rule, "clip_grad": 0.2}
    expected = train(*make(precision, **settings), range(1, 4))
    found = train(
        *make(
            precision,
            **settings,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=fraction,
            overlap_cpu_optimizer_d2h_h2d=overlaps,
        ),
        range(1, 4),
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
def test_a_part_on_the_host_gives_the_same_weights(rule: str) -> None:
    """Not bit for bit: torch's kernels round the last elements of a range in their own way."""
    expected = train(*make("fp64", optimizer=rule), range(1, 4))
    settings = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.3}
    found = train(*make("fp64", optimizer=rule, **settings), range(1, 4))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_on_host_and_device_are_predicted(precision: str, fraction: float) -> None:
    settings = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    _, optimizer = make(precision, **settings)
    plans = [buffer.plan for buffer in optimizer.data_parallel.buffers]
    predicted = memory.predict(
        plans,
        OptimizerConfig.resolve(**settings),
        PrecisionConfig.resolve(**PRECISIONS[precision]),
    )
    assert optimizer.memory() == predicted
    assert (predicted["host"] > 0) == (fraction > 0)
    if fraction == 1:
        assert predicted["masters"] == predicted["states"] == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_is_cast_on_its_way(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy from host to device goes through memory that is not pinned, and waits."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    copy = HostShard._copy

    def look(shard: HostShard, targets: list[Tensor], sources: list[Tensor]) -> object:
        seen.extend((t.dtype, s.dtype) for t, s in zip(targets, sources, strict=True))
        return copy(shard, targets, sources)

    monkeypatch.setattr(HostShard, "_copy", look)
    train(*make(precision, optimizer_cpu_offload=True), range(1, 2))
    assert seen and all(target == source for target, source in seen)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model, optimizer = make("fp32", optimizer_cpu_offload=True)
    before = train(model, optimizer, range(1, 2))
    states = [tensor.tensor.clone() for tensor in optimizer.tensors()]
    assert all(parameter.grad is not None for parameter in model.parameters())
    next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    assert not optimizer.step(1.0, lr=0.1, weight_decay=0.1).updated
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = [tensor.tensor for tensor in optimizer.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


def test_loaded_weights_are_what_is_updated() -> None:
    """fp32 weights have no masters in a checkpoint; the host's copies follow what was loaded."""
    plain, plain_optimizer = make("fp32")
    model, optimizer = make("fp32", optimizer_cpu_offload=True)
    assert [t.key for t in optimizer.tensors()] == [t.key for t in plain_optimizer.tensors()]
    for each in (plain, model):
        for parameter in each.parameters():
            parameter.data.mul_(3)
    optimizer.reload()
    expected = train(plain, plain_optimizer, range(1, 3))
    found = train(model, optimizer, range(1, 3))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_is_on_the_host_and_what_is_not() -> None:
    """The first part of every span, as one number of elements in all."""
    assert first_part([(0, 64), (64, 128)], 0.5) == ([(0, slice(0, 64))], [(1, slice(0, 64))])
    assert first_part([(0, 64)], 0.0) == ([], [(0, slice(0, 64))])
    assert first_part([(0, 100)], 1.0) == ([(0, slice(0, 100))], [])
    _, optimizer = make("fp32", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert [isinstance(shard, HostShard) for shard in optimizer.shards] == [True, False]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer-offload-fraction 1.5", "must be from 0 to 1"),
        ("--optimizer-cpu-offload --optimizer muon", "does not go with --optimizer muon"),
    ],
)
def test_refusals(words: str, message: str) -> None:
    run = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1e-3 "
        "--micro-batch-size 1 --mock-data --vocab-size 8 --train-iters 1 --device cpu"
    )
    with pytest.raises(UserError, match=message):
        parse(f"{run} {words}".split())
