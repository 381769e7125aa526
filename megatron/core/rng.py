"""Randomness that no layout changes: every draw is keyed by what it is for.

Initial values of a logical tensor are drawn in fp32 on the CPU, block by block of 2**20 elements,
each block from a generator keyed by (seed, logical name, block number), and then cast. A rank draws
only the blocks that its regions touch, so one rank and a thousand start from the same model. (fp64
and CUDA streams differ from fp32 ones, and a draw is not a prefix of a longer one.)

Dropout masks are keyed by (seed, place, iteration, global microbatch, coordinates), the key being
captured by the forward so that recomputation draws the same mask.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import sharding

BLOCK = 2**20


def key(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter of ``module`` from its record; padding stays zero.

    A parameter that has no name yet gets its path: values are keyed by the name.
    """
    sharding.name_parameters(module)
    for parameter in module.parameters():
        fill(parameter, seed)


@torch.no_grad()
def fill(parameter: nn.Parameter, seed: int) -> None:
    """Fill a parameter that has a name, as `initialize` does."""
    record = sharding.of(parameter)
    parameter.zero_()
    for region in record.regions:
        values = _draw(record, region.logical, seed)
        parameter[sharding.box_slices(region.local)].copy_(values)


def initial_values(record: sharding.Sharding, seed: int) -> Tensor:
    """Return what a whole logical tensor starts with, in fp32 on the CPU."""
    return _draw(record, tuple((0, size) for size in record.shape), seed)


def _draw(record: sharding.Sharding, box: sharding.Box, seed: int) -> Tensor:
    """Return fp32 initial values of one box of a logical tensor."""
    shape = sharding.box_shape(box)
    if record.init.kind == "constant":
        return torch.full(shape, record.init.scale)
    # Whole rows of the leading dim, so that the flat range is contiguous.
    row = math.prod(record.shape[1:])
    start, stop = box[0][0] * row, box[0][1] * row
    total = math.prod(record.shape)
    blocks = []
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first, last = block * BLOCK, min((block + 1) * BLOCK, total)
        values = _draw_block(record, seed, block, last - first)
        blocks.append(values[max(start - first, 0) : max(stop - first, 0)])
    rows = torch.cat(blocks).view(box[0][1] - box[0][0], *record.shape[1:])
    return rows[(slice(None), *sharding.box_slices(box[1:]))]


def _draw_block(record: sharding.Sharding, seed: int, block: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(key("init", seed, record.name, block))
    if record.init.kind == "normal":
        return torch.randn(count, generator=generator) * record.init.scale
    return (torch.rand(count, generator=generator) * 2 - 1) * record.init.scale


@dataclass(frozen=True)
class DropoutKey:
    """Which microbatch a forward belongs to; with a place it keys one dropout mask."""

    seed: int
    iteration: int
    microbatch: int
    """Number of the microbatch in the global batch: the same on every layout."""
    coordinate: int = 0
    """Position along the context-parallel axis, which cuts every activation."""

    def at(self, place: str, *split: int) -> int:
        """Return the seed of one mask.

        Args:
            place: where the mask is used, such as ``layers.3.attention``.
            split: coordinates along further axes that cut the masked tensor here.
        """
        return key(
            "dropout", self.seed, place, self.iteration, self.microbatch, self.coordinate, *split
        )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generator for ops that take no generator, and put it back after."""
    # This device's generator alone: torch.manual_seed visits those of every kind of device, and
    # where there is no CUDA it formats and keeps a stack trace at each call.
    generator = torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
