"""What flows between the actions of a pipeline: who needs what, and who makes it."""

from collections.abc import Container
from typing import Literal, NamedTuple

from megatron.core.pipeline_parallel.actions import Action, Step, parts
from megatron.core.pipeline_parallel.placement import Placement

MessageKind = Literal["activation", "gradient"]


class Message(NamedTuple):
    """An activation for the next stage, or a gradient for the one before."""

    kind: MessageKind
    microbatch: int
    source: int
    """Position of the stage that makes it."""

    @property
    def target(self) -> int:
        """Return the position of the stage that needs it."""
        return self.source + (1 if self.kind == "activation" else -1)

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} from stage {self.source}"


Need = Message | tuple[int, Action]
"""What must be there before an action: a message, or an earlier action of a rank."""


def needed(placement: Placement, rank: int, action: Action) -> Message | None:
    """Return the message that an action takes in, if any."""
    if action.kind == "backward_weight":
        return None
    position = placement.position(rank, action.chunk)
    message = Message("activation", action.microbatch, position - 1)
    if action.kind != "forward":
        message = Message("gradient", action.microbatch, position + 1)
    return message if 0 <= message.source < placement.num_stages else None


def made(placement: Placement, rank: int, action: Action) -> Message | None:
    """Return the message that an action gives out, if any."""
    if action.kind == "backward_weight":
        return None
    kind: MessageKind = "activation" if action.kind == "forward" else "gradient"
    message = Message(kind, action.microbatch, placement.position(rank, action.chunk))
    return message if 0 <= message.target < placement.num_stages else None


def requirements(placement: Placement, rank: int, step: Step) -> list[Need]:
    """Return what must be there before a step: messages, own earlier actions by rank."""
    return [need for action in parts(step) for need in _of_one(placement, rank, action)]


def _of_one(placement: Placement, rank: int, action: Action) -> list[Need]:
    needs: list[Need] = []
    message = needed(placement, rank, action)
    if message is not None:
        needs.append(message)
    if action.kind in ("backward", "backward_input"):
        needs.append((rank, action._replace(kind="forward")))
    elif action.kind == "backward_weight":
        needs.append((rank, action._replace(kind="backward_input")))
    return needs


def without(placement: Placement, rank: int, step: Step, there: Container[Need]) -> str:
    """Return the words for what a step still misses: "" or " without ...".

    Args:
        placement: of the stages.
        rank: whose step it is.
        step: what the rank stands before.
        there: what is there already.
    """
    missing = [need for need in requirements(placement, rank, step) if need not in there]
    names = [str(n) if isinstance(n, Message) else f"its {n[1]}" for n in missing]
    return f" without {' and '.join(names)}" if names else ""
