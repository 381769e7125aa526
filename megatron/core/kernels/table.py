"""Which implementation of an op runs: a static table, asked once when a module is built.

``auto`` takes the first backend of an op that works for a device and dtype; a backend asked for by
name that does not work here is an error that says what is missing, never a silent replacement.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.kernels import attention, blocked, flash, norm, rope, sdpa
from megatron.core.kernels.probe import INSTALL, missing
from megatron.core.utils import UserError, nearest

Reason = Callable[[torch.device, torch.dtype], str | None]


def works(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None: plain torch is everywhere."""
    return None


def only_cpu(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a reason on every device but the CPU."""
    return None if device.type == "cpu" else f"it is written for the CPU, this is {device.type}"


@dataclass(frozen=True)
class Backend:
    """One implementation of an op."""

    implementation: Callable[..., Any]
    missing: Reason = works
    """Return None where it works, else why it does not and how to get it."""


TABLE: dict[str, dict[str, Backend]] = {
    "attention": {
        "flash_attn": Backend(flash.attention_flash, flash.why_not),
        "blocked": Backend(blocked.attention_blocked, only_cpu),
        "sdpa": Backend(sdpa.attention_sdpa),
        "reference": Backend(attention.attention_reference),
    },
    "layer_norm": {
        "torch": Backend(norm.layer_norm),
        "reference": Backend(norm.layer_norm_reference),
    },
    "rms_norm": {
        "function": Backend(norm.rms_norm, only_cpu),
        "torch": Backend(norm.rms_norm_torch),
        "reference": Backend(norm.rms_norm_reference),
    },
    "rope": {
        "function": Backend(rope.apply_rope),
        "reference": Backend(rope.apply_rope_reference),
    },
}
"""Op -> backend -> implementation, best first."""

ATTENTION_BACKENDS = {
    "auto": "auto",
    "flash": "flash",
    "fused": "sdpa",
    "unfused": "reference",
    "local": "reference",
}
"""--attention-backend -> backend; ``flash`` is the best one that never holds an S x S matrix."""


def select(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the implementation of ``op`` by ``backend``, or the best one for ``auto``."""
    return TABLE[op][choose(op, backend, device, dtype)].implementation


def choose(
    op: str,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    unfit: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the name of the backend that `select` takes.

    Args:
        op: name in the table.
        backend: name of one, or ``auto``.
        device: where it is to run.
        dtype: of its inputs.
        unfit: backends that lack what the model asks of the op, with the reason.

    Raises:
        UserError: the backend is unknown, or does not work here.
    """
    backends = TABLE[op]

    def reason_against(name: str) -> str | None:
        return unfit.get(name) or backends[name].missing(device, dtype)

    if op == "attention" and backend == "flash":
        # Three flash algorithms: the package's, our tiles on the CPU, torch's own kernel.
        first = ("flash_attn", "blocked", "sdpa")
        return next(name for name in first if not reason_against(name))
    if backend == "auto":
        return next(name for name in backends if not reason_against(name))
    if backend not in backends:
        hint = nearest(backend, backends)
        raise UserError(
            f"there is no backend {backend!r} for {op}; choose auto, {', '.join(backends)}"
            + (f" (did you mean {hint[0]}?)" if hint else "")
        )
    reason = reason_against(backend)
    if reason is not None:
        raise UserError(f"backend {backend!r} of {op} does not work here: {reason}")
    return backend


def attention_backend(name: str) -> str:
    """Return the attention backend that a value of --attention-backend means.

    Raises:
        UserError: there is no such value.
    """
    if name not in ATTENTION_BACKENDS and name not in TABLE["attention"]:
        raise UserError(
            f"--attention-backend {name} is unknown; choose {', '.join(ATTENTION_BACKENDS)}"
        )
    return ATTENTION_BACKENDS.get(name, name)


def general_backend(name: str) -> str:
    """Return the backend of the other ops that a value of --transformer-impl means.

    ``auto`` and ``local`` are this package's own, the best for each op.

    Raises:
        UserError: Transformer Engine is asked for.
    """
    if name in ("auto", "local"):
        return "auto"
    if name != "transformer_engine":
        raise UserError(f"--transformer-impl {name} is unknown; choose auto, local")
    reason = missing("transformer_engine")
    if reason is not None:
        raise UserError(
            f"--transformer-impl transformer_engine: {reason}; {INSTALL['transformer_engine']}; "
            "or choose --transformer-impl local"
        )
    raise UserError(
        "--transformer-impl transformer_engine: its ops are not in the table yet; "
        "choose --transformer-impl local"
    )
