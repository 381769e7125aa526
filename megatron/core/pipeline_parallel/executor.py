"""Run a schedule: this rank's actions over its chunks of a model, with the messages in between.

One executor runs every schedule; it knows neither models nor losses. A chunk's forward is a
function that the caller gives:

    forward_step(chunk, microbatch, input) -> output

``input`` is None in the first stage; the last stage's output is the loss that backward starts from,
scaled by the caller, who also keeps what is to be reported.

The two actions of a pair take turns (`turns`): the backward, in a thread of its own, begins, and
the forward goes on where the backward waits for other ranks. They share no tensor that one of them
writes but the parameters' gradients, which the backward alone adds to.

What a stage has sent on is only the root of its backward: autograd needs its history, not its
values. With ``free_outputs`` its memory is given back once the send has ended, unless its own
operation saved it or it is a view. So a stage must not go on computing with its output.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core import saved_tensors
from megatron.core.mesh import Axis
from megatron.core.pipeline_parallel.actions import Action, Pair, Step, parts
from megatron.core.pipeline_parallel.messages import made, needed
from megatron.core.pipeline_parallel.order import Instruction, Post, Program, programs
from megatron.core.pipeline_parallel.p2p import Mailbox, ShapeOf
from megatron.core.pipeline_parallel.schedules import Schedule
from megatron.core.turns import Turns

ForwardStep = Callable[[int, int, Tensor | None], Tensor]
GradientCallback = Callable[[int, str, bool], None]
"""(chunk, kind of the action, whether it is the last that adds to the chunk's weight gradients)."""
Task = Callable[[], Any]
Postponing = Callable[[], AbstractContextManager[list[Task]]]
Around = Callable[[Step], AbstractContextManager[None]]


class PipelineExecutor:
    """Runs schedules on one rank of a pipeline; all its ranks must run the same ones.

    Args:
        axis: the pipeline's ranks.
        device: of activations.
        dtype: of activations between stages.
        overlap: let transfers run beside the actions; else each is waited for at once.
        free_outputs: free a stage's output once it is sent.
        postponing: collects weight gradients as closures while a block runs
            (`tensor_parallel.layers.postponing`). Without it, ``backward_input`` does all the work.
        delaying: collects weight gradients of a whole backward, which computes them where it waits
            for other ranks; the last backward of a chunk does not, whose gradients are summed over
            replicas as they come.
        around: gives a context in which a step is done: a timer, a heartbeat.
    """

    def __init__(
        self,
        axis: Axis,
        device: torch.device,
        dtype: torch.dtype,
        *,
        overlap: bool = True,
        free_outputs: bool = True,
        postponing: Postponing | None = None,
        delaying: Postponing | None = None,
        around: Around | None = None,
    ) -> None:
        self.axis, self.device, self.dtype = axis, device, dtype
        self.overlap, self.free_outputs = overlap, free_outputs
        self.postponing: Postponing = postponing or (lambda: nullcontext([]))
        self.delaying: Postponing = delaying or (lambda: nullcontext([]))
        self.around: Around = around or (lambda step: nullcontext())
        self.turns = Turns(partial(_choose, device))
        # By identity: to hash all ranks' lists in every iteration would cost more than it saves.
        self._programs: dict[int, tuple[Schedule, Program]] = {}

    def run(
        self,
        schedule: Schedule,
        forward_step: ForwardStep,
        shape_of: ShapeOf,
        *,
        before_gradients: GradientCallback | None = None,
        after_gradients: GradientCallback | None = None,
    ) -> None:
        """Do one iteration: gradients are added up in the parameters, none is set to zero first.

        Args:
            schedule: actions of all ranks; kept, so make one and use it again.
            forward_step: see the top of this file; called without gradients if the schedule has no
                backward.
            shape_of: gives the shape of a microbatch's activation between stages; asked only where
                something is sent or received.
            before_gradients: called before every action of a backward.
            after_gradients: the same, after it.
        """
        iteration = _Iteration(self, schedule, forward_step, shape_of)
        with torch.set_grad_enabled(iteration.trains):
            for instruction in self._program(schedule):
                backward = _backward_of(instruction)
                if backward is None:
                    iteration.do(instruction)
                    continue
                told = (backward.chunk, backward.kind, backward in iteration.last)
                if before_gradients is not None:
                    before_gradients(*told)
                iteration.do(instruction)
                if after_gradients is not None:
                    after_gradients(*told)
        iteration.assert_finished()

    def _program(self, schedule: Schedule) -> Program:
        if id(schedule) not in self._programs:
            assert schedule.placement.num_ranks == self.axis.size, schedule.placement
            program = programs(schedule, int(self.overlap))[self.axis.coordinate]
            # The schedule is kept with it, so that its id stays its own.
            self._programs[id(schedule)] = (schedule, program)
        return self._programs[id(schedule)][1]


class _Iteration:
    """What is alive on a rank during one iteration."""

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: Schedule,
        forward_step: ForwardStep,
        shape_of: ShapeOf,
    ) -> None:
        self.executor, self.forward_step = executor, forward_step
        self.rank, self.placement = executor.axis.coordinate, schedule.placement
        self.mail = Mailbox(executor.axis, executor.device, executor.dtype, shape_of)
        actions = schedule.actions[self.rank]
        self.trains = any(action.kind != "forward" for action in actions)
        self.last = _last_backwards(actions)
        # All by (microbatch, chunk).
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.tasks: dict[tuple[int, int], list[Task]] = {}
        self.acts = {
            "forward": self._forward,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
        }

    def do(self, instruction: Instruction) -> None:
        """Do one instruction of the program."""
        if isinstance(instruction, Action):
            with self.executor.around(instruction):
                self.acts[instruction.kind](instruction)
        elif isinstance(instruction, Pair):
            with self.executor.around(instruction):
                backward, forward = (
                    partial(self.acts[action.kind], action)
                    for action in (instruction.backward, instruction.forward)
                )
                self.executor.turns.run(backward, forward)
        elif isinstance(instruction, Post):
            post = self.mail.send if instruction.sends else self.mail.receive
            wait = post(instruction.message, instruction.peer)
            if not self.executor.overlap:
                wait()
        else:
            self.mail.release(instruction.message)
            if instruction.message.kind == "activation":
                chunk = self.placement.owner(instruction.message.source)[1]
                self._free(instruction.message.microbatch, chunk)

    def _forward(self, action: Action) -> None:
        message = needed(self.placement, self.rank, action)
        x = None if message is None else self.mail.take(message)
        if x is not None and self.trains:
            x.requires_grad_()
        output = self.forward_step(action.chunk, action.microbatch, x)
        if self.trains:
            self.kept[action.microbatch, action.chunk] = (x, output)
            if x is not None:
                saved_tensors.see(x)  # for its gradient
        message = made(self.placement, self.rank, action)
        if message is not None:
            self.mail.put(message, output.detach())
            if self.trains and self.placement.owner(message.target)[0] == self.rank:
                saved_tensors.see(output)  # it is not sent, so it stays

    def _free(self, microbatch: int, chunk: int) -> None:
        if (microbatch, chunk) not in self.kept:
            return
        x, output = self.kept[microbatch, chunk]
        if self.executor.free_outputs and not _is_needed(output, x):
            # Not `.data = empty`: backward compares the shapes of an output and its gradient.
            output.untyped_storage().resize_(0)
        else:
            saved_tensors.see(output)

    def _backward(self, action: Action) -> None:
        if action in self.last:
            self._gradients(action)
            return
        with self.executor.delaying() as tasks:
            self._gradients(action)
        while tasks:
            tasks.pop(0)()

    def _gradients(self, action: Action) -> None:
        x, output = self.kept.pop((action.microbatch, action.chunk))
        message = needed(self.placement, self.rank, action)
        grad = None if message is None else self.mail.take(message)
        # A first stage without trainable weights has no history.
        if output.requires_grad:
            torch.autograd.backward(output, grad)
        message = made(self.placement, self.rank, action)
        if message is not None:
            assert x is not None and x.grad is not None, f"{action} gave its input no gradient"
            self.mail.put(message, x.grad)

    def _backward_input(self, action: Action) -> None:
        with self.executor.postponing() as tasks:
            self._gradients(action)
        self.tasks[action.microbatch, action.chunk] = tasks

    def _backward_weight(self, action: Action) -> None:
        for task in self.tasks.pop((action.microbatch, action.chunk)):
            task()

    def assert_finished(self) -> None:
        """Find work that the schedule left undone."""
        assert not self.kept and not self.tasks, f"not done: {[*self.kept, *self.tasks]}"
        self.mail.assert_empty()


def _choose(device: torch.device) -> None:
    """Let what a new thread does be done on ``device``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _backward_of(instruction: Instruction) -> Action | None:
    """Return the action of an instruction that adds to gradients, if there is one."""
    if not isinstance(instruction, Action | Pair):
        return None
    return next((part for part in parts(instruction) if part.kind != "forward"), None)


def _last_backwards(actions: Sequence[Action]) -> set[Action]:
    """Return the last action that adds to a chunk's weight gradients, of each chunk."""
    last: dict[int, Action] = {}
    for action in actions:
        if action.kind in ("backward", "backward_weight"):
            last[action.chunk] = action
    return set(last.values())


def _is_needed(output: Tensor, x: Tensor | None) -> bool:
    """Return whether a backward may read an output's memory.

    It may where the output shares it with an older tensor, or where its own operation saved it, as
    a sigmoid does. Hooks on saved tensors would see more, but the parameters among those come back
    as other objects, without their gradient buffers.
    """
    if output._base is not None:
        return True
    node = output.grad_fn
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    saved += getattr(node, "saved_tensors", ())
    memory = output.untyped_storage().data_ptr()
    return any(
        isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == memory
        for tensor in [*saved, x]
    )
