"""fp16 numbers with a scale for each block, against numpy's float64 and the definition."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import load, part, plan, staging
from megatron.core.dist_checkpointing.plan import Item, of_flat
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.staging import stage
from megatron.core.mesh import Mesh
from megatron.core.optimizer.scaled import BLOCK, Scaled
from megatron.core.sharding import Init, Region, Sharding, box_slices

CPU = torch.device("cpu")
FP32_MAX = float(np.finfo(np.float32).max)
Array = npt.NDArray[Any]


def encode(values: Tensor, divides: bool = False) -> Scaled:
    (scaled,) = Scaled.zeros([values.numel()], CPU, divides=divides)
    scaled.copy_(values)
    return scaled


def spread_out(size: int, seed: int = 0) -> Tensor:
    """Numbers of all sizes, blocks of very different ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(size, generator=generator) * 60 - 50
    sizes -= (torch.arange(size) // BLOCK) * 7 % 60
    return torch.randn(size, generator=generator) * 2**sizes


def rounded(values: Array, divides: bool) -> Array:
    """One block in float64: 11 bits to the nearest even, none below 2^-30 of the largest."""
    mantissas, exponents = np.frexp(values.astype(np.float64))
    found: Array = np.ldexp(np.rint(mantissas * 2**11), exponents - 11)
    if not found.any():
        return found
    # The power of two that is not above the largest number.
    top = 2.0 ** (np.frexp(np.abs(found).max())[1] - 1)
    least = top * 2.0**-29
    small = np.abs(values) < least
    found[small & (values != 0)] = least if divides else 0.0
    return found


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_numbers_have_eleven_bits_down_to_a_share_of_their_blocks_largest(
    size: int, divides: bool
) -> None:
    values = spread_out(size)
    if divides:
        values = values.square()
    values[::7] = 0
    found = encode(values, divides).to(torch.float32).double().numpy()
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        np.testing.assert_array_equal(found[block], rounded(values[block].numpy(), divides))


@pytest.mark.parametrize("divides", [False, True])
def test_what_was_decoded_has_the_same_bits_again(divides: bool) -> None:
    """Also where the largest number is rounded up to a power of two, and at both ends of fp32."""
    values = spread_out(64 * 40 + 5)
    values[::64] = 2.0 - 2.0**-12 + torch.arange(41) * 2.0**-13
    values[64:128] = torch.randn(64) * 1e-44
    values[128:192] = torch.linspace(0, FP32_MAX * 0.999, 64)
    values[192:256] = 0
    once = encode(values.abs() if divides else values, divides)
    twice = encode(once.to(torch.float32), divides)
    assert torch.equal(once.halves, twice.halves)
    assert torch.equal(once.exponents[4:], twice.exponents[4:])
    assert torch.equal(once.to(torch.float32), twice.to(torch.float32))


def test_neither_end_of_fp32_is_lost() -> None:
    small = torch.tensor([2e-42, -3e-42, 1e-40, 1e-45]).double()
    large = torch.tensor([3.4e38, -1.0, 1e30, 0.0]).double()
    for given, vanishes in ((small, 3), (large, 1)):
        found = encode(given.float()).to(torch.float32).double()
        given[vanishes] = 0
        torch.testing.assert_close(found, given, rtol=2**-11, atol=0)


def test_what_is_not_finite_stays_so_and_takes_no_bits_from_its_neighbours() -> None:
    values = spread_out(64, 3)
    apart = values.clone()
    apart[5], apart[6], apart[7] = float("inf"), float("-inf"), float("nan")
    found, expected = (encode(x).to(torch.float32) for x in (apart, values))
    assert found[5:8].isnan().tolist() == [False, False, True]
    assert found[5:7].tolist() == [float("inf"), float("-inf")]
    values[5:8] = 0
    expected = encode(values).to(torch.float32)
    assert torch.equal(found[:5], expected[:5]) and torch.equal(found[8:], expected[8:])


def test_parts_are_views_that_start_with_a_block() -> None:
    values = spread_out(300, 5)
    whole, parts = encode(values), encode(torch.zeros(300))
    for start, stop in ((0, 64), (64, 256), (256, 1 << 22)):
        part = parts[start:stop]
        part.copy_(values[start:stop])
        assert part.numel() == min(stop, 300) - start
    assert torch.equal(parts.halves, whole.halves)
    assert torch.equal(parts.exponents, whole.exponents)
    with pytest.raises(AssertionError, match="cuts a block"):
        whole[63:128]
    assert torch.equal(whole.decoded(37, 211), whole.to(torch.float32)[37:211])


def test_ranges_have_blocks_of_their_own_in_one_piece_of_memory() -> None:
    ranges = Scaled.zeros([65, 64, 3], CPU, divides=False)
    assert [(r.numel(), r.exponents.numel()) for r in ranges] == [(65, 2), (64, 1), (3, 1)]
    assert sum(r.nbytes for r in ranges) == 2 * 132 + 4
    assert len({r.halves.untyped_storage().data_ptr() for r in ranges}) == 1
    ranges[1].copy_(torch.ones(64))
    assert not ranges[0].to(torch.float32).any() and not ranges[2].to(torch.float32).any()


def test_columns_of_a_matrix_are_written_in_chunks_and_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has parts of two matrices in one, from an odd element of it on."""
    monkeypatch.setattr(part, "CHUNK", 128)
    monkeypatch.setattr(load, "PART", 256)
    monkeypatch.setattr(load, "DECODED", 512)
    monkeypatch.setattr(staging, "CHUNK", 128)
    most, decode = [0], Scaled.decoded

    def counted(self: Scaled, start: int, stop: int) -> Tensor:
        most[0] = max(most[0], stop - start)
        return decode(self, start, stop)

    monkeypatch.setattr(Scaled, "decoded", counted)
    shape, start, stop = (30, 16), 7, 470
    # Columns 0 to 8 of the local matrix are columns 4 to 12 of the first, the rest of the second.
    regions = (
        Region(local=((0, 30), (0, 8)), logical=((0, 30), (4, 12))),
        Region(local=((0, 30), (8, 16)), logical=((0, 30), (20, 28))),
    )
    record = Sharding((30, 40), regions, Init())
    kept, fresh = encode(spread_out(stop - start, 7)), encode(torch.ones(stop - start))

    def item_of(scaled: Scaled) -> Item:
        meta = torch.empty(scaled.numel(), dtype=torch.float32, device="meta")
        return of_flat("m", record, shape, start, meta, coded=scaled)

    index = part.write(stage([item_of(kept)]), tmp_path, 0)
    copies = stage([item_of(kept)], staging.HostBuffer())
    for copy, piece in zip(copies.items[0].pieces, item_of(kept).pieces, strict=True):
        assert torch.equal(copy.tensor, plan.values(piece.tensor, piece.coded))
    most[0] = 0  # what this test asked for does not count
    stage([item_of(kept)], staging.HostBuffer())
    assert 0 < 4 * most[0] <= 2 * 128  # a chunk, and what lies between its columns
    expected = kept.to(torch.float32)
    local = torch.full((30 * 16,), float("nan"))
    local[start:stop] = expected
    logical = torch.full((30, 40), float("nan"))
    logical[:, 4:12], logical[:, 20:28] = local.view(shape)[:, :8], local.view(shape)[:, 8:]
    content = (tmp_path / "rank00000.bin").read_bytes()
    for box in index.tensors["m"].boxes:
        values = logical[box_slices(box.box)].contiguous().numpy().tobytes()
        assert content[box.offset : box.offset + len(values)] == values
    with Checkpoint(tmp_path, index) as checkpoint:
        most[0] = 0
        load.load([item_of(fresh)], checkpoint, Mesh.serial().world)
    assert 0 < 4 * most[0] <= 512
    assert torch.equal(fresh.halves, kept.halves)
    assert torch.equal(fresh.exponents, kept.exponents)
