"""The messages of one iteration as a rank sees them: on their way here, here, on their way out."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.core.pipeline_parallel.messages import Message

Shape = tuple[int, ...]
ShapeOf = Callable[[int], Shape]
"""Gives the shape of a microbatch's activation, which all stages share, by number from 0."""


class Mailbox:
    """Messages by name; whoever takes one out has it alone.

    Args:
        axis: the pipeline's ranks.
        device: of the messages.
        dtype: of the messages.
        shape_of: gives the shape of every message of a microbatch.
    """

    def __init__(
        self, axis: Axis, device: torch.device, dtype: torch.dtype, shape_of: ShapeOf
    ) -> None:
        self.axis, self.device, self.dtype, self.shape_of = axis, device, dtype, shape_of
        self._here: dict[Message, tuple[Tensor, comm.Handle | None]] = {}
        self._leaving: dict[Message, tuple[Tensor, comm.Handle]] = {}

    def put(self, message: Message, tensor: Tensor) -> None:
        """Keep a message that was made on this rank until it is taken or sent."""
        shape = tuple(self.shape_of(message.microbatch))
        assert tensor.dtype == self.dtype and tuple(tensor.shape) == shape, (
            f"{message} is {tensor.dtype} {tuple(tensor.shape)}, not {self.dtype} {shape}"
        )
        self._here[message] = (tensor, None)

    def take(self, message: Message) -> Tensor:
        """Return a message; wait for it where it comes from another rank."""
        tensor, handle = self._here.pop(message)
        if handle is not None:
            handle.wait()
        return tensor

    def send(self, message: Message, peer: int) -> Callable[[], None]:
        """Start to send a message that was put; return what waits for its arrival."""
        tensor = self.take(message).contiguous()
        handle = comm.send(tensor, self.axis, peer)
        self._leaving[message] = (tensor, handle)
        return handle.wait

    def receive(self, message: Message, peer: int) -> Callable[[], None]:
        """Start to receive a message; return what waits for its arrival."""
        tensor = torch.empty(
            self.shape_of(message.microbatch), dtype=self.dtype, device=self.device
        )
        handle = comm.receive(tensor, self.axis, peer)
        self._here[message] = (tensor, handle)
        return handle.wait

    def release(self, message: Message) -> None:
        """Return once a message has left."""
        self._leaving.pop(message)[1].wait()

    def assert_empty(self) -> None:
        """Find messages that nobody took or waited for."""
        assert not self._here and not self._leaving, f"left over: {self._here | self._leaving}"
