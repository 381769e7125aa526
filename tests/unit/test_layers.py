"""Linear and embedding layers: how their gradients reach the buffer."""

import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.mesh import Mesh
from megatron.core.sharding import Init, split
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding, VocabularyRows
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


def make_linear() -> ColumnParallelLinear:
    record = split((6, 4), Init(), 0, 0, 1)
    layer = ColumnParallelLinear(record, 6, Mesh.serial(), torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = torch.zeros_like(parameter)
    return layer


def test_recomputation_adds_each_gradient_to_the_buffer_once() -> None:
    layer = make_linear()
    x = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    buffers = {name: parameter.grad for name, parameter in layer.named_parameters()}
    told: list[int] = []
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: told.append(id(one)))
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    torch.nn.functional.linear(x.detach(), weight, bias).square().sum().backward()
    for name, twin in (("weight", weight), ("bias", bias)):
        parameter = getattr(layer, name)
        assert parameter.grad is buffers[name]
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-12, atol=1e-12)
    assert sorted(told) == sorted(id(parameter) for parameter in layer.parameters())


def test_recomputation_adds_the_embeddings_gradient_to_the_buffer_once() -> None:
    mesh = Mesh.serial()
    layer = VocabParallelEmbedding(VocabularyRows(7, 8, mesh), 4, Init(), mesh, torch.float64)
    layer.weight.data.normal_()
    layer.weight.grad = buffer = torch.zeros_like(layer.weight)
    told: list[int] = []
    layer.weight.register_post_accumulate_grad_hook(lambda one: told.append(id(one)))
    tokens_BS = torch.tensor([[1, 3, 3], [0, 6, 1]])
    checkpoint(layer, tokens_BS, use_reentrant=False).sum().backward()
    assert layer.weight.grad is buffer and told == [id(layer.weight)]
    counts = torch.tensor([1, 2, 0, 2, 0, 0, 1, 0], dtype=torch.float64)
    assert torch.equal(buffer, counts[:, None].expand(8, 4))


def test_nested_postponing_takes_the_innermost_list_away() -> None:
    with layers.postponing() as outer:
        with layers.postponing() as inner:
            assert outer == inner == []
        assert layers._postponed[-1] is outer
    assert not layers._postponed
