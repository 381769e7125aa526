"""The messages of one iteration as a rank sees them: on their way here, here, on their way out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.core.pipeline_parallel.messages import Message

Shape = tuple[int, ...]


class Mailbox:
    """Messages by name; whoever takes one out has it alone.

    Args:
        axis: the pipeline's ranks.
        device: of the messages.
        dtype: of the messages.
        shapes: of each microbatch's activation, which all stages share.
    """

    def __init__(
        self, axis: Axis, device: torch.device, dtype: torch.dtype, shapes: Sequence[Shape]
    ) -> None:
        self.axis, self.device, self.dtype, self.shapes = axis, device, dtype, shapes
        self._here: dict[Message, tuple[Tensor, comm.Handle | None]] = {}
        self._leaving: dict[Message, tuple[Tensor, comm.Handle]] = {}

    def put(self, message: Message, tensor: Tensor) -> None:
        """Keep a message that was made on this rank until it is taken or sent."""
        shape = tuple(self.shapes[message.microbatch])
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
        tensor = torch.empty(self.shapes[message.microbatch], dtype=self.dtype, device=self.device)
        handle = comm.receive(tensor, self.axis, peer)
        self._here[message] = (tensor, handle)
        return handle.wait

    def release(self, message: Message) -> None:
        """Return once a message has left."""
        self._leaving.pop(message)[1].wait()

    def assert_empty(self) -> None:
        """Find messages that nobody took or waited for."""
        assert not self._here and not self._leaving, f"left over: {self._here | self._leaving}"
