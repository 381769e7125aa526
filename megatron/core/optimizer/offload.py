"""Masters and states in host memory, updated there (``--optimizer-cpu-offload``).

A `HostShard` is the part of a buffer that is updated by the CPU (Ren et al., 2021, "ZeRO-Offload"):

    gradients --> host        update of masters and states by the CPU        masters --> weights

The host always has a master, since the weights stay on the device. Weights that are coarser are
rounded on the host first, into memory of their own: a copy that casts on the way would go through a
temporary, which is not pinned. On CUDA the copies run in a stream of their own, from and into
pinned memory; with ``overlaps`` gradients of all shards are on their way while the first ones are
used, and weights while the next ones are updated. Where the device is the CPU itself all of it
happens in the same way, copies included.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.pieces import Pieces
from megatron.core.distributed.ranges import Part
from megatron.core.optimizer.mixed_precision import Dtypes, Shard
from megatron.core.optimizer.update import Signals

HOST = torch.device("cpu")


class HostShard(Shard):
    """Ranges of a buffer whose masters and states are in host memory.

    Args:
        buffer: the buffer.
        parts: of its spans.
        state_names: of the update rule.
        dtypes: of masters and states.
        overlaps: let copies run beside updates.
        pins: gradients and weights travel from and into pinned memory, where the device is CUDA.
    """

    def __init__(
        self,
        buffer: Pieces,
        parts: Sequence[Part],
        state_names: Iterable[str],
        dtypes: Dtypes,
        *,
        overlaps: bool = False,
        pins: tuple[bool, bool] = (True, True),
    ) -> None:
        device = buffer.device
        self._overlaps = overlaps
        self._pins_grads, self._pins_weights = (pin and device.type == "cuda" for pin in pins)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrival: torch.cuda.Event | None = None
        self._departure: torch.cuda.Event | None = None
        super().__init__(buffer, parts, state_names, dtypes)
        self._rounded = self.mains
        """Weights on their way to the device: memory of their own, where masters are finer."""
        if self.has_masters:
            self._rounded = self._empty(buffer.dtype, pinned=self._pins_weights)

    @property
    def state_device(self) -> torch.device:
        return HOST

    def _empty(self, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
        """Return one piece of memory of the host, cut like `spans`."""
        flat = torch.empty(sum(self.sizes), dtype=dtype, device=HOST, pin_memory=pinned)
        return list(flat.split(self.sizes))

    def _mains(self) -> list[Tensor]:
        travels = self._pins_weights and not self.has_masters
        mains = self._empty(self.dtypes.main, pinned=travels)
        for main, weight in zip(mains, self.weights, strict=True):
            main.copy_(weight)
        return mains

    def _updated_from(self) -> list[Tensor]:
        self._host_grads = self._empty(self.buffer.grad_dtype, pinned=self._pins_grads)
        return self._host_grads

    @property
    def host_bytes(self) -> int:
        """Return what this shard has in host memory."""
        kept = [*self.mains, *self._host_grads]
        kept += self._rounded if self.has_masters else []
        copies: int = sum(piece.nbytes for piece in kept)
        return copies + self.state_bytes

    def fetch(self) -> None:
        _wait(self._departure)
        self._arrival = self._copy(self._host_grads, self.grads)
        if not self._overlaps:
            _wait(self._arrival)

    def signals(self, step: Signals) -> Signals:
        _wait(self._arrival)
        scale = step.inverse_scale
        return Signals(
            number=step.number.to(HOST),
            inverse_scale=None if scale is None else scale.to(HOST),
            found_nonfinite=step.found_nonfinite.to(HOST),
        )

    def reload(self) -> None:
        """Take the masters from the weights, where no checkpoint has them."""
        if not self.has_masters:
            for main, weight in zip(self.mains, self.weights, strict=True):
                main.copy_(weight)

    def publish(self) -> None:
        _wait(self._departure)  # it may still read what is rounded into
        if self.has_masters:
            for rounded, main in zip(self._rounded, self.mains, strict=True):
                rounded.copy_(main)
        self._departure = self._copy(self.weights, self._rounded)
        if self._stream is not None:
            # What computes next with the weights comes after their arrival.
            torch.cuda.current_stream(self.buffer.device).wait_stream(self._stream)
        if not self._overlaps:
            _wait(self._departure)

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> torch.cuda.Event | None:
        """Copy between host and device; return what tells when it is done, on CUDA."""
        for target, source in zip(targets, sources, strict=True):
            assert target.dtype == source.dtype, "a copy that casts has a temporary"
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.buffer.device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
