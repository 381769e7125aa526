"""How often a program waits for its device: numbers that it reads, and copies that hold it up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def reading() -> Iterator[list[str]]:
    """Write down by which methods tensors are read by the host while the block runs."""
    found: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def read(x: Tensor, *arguments: Any, **more: Any) -> Any:
            found.append(name)
            return method(x, *arguments, **more)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, noting(name))
        yield found


class Copies(TorchDispatchMode):
    """Counts copies from the host to another device: those it waits for, and all."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None:
            self._see(args[0].device, torch.device(device), kwargs.get("non_blocking", False))
        if func is torch.ops.aten.copy_.default:
            self._see(args[1].device, args[0].device, args[2] if len(args) > 2 else False)
        return func(*args, **kwargs)

    def _see(self, source: torch.device, target: torch.device, goes_on: bool) -> None:
        if source.type == "cpu" and target.type != "cpu":
            self.all += 1
            self.awaited += not goes_on
