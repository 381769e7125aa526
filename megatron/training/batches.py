"""From samples to microbatches on the device.

What a rank reads follows from (iteration, consumed samples, coordinate of its replica) alone: a
global batch is a range of sample numbers, cut into microbatches that replicas take in turns. A
resume starts from the consumed samples; nothing else is remembered. Reading ahead is done by worker
processes, which are started before training begins.

A batch is a dict of tensors, ``[B, S]`` each but for ``cu_seqlens`` (1-D, over the flattened
batch) and ``sentence_order`` (``[B]``, int64): tokens, labels (int64), loss_mask (float32), and
what else the model wants.
"""

import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.core.mesh import Mesh
from megatron.training.batch_size import BatchSizes

Batch = dict[str, Tensor]
PADDING = -1
"""In a list of sample numbers: a place that holds no sample and counts for nothing."""
UNKNOWN = -1
"""As the order of a sample's sentences: it does not count."""


class Samples(Protocol):
    """A dataset as the loop sees it: sample number -> arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Batches:
    """An endless (or long enough) row of this rank's microbatches."""

    def __init__(
        self,
        dataset: Samples,
        numbers: Iterable[Sequence[int]],
        device: torch.device,
        num_workers: int,
        without: Sequence[str] = (),
        exit_signal: int | None = None,
    ) -> None:
        """Start reading.

        Args:
            dataset: the samples.
            numbers: sample numbers of each microbatch, in order.
            device: where tensors go.
            num_workers: processes that read ahead.
            without: names that the model does not need and that are left out.
            exit_signal: what asks the loop for a clean stop. Schedulers send it to all processes,
                and a reader that died of it would take the loop with it before the save.
        """
        self._device = device
        self._pinned = device.type == "cuda"
        self._loader = iter(
            DataLoader(
                _Padded(dataset),  # type: ignore[arg-type]
                batch_sampler=_Numbers(numbers),  # type: ignore[arg-type]
                num_workers=num_workers,
                collate_fn=functools.partial(collate, without=without),
                worker_init_fn=functools.partial(_ignore, exit_signal),
                pin_memory=self._pinned,
                # Its own, so that starting a reader does not move on the process's generator.
                generator=torch.Generator(),
            )
        )

    def take(self, count: int) -> Iterator[Batch]:
        """Yield the next ``count`` microbatches."""
        for _ in range(count):
            batch = next(self._loader)
            yield {
                name: value.to(self._device, non_blocking=self._pinned)
                for name, value in batch.items()
            }

    def leave_out(self, count: int) -> None:
        """Do nothing for ``count`` microbatches that are not trained on: nobody reads them."""


class NoBatches:
    """Microbatches of a rank that needs no samples: empty ones."""

    def take(self, count: int) -> Iterator[Batch]:
        """Yield ``count`` empty microbatches."""
        for _ in range(count):
            yield {}

    def leave_out(self, count: int) -> None:
        """Do nothing."""


def training_numbers(
    mesh: Mesh,
    sizes: BatchSizes,
    micro_batch_size: int,
    *,
    iteration: int,
    consumed_samples: int,
    train_iters: int,
    skipped: frozenset[int],
    order: Callable[[int], int],
) -> Iterator[list[int]]:
    """Yield the sample numbers of this rank's microbatches, from a position to the run's end.

    Args:
        mesh: where this rank stands.
        sizes: the global batch by consumed samples.
        micro_batch_size: samples in a microbatch.
        iteration: iterations done.
        consumed_samples: samples they consumed.
        train_iters: iterations of the whole run.
        skipped: iterations (from 1) whose samples are not read.
        order: sample number at each position in the run.
    """
    while iteration < train_iters:
        size = sizes.at(consumed_samples)
        if iteration + 1 not in skipped:
            for start in starts(mesh, consumed_samples, size, micro_batch_size):
                yield [order(start + offset) for offset in range(micro_batch_size)]
        iteration += 1
        consumed_samples += size


def evaluation_numbers(
    mesh: Mesh, size: int, micro_batch_size: int, *, consumed_samples: int, length: int
) -> Iterator[list[int]]:
    """Yield the sample numbers of evaluations, going round a dataset of ``length`` samples."""
    while True:
        for start in starts(mesh, consumed_samples, size, micro_batch_size):
            yield [(start + offset) % length for offset in range(micro_batch_size)]
        consumed_samples += size


def whole_numbers(mesh: Mesh, micro_batch_size: int, length: int) -> Iterator[list[int]]:
    """Yield the sample numbers of passes over a whole dataset, one pass after the other.

    Every rank gets `whole_count` microbatches a pass; the last ones are padded.
    """
    size = whole_count(mesh, micro_batch_size, length) * micro_batch_size * mesh.dp.size
    while True:
        for start in starts(mesh, 0, size, micro_batch_size):
            numbers = range(start, start + micro_batch_size)
            yield [number if number < length else PADDING for number in numbers]


def whole_count(mesh: Mesh, micro_batch_size: int, length: int) -> int:
    """Return how many microbatches each rank reads in one pass over ``length`` samples."""
    return -(-length // (micro_batch_size * mesh.dp.size))


def starts(mesh: Mesh, first: int, size: int, micro_batch_size: int) -> range:
    """Return the first position of each of this rank's microbatches of a global batch."""
    stride = micro_batch_size * mesh.dp.size
    assert size % stride == 0, f"global batch {size} is no multiple of {stride}"
    offset = first + mesh.dp.coordinate * micro_batch_size
    return range(offset, first + size, stride)


def collate(samples: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> Batch:
    """Return samples as one batch; document bounds are joined over the flattened batch."""
    batch = {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
        for name in samples[0]
        if name != "cu_seqlens" and name not in without
    }
    if "cu_seqlens" in samples[0]:
        length = len(samples[0]["tokens"])
        bounds = [np.zeros(1, np.int32)]
        for number, sample in enumerate(samples):
            # Each sample's bounds start with its 0, which is the end of the one before.
            bounds.append((sample["cu_seqlens"][1:] + number * length).astype(np.int32))
        batch["cu_seqlens"] = torch.from_numpy(np.concatenate(bounds))
    return batch


def _ignore(number: int | None, worker: int) -> None:
    """Let a reading process ignore a signal that is meant for the loop."""
    if number is not None:
        signal.signal(number, signal.SIG_IGN)


class _Padded:
    """A dataset that also has padding: its first sample, of which nothing counts."""

    def __init__(self, dataset: Samples) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        if number != PADDING:
            return self._dataset[number]
        sample = dict(self._dataset[0])
        sample["loss_mask"] = np.zeros_like(sample["loss_mask"])
        if "sentence_order" in sample:
            sample["sentence_order"] = np.full_like(sample["sentence_order"], UNKNOWN)
        return sample


class _Numbers:
    """An iterable, as torch's loader wants it."""

    def __init__(self, numbers: Iterable[Sequence[int]]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self._numbers)
