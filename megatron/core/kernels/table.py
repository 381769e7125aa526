"""Which implementation of an op runs: a static table, asked once when a module is built.

``auto`` takes the first backend of an op that works for a device and dtype; a backend asked for by
name that does not work here is an error that says what is missing, never a silent replacement.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.kernels import (
    activation,
    adam,
    attention,
    blocked,
    cross_entropy,
    dropout,
    flash,
    grouped,
    masked_softmax,
    norm,
    packages,
    permute,
    permute_in_places,
    rope,
    routing,
    routing_of_chosen,
    sdpa,
)
from megatron.core.kernels.probe import INSTALL, compiled_missing, missing, triton_missing
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

    source: Any
    """The implementation, or ``module:name`` of one whose module needs a package to be imported."""
    missing: Reason = works
    """Return None where it works, else why it does not and how to get it."""

    @property
    def implementation(self) -> Any:
        """Return the implementation; of one that is missing this may raise anything."""
        if not isinstance(self.source, str):
            return self.source
        module, _, name = self.source.partition(":")
        return getattr(importlib.import_module(module), name)


def in_triton(source: str) -> Backend:
    """Return a backend from a module of `kernels.triton_ops`."""
    return Backend(f"megatron.core.kernels.triton_ops.{source}", triton_missing)


def compiled(source: str) -> Backend:
    """Return a backend from a module of `kernels.compiled`."""
    return Backend(f"megatron.core.kernels.compiled.{source}", compiled_missing)


TABLE: dict[str, dict[str, Backend]] = {
    "attention": {
        "flash_attn": Backend(flash.attention_flash, flash.why_not),
        "blocked": Backend(blocked.attention_blocked, only_cpu),
        "sdpa": Backend(sdpa.attention_sdpa),
        "triton_softmax": in_triton("softmax:attention_unfused"),
        "reference": Backend(attention.attention_reference),
    },
    "masked_softmax": {
        "triton": in_triton("softmax:masked_softmax"),
        "reference": Backend(masked_softmax.masked_softmax_reference),
    },
    "layer_norm": {
        "triton": in_triton("norm:layer_norm"),
        "torch": Backend(norm.layer_norm),
        "reference": Backend(norm.layer_norm_reference),
        "transformer_engine": Backend(
            packages.layer_norm_of_transformer_engine, packages.no_transformer_engine
        ),
        "apex": Backend(packages.layer_norm_of_apex, packages.no_apex),
    },
    "rms_norm": {
        "triton": in_triton("norm:rms_norm"),
        "compiled": compiled("norm:rms_norm"),
        "function": Backend(norm.rms_norm, only_cpu),
        "torch": Backend(norm.rms_norm_torch),
        "reference": Backend(norm.rms_norm_reference),
        "transformer_engine": Backend(
            packages.rms_norm_of_transformer_engine, packages.no_transformer_engine
        ),
        "apex": Backend(packages.rms_norm_of_apex, packages.no_apex),
    },
    "rope": {
        "triton": in_triton("rope:apply_rope"),
        "compiled": compiled("rope:apply_rope"),
        "function": Backend(rope.apply_rope),
        "reference": Backend(rope.apply_rope_reference),
    },
    **{
        name: {"triton": in_triton(f"activation:{name}"), "reference": Backend(reference)}
        for name, reference in activation.REFERENCES.items()
    },
    "swiglu": {
        "triton": in_triton("activation:swiglu"),
        "compiled": compiled("activation:swiglu"),
        "function": Backend(activation.swiglu_function),
        "reference": Backend(activation.swiglu),
        "transformer_engine": Backend(
            packages.swiglu_of_transformer_engine, packages.no_transformer_engine
        ),
    },
    "bias_dropout_add": {
        "triton": in_triton("dropout:bias_dropout_add"),
        "torch": Backend(dropout.bias_dropout_add),
        "reference": Backend(dropout.bias_dropout_add_reference),
    },
    "cross_entropy": {
        "triton": in_triton("cross_entropy:KERNELS"),
        "compiled": compiled("cross_entropy:KERNELS"),
        "in_place": Backend(cross_entropy.IN_PLACE),
        "in_place_half": Backend(cross_entropy.IN_PLACE_HALF),
        "reference": Backend(cross_entropy.REFERENCE),
        "transformer_engine": Backend(
            packages.cross_entropy_of_transformer_engine, packages.no_transformer_engine
        ),
    },
    "grouped_products": {
        "torch": Backend(grouped.TORCH, grouped.torch_missing),
        "reference": Backend(grouped.LOOP),
    },
    "permute": {
        "triton": in_triton("permute:MOVES"),
        "compiled": compiled("permute:MOVES"),
        "function": Backend(permute_in_places.MOVES),
        "reference": Backend(permute.REFERENCE),
    },
    "routing": {
        "triton": in_triton("routing:ROUTES"),
        "function": Backend(routing_of_chosen.FUNCTION),
        "reference": Backend(routing.REFERENCE),
    },
    "adam": {
        "triton": in_triton("adam:adam"),
        "reference": Backend(adam.adam_reference),
    },
}
"""Op -> backend -> implementation, best first.

Those of packages stand behind the reference, which is everywhere: they run when they are asked for
by name, and `auto` never takes one. All backends of an op compute the same function, but for the
mask of ``bias_dropout_add``: torch's differs from the one that the others count out.
"""

KINDS = {
    # The package's algorithm, our tiles on the CPU, torch's own kernel.
    ("attention", "flash"): ("flash_attn", "blocked", "sdpa"),
    ("attention", "unfused"): ("triton_softmax", "reference"),
    # Triton's is what --cross-entropy-loss-fusion asks for.
    ("cross_entropy", "unfused"): ("compiled", "in_place"),
}
"""(Op, kind of backend) -> backends, best first; `choose` takes the first that works."""

ATTENTION_BACKENDS = {
    "auto": "auto",
    "flash": "flash",
    "fused": "sdpa",
    "unfused": "unfused",
    "local": "unfused",
}
"""--attention-backend -> backend; ``flash`` is the best algorithm in tiles (of torch's own on CUDA,
documents, ALiBi and biases are still a mask of S x S), ``unfused`` the best that holds scores."""

PACKAGES = ("transformer_engine", "apex")
"""Values of --transformer-impl that are packages, and names of their backends."""


def select(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Any:
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
        backend: name of one, of a kind (`KINDS`), or ``auto``.
        device: where it is to run.
        dtype: of its inputs.
        unfit: backends that lack what the model asks of the op, with the reason.

    Raises:
        UserError: the backend is unknown, or does not work here.
    """
    backends = TABLE[op]

    def reason_against(name: str) -> str | None:
        return unfit.get(name) or backends[name].missing(device, dtype)

    if backend == "auto" or (op, backend) in KINDS:
        among = KINDS.get((op, backend), tuple(backends))
        return next(name for name in among if not reason_against(name))
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


def attention_backend(name: str, masked_softmax_fusion: bool = True) -> str:
    """Return the attention backend that a value of --attention-backend means.

    Without ``masked_softmax_fusion`` attention that is not fused has no fused softmax either.

    Raises:
        UserError: there is no such value.
    """
    if name not in ATTENTION_BACKENDS and name not in TABLE["attention"]:
        raise UserError(
            f"--attention-backend {name} is unknown; choose {', '.join(ATTENTION_BACKENDS)}"
        )
    backend = ATTENTION_BACKENDS.get(name, name)
    return "reference" if backend == "unfused" and not masked_softmax_fusion else backend


def general_backend(name: str) -> str:
    """Return the backend of the other ops that a value of --transformer-impl means.

    ``auto`` and ``local`` are this package's own, the best for each op.

    Raises:
        UserError: there is no such value, or a package that is not there.
    """
    if name in ("auto", "local"):
        return "auto"
    if name not in PACKAGES:
        raise UserError(
            f"--transformer-impl {name} is unknown; choose auto, local, {', '.join(PACKAGES)}"
        )
    reason = missing(name)
    if reason is not None:
        raise UserError(
            f"--transformer-impl {name}: {reason}; {INSTALL[name]}; "
            "or choose --transformer-impl local"
        )
    return name
