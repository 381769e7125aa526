"""Optimizer groups: which parameters are updated by which rule with which settings.

A parameter's group follows from what is known of it alone (its `Sharding` record in a run, a
`ParameterShape` in a plan), so nothing here imports torch:

    rule          that of matrices for `matrix`, else the scalar one; an override may say otherwise
    decayed       matrices and embeddings; biases, norms and other vectors are not
    decoupled     embedding and output head, where --decoupled-lr gives their rate
    override      the first of --param-group-overrides that the name matches
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.core.optimizer import rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.utils import UserError, human_count, nearest


class Described(Protocol):
    """What decides the group of a parameter; the fields of `Sharding`."""

    @property
    def name(self) -> str: ...
    @property
    def decay(self) -> bool: ...
    @property
    def matrix(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def embedding(self) -> bool: ...


@dataclass(frozen=True)
class Traits:
    """What decides a parameter's group, where there is no record of it: see `Sharding`."""

    name: str
    decay: bool
    matrix: bool
    qk_norm: bool
    embedding: bool


@dataclass(frozen=True)
class Rates:
    """What the schedule says of one iteration."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None = None
    """Learning rate of embedding and output head; None: that of all others."""


@dataclass(frozen=True)
class Settings:
    """What one group's update takes at one iteration."""

    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike."""

    name: str
    rule: str
    decays: bool
    is_decoupled: bool = False
    """The rate is that of embedding and head."""
    lr_mult: float = 1.0
    wd_mult: float = 1.0

    @property
    def needs_whole(self) -> bool:
        """Return whether the rule takes whole matrices only."""
        return rules.needs_whole(self.rule)

    def settings(self, rates: Rates) -> Settings:
        """Return the settings of one iteration."""
        lr = rates.lr
        if self.is_decoupled and rates.decoupled_lr is not None:
            lr = rates.decoupled_lr
        decay = rates.weight_decay * self.wd_mult if self.decays else 0.0
        return Settings(lr * self.lr_mult, decay)

    @property
    def words(self) -> str:
        """Return the rule and settings, for people."""
        words = [self.rule]
        if self.is_decoupled:
            words.append("--decoupled-lr")
        if self.lr_mult != 1:
            words.append(f"lr x {self.lr_mult:g}")
        if not self.decays:
            words.append("no weight decay")
        elif self.wd_mult != 1:
            words.append(f"weight decay x {self.wd_mult:g}")
        return ", ".join(words)


GroupOf = Callable[[Described], Group]
"""Gives the group of a parameter."""


def grouping(config: OptimizerConfig) -> GroupOf:
    """Return the function that gives a parameter's group."""
    overrides = config.overrides
    matrix_rule, scalar_rule = config.rules[0], config.rules[-1]

    def group_of(parameter: Described) -> Group:
        decays = parameter.decay or (config.apply_wd_to_qk_layernorm and parameter.qk_norm)
        override = next((each for each in overrides if each.matches(parameter.name)), None)
        rule = matrix_rule if parameter.matrix else scalar_rule
        if override is not None and override.rule is not None:
            rule = override.rule
            if rules.needs_whole(rule) and not parameter.matrix:
                raise UserError(
                    f"--param-group-overrides {override.pattern}:optimizer={rule} matches "
                    f"{parameter.name}, which is no matrix that it can update"
                )
        apart = config.decoupled_lr is not None and parameter.embedding
        words = [rule] if len(config.rules) > 1 else []
        words += ["decay" if decays else "no_decay"]
        words += ["decoupled"] if apart else []
        words += [override.pattern] if override is not None else []
        return Group(
            " ".join(words),
            rule,
            decays,
            apart,
            1.0 if override is None else override.lr_mult,
            1.0 if override is None else override.wd_mult,
        )

    return group_of


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model."""

    name: str
    group: Group
    numel: int


def describe(entries: Iterable[Entry]) -> list[str]:
    """Return one line per group: which parameters it updates and how, and their elements.

    Numbers in names are shown as ``*``, so that the layers of a model share a name. A parameter
    that is given twice, as a tied one is, counts once.
    """
    found: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        found.setdefault(entry.group.name, {})[entry.name] = entry
    lines = []
    for name, members in sorted(found.items()):
        names = sorted({re.sub(r"\b\d+\b", "*", member) for member in members})
        total = human_count(sum(member.numel for member in members.values()))
        words = next(iter(members.values())).group.words
        lines.append(
            f"{name} ({words}): {len(members)} parameters, {total} elements: " + ", ".join(names)
        )
    return lines


def check_overrides(config: OptimizerConfig, names: Sequence[str]) -> None:
    """Refuse an override that no parameter of the whole model takes.

    Raises:
        UserError: the first such pattern.
    """
    overrides = config.overrides
    takers = {next((o for o in overrides if o.matches(name)), None) for name in names}
    for text, override in zip(config.param_group_overrides, overrides, strict=True):
        if override in takers:
            continue
        if any(override.matches(name) for name in names):
            raise UserError(
                f"--param-group-overrides {text}: patterns before it take all its parameters; "
                "put the narrower pattern first"
            )
        near = nearest(override.pattern, names)
        hint = f"; names are such as {', '.join(near or names[:3])}"
        raise UserError(f"--param-group-overrides {text}: no parameter has such a name{hint}")
