"""Measures the memory of tensors: bytes now, and at most."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Bytes of the tensor storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self._see(x.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)
