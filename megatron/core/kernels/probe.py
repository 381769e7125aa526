"""Which optional packages are there: found out once, when first asked."""

import importlib
from functools import cache

INSTALL = {
    "flash_attn": "pip install flash-attn --no-build-isolation (needs CUDA)",
    "transformer_engine": "pip install transformer-engine[pytorch] (needs CUDA)",
}


@cache
def missing(package: str) -> str | None:
    """Return None when ``package`` can be imported, else why not.

    Importing is the only test that counts: a package built for another torch or without CUDA
    raises whatever it likes (RuntimeError, OSError, AttributeError ...), and all of that means
    that it cannot be used here.
    """
    # The package on PyPI by this name can be an empty shell.
    module = {"transformer_engine": "transformer_engine.pytorch"}
    try:
        importlib.import_module(module.get(package, package))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{package}: {reason[:200]}"
    return None
