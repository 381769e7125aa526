"""New weights, gathered from the ranks that updated shares of them.

With ``--overlap-param-gather`` all gathers are started when the optimizer is done, in the order in
which the next forward needs them, and each unit waits for its own; else they are waited for at
once.
"""

from collections.abc import Sequence

from megatron.core import comm
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.distributed.ranges import intersect
from megatron.core.distributed.units import Unit, Watch, watch


def gather(buffer: FlatBuffer, number: int) -> comm.Handle:
    """Start to fill bucket ``number`` with all ranks' weights."""
    start, stop = buffer.plan.buckets[number]
    piece = buffer.weight_pieces[number]
    return comm.all_gather_into(buffer.data[start:stop], piece, buffer.shares.axis, async_op=True)


class WeightGather:
    """Gathers the weights of buffers that are whole on every rank, and shared out in an update.

    Args:
        buffers: in order of the model's chunks. Those that this rank updates all of, such as those
            of experts with one replica, have nothing to gather, and one piece for all buckets.
        units: of the model.
        overlap: let the gathers run beside the next forward.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], units: Sequence[Unit], *, overlap: bool
    ) -> None:
        self._overlap = overlap
        # A chunk's buffers hold its last layers first, and its first layers are needed first.
        self._buckets = [
            (buffer, number)
            for buffer in buffers
            if buffer.shares.axis.size > 1
            for number in reversed(range(len(buffer.plan.buckets)))
        ]
        self._pending: dict[int, comm.Handle] = {}
        """By number of the bucket, from the first one to be gathered."""
        if overlap:
            self._needs = [self._needed(unit) for unit in units]
            watch(units, Watch(before_forward=self._await))

    def _needed(self, unit: Unit) -> list[int]:
        mine = {id(parameter) for parameter in unit.parameters}
        return [
            at
            for at, (buffer, number) in enumerate(self._buckets)
            if any(
                id(parameter) in mine
                and intersect((slot.start, slot.stop), buffer.plan.buckets[number])
                for slot, parameter in zip(buffer.plan.slots, buffer.parameters, strict=True)
            )
        ]

    def start(self) -> None:
        """Start all gathers; a collective."""
        self.settle()
        self._pending = {at: gather(*bucket) for at, bucket in enumerate(self._buckets)}
        if not self._overlap:
            self.settle()

    def settle(self) -> None:
        """Return once all weights are there."""
        for handle in self._pending.values():
            handle.wait()
        self._pending.clear()

    def _await(self, unit: int) -> None:
        for at in self._needs[unit]:
            if at in self._pending:
                self._pending.pop(at).wait()
