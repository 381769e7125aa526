"""What a device could do at most, for the model-FLOPs utilisation."""

import torch

# Dense bf16 tensor-core FLOP/s from the vendors' data sheets, by a part of the device's name; the
# first match counts.
_BF16 = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10", 125e12),
)


def peak_flops(device: torch.device, params_dtype: str) -> float | None:
    """Return the most FLOP/s of ``device`` at a precision; None where it is not known."""
    if device.type != "cuda" or params_dtype not in ("bfloat16", "float16"):
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Return the bf16 peak of a device by its name."""
    return next((flops for part, flops in _BF16 if part in name), None)
