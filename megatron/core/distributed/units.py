"""The units of a model: modules whose weights are needed at the same time.

A layer of a stack is a unit, and so is each other child of the model (`layout.unit_of`). Hooks tell
when a unit is about to compute and when it has done so, in forward and in backward, whoever calls
it. A unit computes where it is *called*: what uses a unit's weights by another method is not seen.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.layout import unit_of


@dataclass(frozen=True)
class Unit:
    """A module and the parameters that it uses; those of units inside it are theirs."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]


def find_units(chunks: Iterable[nn.Module]) -> list[Unit]:
    """Return the units of a model's chunks, outer ones first; one that chunks share comes once."""
    found: dict[int, Unit] = {}
    for chunk in chunks:
        parameters: dict[str, dict[int, nn.Parameter]] = {}
        for path, parameter in chunk.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                parameters.setdefault(unit_of(path), {})[id(parameter)] = parameter
        for path, module in chunk.named_modules(remove_duplicate=False):
            if path in parameters:
                found.setdefault(id(module), Unit(module, tuple(parameters[path].values())))
    return list(found.values())


class Order:
    """Learns in which order units come, and tells which one will be next."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._at = 0

    def start(self) -> None:
        """Begin anew."""
        self._at = 0

    def after(self, unit: int) -> int | None:
        """Take note that ``unit`` has come; return the one that came after it last time."""
        if self._known[self._at : self._at + 1] != [unit]:
            self._known[self._at :] = [unit]
        self._at += 1
        return self._known[self._at] if self._at < len(self._known) else None


@dataclass(frozen=True)
class Watch:
    """What is called around a unit's work, with its number."""

    before_forward: Callable[[int], None]
    after_forward: Callable[[int], None] = lambda number: None
    before_backward: Callable[[int], None] | None = None
    """Before the first of the backward of one of its calls."""


def watch(units: Sequence[Unit], told: Watch) -> None:
    """Have ``told`` called whenever a unit computes."""
    for number, unit in enumerate(units):
        unit.module.register_forward_pre_hook(_before(number, told))
        unit.module.register_forward_hook(_after(number, told))


def _before(number: int, told: Watch) -> Callable[[nn.Module, Any], None]:
    return lambda module, inputs: told.before_forward(number)


def _after(number: int, told: Watch) -> Callable[[nn.Module, Any, Any], None]:
    before_backward = told.before_backward

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if before_backward is not None and torch.is_grad_enabled():
            for tensor in [output] if isinstance(output, Tensor) else output:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(_announced(number, before_backward))
        told.after_forward(number)

    return after


def _announced(number: int, before_backward: Callable[[int], None]) -> Callable[[Tensor], None]:
    return lambda grad: before_backward(number)
