"""Recomputation and offload on a device: copies beside its work are whole, and memory is free."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core import rng
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.offload import Offloader
from megatron.core.recompute import recompute
from megatron.core.rng import DropoutKey
from megatron.core.transformer.config import TransformerConfig
from tests.gpu import needs
from tests.gpu.needs import DEVICE

pytestmark = needs.CUDA

WIDTH, ROWS, LAYERS = (32, 16, 4) if needs.REHEARSAL else (2048, 4096, 12)
WAYS = {
    "whole layers": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "parts": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mlp"),
    },
    "moved": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        "min_offloaded_tensor_size": 1,
    },
    "layers moved": {"cpu_offloading_num_layers": LAYERS - 1, "min_offloaded_tensor_size": 1},
}


def trained(way: str) -> list[Tensor]:
    """Return losses and gradients of four microbatches, two of them alive at once."""
    config = TransformerConfig.resolve(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        **WAYS.get(way, {}),
    )
    model = GPTModel(config, Mesh.serial(DEVICE), vocab_size=101)
    rng.initialize(model, 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    generator = torch.Generator().manual_seed(2)
    losses: list[Tensor] = []
    for pair in range(2):
        for number in (2 * pair, 2 * pair + 1):
            tokens = torch.randint(0, 101, (2, 65), generator=generator).to(DEVICE)
            key = DropoutKey(1, 1, number)
            losses.append(model(tokens[:, :-1], tokens[:, 1:], dropout=key).sum())
        for loss in losses[2 * pair :]:
            loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(loss.detach() for loss in losses), *grads]


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return trained("plain")


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_are_the_same_bit_for_bit(plain: list[Tensor], way: str) -> None:
    # Some sums of gradients have no fixed order on CUDA; in what is left rounding alone differs.
    for found, expected in zip(trained(way), plain, strict=True):
        assert torch.equal(found, expected) or needs.far(found, expected) < 1e-6


def test_the_devices_generator_is_put_back() -> None:
    dropout, x = nn.Dropout(0.5), torch.ones(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    torch.manual_seed(3)
    out = recompute(lambda x: dropout(torch.sin(x)).square(), x)
    after = torch.rand(4, device=DEVICE)
    out.sum().backward()
    later = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    twin = x.detach().clone().requires_grad_()
    dropout(torch.sin(twin)).square().sum().backward()
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]
    assert torch.equal(after, torch.rand(4, device=DEVICE))
    assert torch.equal(later, torch.rand(4, device=DEVICE))


def test_copies_are_whole_while_the_device_is_busy() -> None:
    """Each is overwritten as soon as it may be: buffers and memory are used again at once."""
    offloader, x = Offloader(DEVICE), torch.ones(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    busy = torch.randn(WIDTH, WIDTH, device=DEVICE)
    for _ in range(5):
        factors, y = 1.0, x
        with offloader.forward():
            for number in range(1, LAYERS + 1):
                busy = busy @ busy * 1e-3  # copies queue up behind it
                with offloader.group(tuple):
                    y = y * torch.full_like(y, 1 + number / 16)  # its factor is moved
                factors *= 1 + number / 16
        scribble = [torch.full_like(y, -7.0) for _ in range(LAYERS)]  # where the factors were
        y.sum().backward()
        assert needs.far(x.grad, torch.full_like(x, factors)) < 1e-5  # type: ignore[arg-type]
        x.grad = None
        del scribble


def test_memory_of_the_device_is_let_go() -> None:
    if needs.REHEARSAL:
        pytest.skip("the CPU does not count what is allocated")
    offloader, x = Offloader(DEVICE), torch.ones(ROWS, WIDTH, device=DEVICE, requires_grad=True)
    size, before = x.numel() * x.element_size(), torch.cuda.memory_allocated()
    with offloader.forward():
        y = x * 1
        for _ in range(LAYERS):
            with offloader.group(tuple):
                y = torch.sin(y)
    loss = y.sum()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert held <= 2 * size  # the last output, and a little
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    # Two groups are there at once, a gradient, and what an operation makes.
    assert torch.cuda.max_memory_allocated() - before <= 7 * size
