"""What a rank of a pipeline does: actions, and pairs of them that are one step."""

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


class Action(NamedTuple):
    """One unit of pipeline work: what is done to a microbatch in a chunk."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(microbatch {self.microbatch}, chunk {self.chunk})"


class Pair(NamedTuple):
    """A forward and the backward of another microbatch or chunk that run beside each other."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward} beside {self.backward}"


Step = Action | Pair


def parts(step: Step) -> tuple[Action, ...]:
    """Return the actions that a step consists of."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)
