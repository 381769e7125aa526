"""``--dataloader-type external``: microbatches from loaders that the entry point brings.

Where samples do not come from token files (a stream, a service, another library's loader), the
program's ``build_datasets`` returns `Loaders` in place of data sets, and what they give is used as
it is. A loader is a function from a `Start` to an iterable of microbatches:

    def train(start):
        first = start.consumed_samples + start.replica * start.micro_batch_size
        for number in itertools.count(first, start.micro_batch_size * start.replicas):
            yield {"tokens": ..., "labels": ..., "loss_mask": ...}

    def build_datasets(config, sizes, tokenizer, policy, say):
        return Loaders(train=train)

- It is called once, when the checkpoint has been loaded, by every process; those of one replica
  must get the same microbatches.
- A microbatch holds ``micro_batch_size`` samples of this replica, as a dict of tensors by names
  that the program's forward step knows. The loop moves tensors to the device.
- An iteration takes global batch / (micro-batch x replicas) of them, also while the batch grows;
  those of ``--iterations-to-skip`` are taken and dropped. An evaluation takes ``--eval-iters``
  times as many, and the next one goes on where it ended.
- A loader that begins after ``consumed_samples`` makes a resumed run the uninterrupted one. One
  that does not begins anew, and samples are seen twice.
- One that ends before the run does is an error. There is no length: ``--eval-iters -1`` and
  ``--full-validation`` are refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.mesh import Mesh
from megatron.core.utils import UserError


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a loader begins, and for whom."""

    consumed_samples: int
    """Samples that all replicas have taken of this set, in this run and those it continues."""
    micro_batch_size: int
    replica: int
    """Number of this replica, from 0."""
    replicas: int


Loader = Callable[[Start], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """What ``build_datasets`` returns: a set without a loader is not evaluated."""

    train: Loader | None = None
    valid: Sequence[Loader] = ()
    test: Loader | None = None
    valid_names: Sequence[str] = ()
    """What to call the validation sets, where there are several."""


class ExternalBatches:
    """This rank's microbatches as a loader gives them; the counterpart of `batches.Batches`."""

    def __init__(self, loader: Loader, start: Start, device: torch.device) -> None:
        self._iterator: Iterator[Mapping[str, Any]] = iter(loader(start))
        self._device = device
        self._taken = 0

    def take(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield the next ``count`` microbatches.

        Raises:
            UserError: the loader has no more.
        """
        for _ in range(count):
            batch = next(self._iterator, None)
            if batch is None:
                raise UserError(
                    f"--dataloader-type external: the loader ended after {self._taken} "
                    "microbatches, but the run takes more: let it give more, or shorten the run"
                )
            self._taken += 1
            yield {
                name: value.to(self._device, non_blocking=True)
                if isinstance(value, Tensor)
                else value
                for name, value in batch.items()
            }

    def leave_out(self, count: int) -> None:
        """Pass over ``count`` microbatches that are not trained on."""
        for _ in self.take(count):
            pass


def open_loader(
    loader: Loader, mesh: Mesh, micro_batch_size: int, consumed_samples: int
) -> ExternalBatches:
    """Return a loader's microbatches for this rank, from a position on."""
    start = Start(
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        replica=mesh.dp.coordinate,
        replicas=mesh.dp.size,
    )
    return ExternalBatches(loader, start, mesh.device)


def check(is_external: bool, data: Any) -> None:
    """Refuse data sets where loaders are asked for, and the other way round.

    Raises:
        UserError: ``data``, what ``build_datasets`` returned, does not suit --dataloader-type, or
            does not name each of several validation sets.
    """
    if len(data.valid) > 1 and len(data.valid_names) != len(data.valid):
        raise UserError(
            f"this program returns {len(data.valid)} validation sets and {len(data.valid_names)} "
            "names: let its build_datasets give one name for each in valid_names"
        )
    sets = [one for one in (data.train, *data.valid, data.test) if one is not None]
    if any(callable(one) != is_external for one in sets):
        raise UserError(
            "--dataloader-type external: this program builds data sets, no loaders of its own; "
            "choose single or cyclic"
            if is_external
            else "this program brings loaders of its own; give --dataloader-type external"
        )
