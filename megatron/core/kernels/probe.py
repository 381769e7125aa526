"""Which optional packages are there: found out once, when first asked."""

import importlib
import os
import shutil
from functools import cache

import torch

INSTALL = {
    "triton": "pip install triton, at the version that goes with this torch (a torch built for "
    "CUDA brings it)",
    "flash_attn": "pip install flash-attn --no-build-isolation (needs CUDA)",
    "transformer_engine": "pip install transformer-engine[pytorch] (needs CUDA)",
    "deep_ep": "build DeepEP from https://github.com/deepseek-ai/DeepEP (needs CUDA)",
    "apex": "build NVIDIA's Apex from its sources with --cuda_ext (the package of that name on "
    "PyPI is another one)",
}


@cache
def missing(package: str) -> str | None:
    """Return None when ``package`` can be imported, else why not.

    Importing is the only test that counts: a package built for another torch or without CUDA
    raises whatever it likes (RuntimeError, OSError, AttributeError ...), and all of that means
    that it cannot be used here.
    """
    # The package on PyPI by this name can be an empty shell; Apex's compiled half is what we use.
    module = {"transformer_engine": "transformer_engine.pytorch", "apex": "fused_layer_norm_cuda"}
    try:
        importlib.import_module(module.get(package, package))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{package}: {reason[:200]}"
    return None


COMPILED = "megatron.core.kernels.compiled.cpu_kernels"
COMPILED_DTYPES = (torch.float32, torch.float64)
INTERFACE = 2
"""What csrc/cpu_kernels.cpp says of its arguments; one that says another number is not called."""
COMPILE = "`make extension` in a clone, or `pip install .` again, builds them by a C++ compiler"
"""The way to get them."""


@cache
def _no_compiled_module() -> str | None:
    try:
        module = importlib.import_module(COMPILED)
    except Exception as error:  # as with `missing`: whatever is raised, it cannot be used
        absent = isinstance(error, ModuleNotFoundError) and error.name == COMPILED
        reason = "they were not built" if absent else " ".join(str(error).split())[:200]
        return f"the kernels for the CPU cannot be loaded ({reason}); {COMPILE}"
    if getattr(module, "INTERFACE", None) != INTERFACE:
        return f"the kernels for the CPU were built from other sources; {COMPILE}"
    return None


def compiled_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels in C++ cannot be used for a device and dtype; None when they can."""
    if device.type != "cpu":
        return f"it is written for the CPU, this is {device.type}"
    if dtype not in COMPILED_DTYPES:
        return f"it is written for fp32 and fp64, this is {str(dtype).removeprefix('torch.')}"
    reason = _no_compiled_module()
    if reason is None and torch.get_num_threads() > 1:
        if not importlib.import_module(COMPILED).THREADED:
            return "the kernels for the CPU were built without OpenMP, for one thread"
    return reason


def lacks_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels in C++ are for such tensors but not there."""
    is_theirs = device.type == "cpu" and dtype in COMPILED_DTYPES
    return is_theirs and compiled_missing(device, dtype) is not None


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interprets_triton() -> bool:
    """Return whether Triton runs kernels in its interpreter, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot be used for a device and dtype; None when they can."""
    if device.type != "cuda" and not interprets_triton():
        return (
            f"Triton needs a CUDA device, this is {device.type} (with TRITON_INTERPRET=1 its "
            "kernels run there for tests, slowly)"
        )
    if dtype not in TRITON_DTYPES:
        return f"its kernels count in fp32, which is less than {dtype}"
    reason = missing("triton")
    if reason is not None:
        return f"{reason}; {INSTALL['triton']}"
    if interprets_triton():
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton needs compute capability 8.0 or later"
    # It builds a small launcher in C for each kernel.
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))):
        return "Triton needs a C compiler: install gcc or clang, or set CC"
    return None
