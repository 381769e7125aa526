"""Reading pickles of other programs without running anything that they name.

A pickle calls what it names. `unpickle` looks every name up in an allow-list: containers, numbers,
torch's dtypes and sizes, and the plain records of ``torch.distributed.checkpoint``. A class of
Megatron-LM's (an enum or a config among the arguments of a run) becomes an `Inert` object, which
keeps what it was made of and does nothing. Everything else is refused by name. A pickle may also
set attributes of what it names, so nothing of the process is handed out: classes are `_Sealed` ones
of our own, functions `_Function` objects.

A tensor becomes a `Lazy` one: dtype, shape, strides and where in which storage it starts. No
bytes of it are read.
"""

import argparse
import collections
import enum
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron.core.dist_checkpointing.format import DTYPES, CheckpointError


@dataclass(frozen=True)
class Lazy:
    """A tensor whose bytes were not read."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """First element, counted from the start of its storage."""
    storage: str
    """Name of the storage in its archive."""

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie one after the other, row-major."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


class _Sealed(type):
    """A class whose attributes nobody sets."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"sets {name} of {cls.__name__}")


def _sealed(kind: type) -> type:
    """Return a class that behaves as ``kind`` does."""
    return _Sealed(kind.__name__, (kind,), {})


class _Function:
    """A function without attributes that could be set."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"sets {name} of a function")

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class Inert(metaclass=_Sealed):
    """Stands for an object of a class that is not known here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _lazy(storage: Any, start: int, shape: Any, stride: Any, *rest: Any) -> Lazy:
    """Stand in for ``torch._utils._rebuild_tensor_v2``, and ``_v3``, which gets a dtype too."""
    _, (dtype, name) = storage
    stated = next((each for each in rest if isinstance(each, torch.dtype)), None)
    if stated is not None:
        dtype = str(stated).removeprefix("torch.")
    return Lazy(dtype, tuple(shape), tuple(stride), int(start), name)


def _parameter(data: Any, *_: Any) -> Any:
    return data


class _Properties(metaclass=_Sealed):
    """Stands for ``TensorProperties``: the dtype is all that is read."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
_RECORDS = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    filesystem._StorageInfo,
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
)
_NAMESPACE = _sealed(argparse.Namespace)
_ALLOWED: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": _sealed(kind) for kind in _RECORDS},
    "torch.distributed.checkpoint.metadata.TensorProperties": _Properties,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": Inert,
    "torch.distributed.checkpoint.planner.WriteItemType": Inert,
    **{f"torch.{name}": getattr(torch, name) for name in DTYPES},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": Inert,
    "torch._utils._rebuild_tensor_v2": _Function(_lazy),
    "torch._utils._rebuild_tensor_v3": _Function(_lazy),
    "torch._utils._rebuild_parameter": _Function(_parameter),
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": collections.defaultdict,
    "argparse.Namespace": _NAMESPACE,
    "types.SimpleNamespace": _NAMESPACE,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "builtins.bytearray": bytearray,
    "_codecs.encode": Inert,
    "io.BytesIO": io.BytesIO,
    # States of random generators and paths among the arguments.
    "numpy.core.multiarray._reconstruct": Inert,
    "numpy._core.multiarray._reconstruct": Inert,
    "numpy.core.multiarray.scalar": Inert,
    "numpy._core.multiarray.scalar": Inert,
    "numpy.ndarray": Inert,
    "numpy.dtype": Inert,
    "signal.Signals": Inert,
    "pathlib.PosixPath": Inert,
    "datetime.timedelta": Inert,
    "torch.device": Inert,
}
_INERT = ("megatron.", "transformer_engine.", "apex.", "nvidia_resiliency_ext.")
"""Beginnings of names of classes that stand for themselves in arguments and plans."""


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch.storage" and name in _STORAGES:
            return _STORAGES[name]
        if full in _ALLOWED:
            return _ALLOWED[full]
        if full.startswith(_INERT):
            return Inert
        raise CheckpointError(
            f"names {full}, which is not in the list of what may be unpickled; nothing was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, name, *_ = pid
        if kind != "storage":
            raise CheckpointError(f"refers to a {kind!r}, which is not known")
        return "storage", (dtype, str(name))


def unpickle(data: bytes, origin: str) -> Any:
    """Return what a pickle holds, with `Lazy` tensors and nothing run.

    Raises:
        CheckpointError: it is damaged, or names what is not allowed.
    """
    loader: Callable[[], Any] = _Restricted(io.BytesIO(data)).load
    try:
        return loader()
    except CheckpointError as error:
        raise CheckpointError(f"{origin} {error}") from None
    except Exception as error:  # whatever bytes make of it, a pickle is wrong and not this code
        raise CheckpointError(f"{origin} cannot be unpickled: {error!r}") from None


def plain(value: Any) -> Any:
    """Return a value as JSON could hold it: unknown objects by what they were made of."""
    if isinstance(value, Inert):
        return plain(value.args[0]) if len(value.args) == 1 else None
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str | int | float | bool) or value is None else None
