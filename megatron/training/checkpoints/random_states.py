"""States of the process's random generators, as bytes for a checkpoint.

The model's own draws are keyed by what they are for and need no state (`megatron.core.rng`); these
are the generators that a user's code may draw from: Python's, numpy's, torch's, the device's. They
are one JSON text, so nothing is unpickled.
"""

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pack(device: torch.device) -> Tensor:
    """Return the states of all generators as bytes."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), *legacy[2:]],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def unpack(states: Tensor, device: torch.device) -> None:
    """Put every generator into the state that `pack` saw.

    Raises:
        ValueError: these are no states.
    """
    try:
        _restore(states, device)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # JSON's and base64's too
        raise ValueError(
            f"the states of the random generators are damaged ({type(error).__name__}: {error})"
        ) from None


def _restore(states: Tensor, device: torch.device) -> None:
    values = json.loads(bytes(states.numpy()).decode())
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = values["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
    torch.set_rng_state(_decode(values["torch"]))
    if device.type == "cuda" and "cuda" in values:
        torch.cuda.set_rng_state(_decode(values["cuda"]), device)


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
