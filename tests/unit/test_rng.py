"""Initial values and dropout masks do not depend on the layout."""

import pytest
import torch

from megatron.core import rng, sharding
from megatron.core.kernels.dropout import dropout
from megatron.core.rng import DropoutKey
from megatron.core.sharding import Init, Sharding, box_slices, split


def filled(record: Sharding, shape: tuple[int, ...], seed: int = 7) -> torch.Tensor:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.full(shape, 9.0))
    sharding.attach(module.weight, record)
    sharding.name_parameters(module)
    rng.initialize(module, seed)
    return module.weight.detach()


@pytest.mark.parametrize(("dim", "size", "parts"), [(0, 3, 1), (1, 4, 1), (0, 2, 2), (0, 6, 1)])
def test_shares_join_to_the_serial_tensor(
    dim: int, size: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng, "BLOCK", 16)  # several blocks in a small tensor
    shape, init = (12, 8), Init("normal", 0.5)
    serial = filled(split(shape, init, dim, 0, 1, parts=parts), shape)
    joined = torch.empty(shape)
    for coordinate in range(size):
        record = split(shape, init, dim, coordinate, size, parts=parts)
        local_shape = [extent // size if d == dim else extent for d, extent in enumerate(shape)]
        local = filled(record, tuple(local_shape))
        for region in record.regions:
            joined[box_slices(region.logical)] = local[box_slices(region.local)]
    assert torch.equal(joined, serial)


def test_padding_stays_zero() -> None:
    region = sharding.Region(((0, 3), (0, 2)), ((0, 3), (0, 2)))
    weight = filled(Sharding((3, 2), (region,), Init("normal", 1.0)), (5, 2))
    assert (weight[:3] != 0).all() and (weight[3:] == 0).all()


def test_draws_have_the_right_distribution() -> None:
    shape = (300, 300)
    normal = filled(split(shape, Init("normal", 0.02), 0, 0, 1), shape)
    assert normal.std().item() == pytest.approx(0.02, rel=0.02)
    assert normal.mean().abs() < 3 * 0.02 / 300
    uniform = filled(split(shape, Init("uniform", 0.5), 0, 0, 1), shape)
    assert uniform.abs().max() <= 0.5
    assert uniform.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.02)
    assert (filled(split((4,), Init(scale=1.0), 0, 0, 1), (4,)) == 1).all()


def test_seed_and_name_decide() -> None:
    record, shape = split((4, 4), Init("normal", 1.0), 0, 0, 1), (4, 4)
    assert torch.equal(filled(record, shape, 1), filled(record, shape, 1))
    assert not torch.equal(filled(record, shape, 1), filled(record, shape, 2))


def test_keys_do_not_run_together() -> None:
    keys = {rng.key("a", 1), rng.key("a", "1"), rng.key("a1"), rng.key("a", 1, ""), rng.key(1, "a")}
    assert len(keys) == 5
    assert rng.key("init", 1234, "decoder", 0) == rng.key("init", 1234, "decoder", 0) < 2**63


def test_a_dropout_mask_belongs_to_its_place_and_time() -> None:
    key, x = DropoutKey(1, 5, 2), torch.ones(64, 64)
    mask = dropout(x, 0.25, key.at("mlp"))
    assert torch.equal(mask, dropout(x, 0.25, key.at("mlp")))
    others = [
        DropoutKey(2, 5, 2).at("mlp"),
        DropoutKey(1, 6, 2).at("mlp"),
        DropoutKey(1, 5, 3).at("mlp"),
        DropoutKey(1, 5, 2, 1).at("mlp"),
        key.at("attention"),
        key.at("mlp", 1),
    ]
    assert all(not torch.equal(mask, dropout(x, 0.25, other)) for other in others)
    torch.testing.assert_close(mask.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_seeding_leaves_the_default_generator_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with rng.seeded(99, torch.device("cpu")):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected) and not torch.equal(inside, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dropout_keeps_a_byte_per_element_and_no_other_value(dtype: torch.dtype) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, plain = (x.clone().requires_grad_() for _ in range(2))
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = dropout(ours, 0.3, 5)
    generator = torch.Generator().manual_seed(5)
    factor = torch.empty_like(x).bernoulli_(0.7, generator=generator) / 0.7
    expected = plain * factor
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(y, expected) and torch.equal(ours.grad, plain.grad)
    assert sum(tensor.nbytes for tensor in saved) == x.numel()
