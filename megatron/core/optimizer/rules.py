"""Which update rules there are, what each keeps and what it must be given; no torch here.

The rules themselves are in modules of their names; plans and layouts read this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.optimizer.config import OptimizerConfig


@dataclass(frozen=True)
class Traits:
    """What is known of an update rule without running it."""

    states: tuple[str, ...]
    """Names of the numbers that it keeps for each parameter."""
    needs_whole: bool = False
    """The parts of parameters that it gets must be whole ones."""


_TRAITS: Mapping[str, Traits] = {
    "adam": Traits(("exp_avg", "exp_avg_sq")),
    "sgd": Traits(("momentum_buffer",)),
    "lion": Traits(("exp_avg",)),
    "muon": Traits(("momentum_buffer",), needs_whole=True),
}


def needs_whole(rule: str) -> bool:
    """Return whether a rule takes whole matrices only."""
    return _TRAITS[rule].needs_whole


def states(rule: str, config: OptimizerConfig) -> tuple[str, ...]:
    """Return the names of what a rule keeps for each parameter; SGD without momentum, nothing."""
    return () if rule == "sgd" and not config.sgd_momentum else _TRAITS[rule].states
