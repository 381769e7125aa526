"""What a rank updates of one buffer: masters where weights are coarse, and states of any dtype.

bf16 has 8 bits of mantissa, so a step of less than 1/256 of a weight would be lost. A `Shard` of
bf16 parameters holds fp32 masters, updates those and rounds them into the parameters; fp32 and fp64
parameters are updated in place and cost no copy.

Update rules count in fp32 or fp64. Gradients, masters and states that are kept in less are widened
a piece at a time, updated and rounded back, so that the wide copies stay small. States in fp16 have
scales (`scaled`), and are always widened.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from megatron.core.distributed.pieces import Member, Pieces
from megatron.core.distributed.ranges import Part, Range, cut, intersect
from megatron.core.optimizer.scaled import DIVISORS, Scaled
from megatron.core.optimizer.update import Ranges, Signals, Step, UpdateRule

AT_ONCE = 1 << 22
"""Elements that are widened at once; whole blocks of `Scaled`."""


@dataclass(frozen=True)
class Dtypes:
    """In which dtypes an optimizer keeps what."""

    main: torch.dtype
    """Of masters; weights of this dtype have none."""
    computing: torch.dtype
    """Of the arithmetic."""
    states: Mapping[str, torch.dtype] = field(default_factory=dict)
    """By state; those that are not here have the dtype of the arithmetic."""


class Shard:
    """Ranges of one flat buffer that this rank updates, and their optimizer state.

    Args:
        buffer: the buffer.
        parts: of its spans.
        state_names: of the update rule.
        dtypes: of masters and states.
    """

    def __init__(
        self,
        buffer: Pieces,
        parts: Sequence[Part],
        state_names: Iterable[str],
        dtypes: Dtypes,
    ) -> None:
        self.buffer, self.dtypes = buffer, dtypes
        self.spans = [
            (buffer.spans[number][0] + part.start, buffer.spans[number][0] + part.stop)
            for number, part in parts
        ]
        self.sizes = [stop - start for start, stop in self.spans]
        self.weights = [buffer.weight_pieces[number][part] for number, part in parts]
        self.grads = [buffer.grad_pieces[number][part] for number, part in parts]
        self.has_masters = buffer.dtype != dtypes.main
        self.mains = self._mains()
        self.states: dict[str, list[Tensor]] = {}
        self.scaled: dict[str, list[Scaled]] = {}
        for name in state_names:
            dtype = dtypes.states.get(name, dtypes.computing)
            if dtype == torch.float16:
                divides = name in DIVISORS
                self.scaled[name] = Scaled.zeros(self.sizes, self.state_device, divides=divides)
            else:
                zeros = torch.zeros(sum(self.sizes), dtype=dtype, device=self.state_device)
                self.states[name] = list(zeros.split(self.sizes))
        self.groups = self._groups()

    @property
    def state_device(self) -> torch.device:
        """Return where states are."""
        return self.buffer.device

    def _mains(self) -> list[Tensor]:
        """Return what is updated: copies of the weights, or the weights themselves."""
        if not self.has_masters:
            return self.weights
        masters = torch.cat([piece.to(self.dtypes.main) for piece in self.weights])
        return list(masters.split(self.sizes))

    def _updated_from(self) -> list[Tensor]:
        """Return the gradients where they are used."""
        return self.grads

    def _groups(self) -> list[tuple[str, Ranges]]:
        """Return what is updated of each optimizer group."""
        found, buffer, gradients = [], self.buffer, self._updated_from()
        for group, segment in buffer.plan.segments:
            cuts: list[tuple[int, slice]] = []
            members: list[Member] = []
            for number, span in enumerate(self.spans):
                common = intersect(segment, span)
                if common is None:
                    continue
                members += buffer.members(common, len(cuts))
                cuts.append((number, slice(common[0] - span[0], common[1] - span[0])))
            if cuts:
                ranges = Ranges(
                    _cut(self.mains, cuts),
                    _cut(gradients, cuts),
                    {name: _cut(state, cuts) for name, state in self.states.items()},
                    tuple(members),
                    {name: _cut(state, cuts) for name, state in self.scaled.items()},
                )
                found.append((group, ranges))
        return found

    def members(self) -> Iterator[tuple[int, Member]]:
        """Yield (number of the span, part of a parameter in it), in order."""
        for number, span in enumerate(self.spans):
            for member in self.buffer.members(span, number):
                yield number, member

    def cut(self, ranges: Iterable[Range]) -> list[Part]:
        """Return the parts of the buffer's ``ranges`` that lie in `spans`."""
        return cut(ranges, self.spans)

    def kinds(self) -> Mapping[str, Sequence[Tensor | Scaled]]:
        """Return masters and states by name, each cut like `spans`."""
        masters = {"master": self.mains} if self.has_masters else {}
        return {**masters, **self.states, **self.scaled}

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all states."""
        plain = sum(piece.nbytes for pieces in self.states.values() for piece in pieces)
        return plain + sum(piece.nbytes for pieces in self.scaled.values() for piece in pieces)

    def fetch(self) -> None:
        """Have the gradients where they are used, or on their way there."""

    def signals(self, step: Signals) -> Signals:
        """Return what all groups are told, where the ranges are updated."""
        return step

    def reload(self) -> None:
        """Take note that weights were loaded."""

    def publish(self) -> None:
        """Round the masters into the parameters."""
        if self.has_masters:
            for weight, main in zip(self.weights, self.mains, strict=True):
                weight.copy_(main)


_Kept = TypeVar("_Kept", Tensor, Scaled)


def _cut(pieces: list[_Kept], cuts: list[tuple[int, slice]]) -> list[_Kept]:
    return [pieces[number][part] for number, part in cuts]


def update(rule: UpdateRule, ranges: Ranges, step: Step, computing: torch.dtype) -> None:
    """Let ``rule`` update ``ranges``, in fp32 or fp64 whatever the dtypes they are kept in."""
    kept = [*ranges.parameters, *ranges.grads, *(t for ts in ranges.states.values() for t in ts)]
    is_one = all(tensor.dtype == computing for tensor in kept)
    if not ranges.scaled and (is_one or rule.takes_as_kept(ranges)):
        rule.update(ranges, step)
        return
    all_states: dict[str, Sequence[Tensor | Scaled]] = {**ranges.states, **ranges.scaled}
    for number, part, members in _portions(rule, ranges):
        main, grad = ranges.parameters[number][part], ranges.grads[number][part]
        states = {name: pieces[number][part] for name, pieces in all_states.items()}
        wide = Ranges(
            [main.to(computing)],
            [grad.to(computing)],
            {name: [state.to(computing)] for name, state in states.items()},
            members,
        )
        rule.update(wide, step)
        main.copy_(wide.parameters[0])
        for name, state in states.items():
            state.copy_(wide.states[name][0])


def _portions(rule: UpdateRule, ranges: Ranges) -> Iterator[tuple[int, slice, tuple[Member, ...]]]:
    """Yield what is widened at once: (number of the range, part of it, members there).

    A rule that takes whole matrices gets one at a time, others do not look at members.
    """
    if rule.needs_whole:
        for member in ranges.members:
            place = slice(0, member.place.stop - member.place.start)
            yield member.range, member.place, (replace(member, range=0, place=place),)
        return
    for number, parameter in enumerate(ranges.parameters):
        for start in range(0, parameter.numel(), AT_ONCE):
            yield number, slice(start, start + AT_ONCE), ()
