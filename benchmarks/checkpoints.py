"""Checkpoints beside a plain file: saving, loading, the stall of a save beside training, 8 ranks.

    python benchmarks/checkpoints.py [--mb 512] [--rounds 5] [--ranks 8] [--folder DIR]

The state is a toy's: matrices as shares of flat buffers are, a large embedding, many vectors. In
each round the contestants take turns on the same disk:

    plain write     one process, one thread: chunks of 16 MB one after the other, then fsync
    save            the state of one process, published: checksums, index, fsync of all of it
    stall           of --async-save: what training waits for, from begin to publication, when its
                    next forward and backward (products of matrices here) take --compute seconds
    stall at once   the same, when the next update comes at once
    save by ranks   a state that all of --ranks processes hold alike, each byte written once
    plain read      one process, one thread, into memory that is there; the file is not in the cache
    load            the same, boxes into place; with all checksums compared first, and without

Ratios are medians over the rounds of ratios within a round.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron.core import comm
from megatron.core.dist_checkpointing import plan
from megatron.core.dist_checkpointing.background import BackgroundSave
from megatron.core.dist_checkpointing.format import CHUNK
from megatron.core.dist_checkpointing.load import load
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.save import save
from megatron.core.dist_checkpointing.staging import HostBuffer, stage
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init, whole
from megatron.training.verification.worker_pool import Pool

MB = 10**6
AIMS = {"save": 0.8, "load": 0.8, "load, checked": 0.6, "stall": 0.15}
"""The checked load reads twice, the second time from the system's cache."""
WIDTH = 1024


def state(megabytes: int) -> list[Item]:
    """Return a toy's tensors, in fp32, of about so many MB."""
    rows = megabytes * MB // 4 // WIDTH
    memory = torch.arange(rows * WIDTH, dtype=torch.int32).view(torch.float32)
    sizes = {"embedding": rows // 4}
    while sum(sizes.values()) + 800 < rows:
        sizes[f"matrix.{len(sizes)}"] = 768
        sizes[f"vector.{len(sizes)}"] = 1
    items, start = [], 0
    for name, count in sizes.items():
        data = memory[start : start + count * WIDTH]
        record = whole((count, WIDTH), Init())
        items.append(plan.of_flat(name, record, (count, WIDTH), 0, data))
        start += count * WIDTH
    return items


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def plain_write(path: Path, size: int) -> None:
    """Write ``size`` bytes one after the other, and flush them."""
    chunk = memoryview(bytearray(os.urandom(CHUNK)))
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, CHUNK):
            rest = chunk[: size - start]
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())


def plain_read(path: Path, out: memoryview) -> None:
    """Read a file from its begin to its end."""
    with open(path, "rb", buffering=0) as file:
        start = 0
        while start < len(out):
            start += os.readv(file.fileno(), [out[start : start + CHUNK]])


def forget(*paths: Path) -> None:
    """Take files out of the system's cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def save_by_ranks(rank: int, folder: str, megabytes: int) -> float:
    """Be one of several ranks that hold the same state: save it, and return the seconds."""
    mesh = Mesh.create(ParallelConfig.resolve(), torch.device("cpu"))
    mine = plan.spread(state(megabytes), rank, mesh.world.size)
    comm.barrier(mesh.world)
    return timed(lambda: save(mine, Path(folder), {}, mesh.world))


def stall(items: list[Item], folder: Path, buffer: HostBuffer, compute: float) -> float:
    """Save beside work; return the seconds that the work has waited."""
    matrix, world = torch.randn(512, 512), Mesh.serial().world
    begin = time.perf_counter()
    under_way = BackgroundSave(items, folder, {}, world, buffer)
    waited = time.perf_counter() - begin
    while time.perf_counter() - begin < compute:
        matrix = torch.tanh(matrix @ matrix)
    waited += timed(under_way.settle)
    while True:
        matrix = torch.tanh(matrix @ matrix)
        begin = time.perf_counter()
        written = under_way.written(torch.device("cpu"))
        waited += time.perf_counter() - begin
        if written:
            return waited + timed(under_way.finish)


def one_round(
    folder: Path, items: list[Item], buffer: HostBuffer, compute: float
) -> dict[str, float]:
    """Return the seconds of every contestant in one process."""
    world, size = Mesh.serial().world, stage(items).bytes
    shutil.rmtree(folder)
    folder.mkdir()
    plain, ours = folder / "plain", folder / "ours"
    found = {
        "plain write": timed(lambda: plain_write(plain, size)),
        "save": timed(lambda: save(items, ours, {}, world)),
    }
    for name, seconds in (("stall", compute), ("stall at once", 0.0)):
        found[name] = stall(items, folder / name, buffer, seconds)
    out = memoryview(bytearray(size))
    out[::4096] = bytes(len(out[::4096]))  # its pages are there, as those of the state are
    forget(plain)
    found["plain read"] = timed(lambda: plain_read(plain, out))
    for name, verify in (("load, checked", True), ("load", False)):
        forget(ours / "rank00000.bin")
        with Checkpoint(ours) as checkpoint:
            begin = time.perf_counter()
            load(items, checkpoint, world, verify=verify)
            found[name] = time.perf_counter() - begin
    return found


def ratios(one: dict[str, float]) -> dict[str, float]:
    """Return how the contestants of a round stand to their yardsticks; above 1 is faster."""
    found = {
        "save": one["plain write"] / one["save"],
        "load": one["plain read"] / one["load"],
        "load, checked": one["plain read"] / one["load, checked"],
        "stall": one["stall"] / one["save"],
        "stall at once": one["stall at once"] / one["save"],
    }
    if "save by ranks" in one:
        found["save by ranks"] = one["plain write"] / one["save by ranks"]
    return found


def report(rounds: Sequence[dict[str, float]], megabytes: float) -> dict[str, dict[str, float]]:
    """Print and return the medians."""
    found: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        seconds = statistics.median(one[name] for one in rounds)
        found[name] = {"seconds": seconds, "mb_per_second": megabytes / seconds}
        beside = [ratios(one)[name] for one in rounds if name in ratios(one)]
        if beside:
            found[name]["ratio"] = statistics.median(beside)
    print(f"{'':14}  {'s':>7}  {'MB/s':>6}  ratio")
    for name, row in found.items():
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        aim = f" (aim {AIMS[name]})" if name in AIMS else ""
        rate = "" if name.startswith("stall") else f"{row['mb_per_second']:.0f}"
        print(f"{name:14}  {row['seconds']:7.3f}  {rate:>6}  {ratio}{aim}")
    return found


def main() -> int:
    """Run all rounds; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mb", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8, help="0 leaves them out")
    parser.add_argument("--compute", type=float, default=2.0, help="seconds")
    parser.add_argument("--folder", help="on the disk to measure; a temporary one when absent")
    parser.add_argument("--json", metavar="FILE", help="write every round to this file")
    arguments = parser.parse_args()
    items, buffer, rounds = state(arguments.mb), HostBuffer(), list[dict[str, float]]()
    size = stage(items).bytes
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made, Pool() as pool:
        folder = Path(made) / "round"
        folder.mkdir()
        for _ in range(arguments.rounds):
            one = one_round(folder, items, buffer, arguments.compute)
            if arguments.ranks:
                place = str(folder / "ranks")
                seconds = pool.run(
                    arguments.ranks, save_by_ranks, place, arguments.mb, timeout=600.0
                )
                one["save by ranks"] = max(seconds)
            rounds.append(one)
    print(f"{size / MB:.0f} MB, {arguments.rounds} rounds, {arguments.ranks} ranks")
    found = report(rounds, size / MB)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"median": found, "rounds": rounds}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
