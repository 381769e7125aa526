"""Which implementation of an op runs: a static table, asked once when a module is built.

``auto`` takes the first backend of an op that works for a device and dtype; a backend asked for by
name that does not work here is an error that says what is missing, never a silent replacement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.kernels import activation, attention, matmul, norm, rope, sdpa
from megatron.core.utils import UserError, nearest


@dataclass(frozen=True)
class Backend:
    """One implementation of an op."""

    implementation: Callable[..., Any]
    missing: Callable[[torch.device, torch.dtype], str | None]
    """Return None where it works, else why it does not and how to get it."""


def _never(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


TABLE: dict[str, dict[str, Backend]] = {
    "attention": {
        "sdpa": Backend(sdpa.attention_sdpa, _never),
        "reference": Backend(attention.attention_reference, _never),
    },
    "layer_norm": {
        "torch": Backend(norm.layer_norm, _never),
        "reference": Backend(norm.layer_norm_reference, _never),
    },
    "rms_norm": {
        "torch": Backend(norm.rms_norm, _never),
        "reference": Backend(norm.rms_norm_reference, _never),
    },
    "rope": {
        "torch": Backend(rope.apply_rope, _never),
        "reference": Backend(rope.apply_rope_reference, _never),
    },
    "linear": {
        "torch": Backend(matmul.linear, _never),
        "upcast": Backend(matmul.linear_upcast, _never),
    },
}
"""Op -> backend -> implementation, best first."""


def select(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the implementation of ``op`` by ``backend``, or the best one for ``auto``."""
    return TABLE[op][choose(op, backend, device, dtype)].implementation


def choose(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the backend that `select` takes.

    Raises:
        UserError: the backend is unknown, or does not work here.
    """
    backends = TABLE[op]
    if backend == "auto":
        return next(name for name, entry in backends.items() if not entry.missing(device, dtype))
    if backend not in backends:
        hint = nearest(backend, backends)
        raise UserError(
            f"there is no backend {backend!r} for {op}; choose auto, {', '.join(backends)}"
            + (f" (did you mean {hint[0]}?)" if hint else "")
        )
    reason = backends[backend].missing(device, dtype)
    if reason is not None:
        raise UserError(f"backend {backend!r} of {op} does not work here: {reason}")
    return backend


_ = activation
