"""Which optional packages are there: found out once, when first asked."""

import importlib
import importlib.util
from functools import cache

INSTALL = {
    "flash_attn": "pip install flash-attn --no-build-isolation (needs CUDA)",
    "transformer_engine": "pip install transformer-engine[pytorch] (needs CUDA)",
    "triton": "comes with CUDA builds of torch; or pip install triton",
    "apex": "build it from https://github.com/NVIDIA/apex (the apex on PyPI is something else)",
}


@cache
def missing(package: str) -> str | None:
    """Return None when ``package`` can be imported, else why not.

    Importing is the only test that counts: a package built for another torch or without CUDA
    raises whatever it likes (RuntimeError, OSError, AttributeError ...), and all of that means
    that it cannot be used here.
    """
    # NVIDIA's Apex has this module; the unrelated apex of PyPI has not.
    module = {"apex": "apex.multi_tensor_apply", "transformer_engine": "transformer_engine.pytorch"}
    try:
        importlib.import_module(module.get(package, package))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{package}: {reason[:200]}"
    return None


def version(package: str) -> str | None:
    """Return the version of an importable package, None when it is missing."""
    if missing(package) is not None:
        return None
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def probe() -> dict[str, str]:
    """Return for every optional package its version or why it is missing, for the start-up log."""
    return {package: version(package) or f"missing ({missing(package)})" for package in INSTALL}
