"""Recomputation: keep a region's inputs, and make what it saves again when backward needs it.

    y = recompute(f, x)                keeps x alone
    with discarding(f, x) as y: ...    keeps x alone, and nothing of y in the block

In forward the region runs as always, but everything that autograd saves in it becomes a slot of a
frame. The first slot that backward asks for runs the region once more from the kept inputs, and
all slots are filled by order: the n-th tensor saved now is the n-th of then. The graph is that of
the first run, so that every gradient is computed and accumulated once, as without recomputation; of
the second run nothing but the slots stays. It always goes to its end, so that forward hooks of
modules come in pairs, and all ranks make the same collective calls.

Results are the same bit for bit: the second run has torch's generators as they stood, and dropout
here is keyed by what it is for.

(Chen et al., 2016, "Training deep nets with sublinear memory cost"; selective: Korthikanti et al.,
2022. Discarded outputs are those of Megatron-LM's fine-grained recomputation.)
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm, saved_tensors
from megatron.core.mesh import Axis
from megatron.core.saved_tensors import Handle, View, keeping, memory_of

Around = Callable[[], AbstractContextManager[Any]]
"""Gives a scope in which a region's inputs are kept, such as one that moves them to the host."""


def recompute(
    function: Callable[..., Any],
    *inputs: Tensor,
    distribute: Axis | None = None,
    around: Around = nullcontext,
) -> Any:
    """Return ``function(*inputs)``, keeping its inputs in place of what it saves.

    Without gradients it is a plain call.

    Args:
        function: of tensors to a tensor or several. It must save the same tensors in the same order
            each time, and should get all activations that it reads as inputs: those that it finds
            elsewhere stay alive, and get no other gradient than without recomputation.
        inputs: what it takes; any shape and dtype.
        distribute: ranks that hold the same, single input. Each keeps its share of it, and it is
            gathered for the second run: a collective call that all ranks make.
        around: see `Around`.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    frame = _Frame(function, inputs, distribute, around)
    with keeping(frame):
        return function(*inputs)


@contextmanager
def discarding(
    function: Callable[..., Any], *inputs: Tensor, around: Around = nullcontext
) -> Iterator[Any]:
    """Give ``function(*inputs)`` to the block; what saves it there keeps a reference only.

    It is made again, with all that ``function`` saves, by whatever of this backward needs first.
    What the block saves of other tensors stays saved. Arguments are those of `recompute`.
    """
    if not torch.is_grad_enabled():
        yield function(*inputs)
        return
    frame = _Frame(function, inputs, None, around)
    with keeping(frame):
        result = function(*inputs)
    with keeping(_Outputs(frame, _as_tuple(result))):
        yield result


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


class _Slot:
    """The place of a tensor that is made again; filled by its frame, and emptied by its use."""

    def __init__(self, frame: "_Frame", fill: Callable[["_Again"], Tensor]) -> None:
        self._frame, self._fill = frame, fill
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._frame.run_again()
        value, self._value = self._value, None
        assert value is not None
        return value

    def fill(self, again: "_Again") -> None:
        """Take the tensor out of a second run, if it is not there."""
        if self._value is None:
            self._value = self._fill(again)
            saved_tensors.see(self._value)


class _Again:
    """A second run: the tensors that it saves, by order, and what it returns."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []
        self.outputs: tuple[Tensor, ...] = ()

    def keep(self, x: Tensor) -> Handle:
        """Take a tensor, and let the graph of this run, which nobody goes through, be empty."""
        self.saved.append(x.detach())
        return _nothing


def _nothing() -> Tensor:
    raise AssertionError("nobody goes backward through a second run")


class _Frame:
    """One run of a region: what it takes to make again what it saved."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        distribute: Axis | None,
        around: Around,
    ) -> None:
        self._function = function
        with around():
            self._inputs = _Kept(inputs, distribute)
        # By the nodes of the graph alone: a slot that nobody needs any more is not filled.
        self._slots: list[weakref.ref[_Slot]] = []
        self._count = 0
        device = inputs[0].device if inputs else torch.device("cpu")
        self._generators = _Generators(device)

    def keep(self, x: Tensor) -> Handle:
        """Return a slot for a tensor that the region saves."""
        number, self._count = self._count, self._count + 1
        return self._slot(lambda again: again.saved[number])

    def output(self, number: int, view: View) -> Handle:
        """Return a slot for a tensor in the memory of the region's output ``number``."""
        return self._slot(lambda again: view.into(again.outputs[number].untyped_storage()))

    def _slot(self, fill: Callable[[_Again], Tensor]) -> _Slot:
        slot = _Slot(self, fill)
        self._slots.append(weakref.ref(slot))
        return slot

    def run_again(self) -> None:
        """Fill every slot that somebody may still need."""
        inputs, again = self._inputs.restored(), _Again()
        with self._generators.as_they_stood(), torch.enable_grad(), keeping(again):
            again.outputs = _as_tuple(self._function(*inputs))
        assert len(again.saved) == self._count, (
            f"a region saved {self._count} tensors at first and {len(again.saved)} when it ran "
            "again: it must do the same each time"
        )
        for slot in [reference() for reference in self._slots]:
            if slot is not None:
                slot.fill(again)


class _Outputs:
    """Stands for a region's outputs wherever they are saved."""

    def __init__(self, frame: _Frame, outputs: tuple[Tensor, ...]) -> None:
        self._frame, self._outputs = frame, outputs  # held, so that no other memory is at theirs
        self._numbers = {memory_of(out): number for number, out in enumerate(outputs)}

    def keep(self, x: Tensor) -> Handle | None:
        number = self._numbers.get(memory_of(x))
        return None if number is None else self._frame.output(number, View(x))


class _Kept:
    """The inputs of a region, saved like any tensor: in the way of the scopes around the region."""

    def __init__(self, inputs: Sequence[Tensor], distribute: Axis | None) -> None:
        self._axis, self._shapes = distribute, [x.shape for x in inputs]
        self._need_grad = [x.requires_grad for x in inputs]
        if distribute is not None:
            assert len(inputs) == 1, f"{len(inputs)} inputs are to be distributed"
            inputs = [_own_share(inputs[0], distribute)]
        # A graph node, since only those save tensors; none without something that needs gradients.
        anchor = torch.empty(0, requires_grad=True)
        self._node = _Inputs.apply(anchor, *inputs).grad_fn

    def restored(self) -> list[Tensor]:
        """Return the inputs as leaves that need gradients where the inputs did."""
        inputs = [x.detach() for x in self._node.saved_tensors]
        if self._axis is not None:
            inputs = [_joined(inputs[0], self._shapes[0], self._axis)]
        found = zip(inputs, self._need_grad, strict=True)
        return [x.detach().requires_grad_(needs) for x, needs in found]


class _Inputs(torch.autograd.Function):
    """Saves what it is given."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return anchor.new_empty(0)


def _own_share(x: Tensor, axis: Axis) -> Tensor:
    """Return a copy of this rank's share of the elements of ``x``, the last one padded with 0."""
    share = -(-x.numel() // axis.size)
    start = min(axis.coordinate * share, x.numel())
    mine = x.detach().reshape(-1)[start : start + share]
    return torch.nn.functional.pad(mine, (0, share - mine.numel()))


def _joined(share: Tensor, shape: torch.Size, axis: Axis) -> Tensor:
    """Return the tensor of whose elements every rank has its share."""
    return comm.all_gather(share, axis)[: shape.numel()].view(shape)


class _Generators:
    """torch's generators as they stand: the CPU's, and that of the device of the activations."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda" and torch.cuda.is_initialized():  # it is, unless tensors are fake
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._states = self._now()

    def _now(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    @contextmanager
    def as_they_stood(self) -> Iterator[None]:
        """Go back to then for the block, and to now after it."""
        now = self._now()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(now)
