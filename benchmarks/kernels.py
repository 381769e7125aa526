"""Times our kernels beside plain torch, forward and backward: ratios below 1 are a gain.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py [--repeats 7]
    python benchmarks/kernels.py --device cuda

On the CPU seconds are CPU seconds of this process, which other load barely moves; both sides of a
pair take turns; in brackets is the backend that a model takes here. Sizes S and M are (sequence,
batch, hidden, heads, gated width). On CUDA every backend of each fused operation is listed in bf16,
with its ratios to the reference and to what torch has for it (`benchmarks/fused.py`).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import fused  # noqa: E402

from megatron.core.kernels import matmul, norm, rope, table  # noqa: E402
from megatron.core.kernels.attention import Extras, Packing, Rule  # noqa: E402
from megatron.core.kernels.blocked import attention_blocked  # noqa: E402
from megatron.core.kernels.sdpa import attention_sdpa  # noqa: E402

CPU = torch.device("cpu")
SIZES = {"S": (256, 8, 256, 8, 704), "M": (512, 4, 512, 8, 1408)}
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]


def leaf(*shape: int) -> Tensor:
    """Return random numbers that want a gradient."""
    return torch.randn(*shape, requires_grad=True)


def attention_pairs(S: int, B: int, H: int, n: int) -> dict[str, Pair]:
    """Attention on sequence-first projections, as a layer calls it."""
    D = H // n
    qkv = leaf(S, B, n, 3 * D)
    rule, window = Rule(scale=D**-0.5), Rule(scale=D**-0.5, window=(S // 8, 0))
    packed = Extras(packing=Packing(torch.arange(0, S * B + 1, S // 8, dtype=torch.int32)))
    grouped = leaf(S, B, n // 4, 6 * D)

    def ours(backend: Callable[..., Tensor], rule: Rule, extras: Extras) -> Callable[[], Tensor]:
        return lambda: backend(*qkv.split(D, -1), rule, extras)

    def group(backend: Callable[..., Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            q, k, v = grouped.split((4 * D, D, D), -1)
            return backend(q.reshape(S, B, n, D), k, v, rule, Extras())

        return call

    plain = ours(attention_sdpa, rule, Extras())
    # Against full causal attention, which is what these patterns save.
    return {
        "attention, causal": (ours(attention_blocked, rule, Extras()), plain, [qkv]),
        "attention, 4 heads a group": (group(attention_blocked), group(attention_sdpa), [grouped]),
        "attention, window S/8": (ours(attention_blocked, window, Extras()), plain, [qkv]),
        "attention, documents of S/8": (ours(attention_blocked, rule, packed), plain, [qkv]),
    }


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as a plain model does, by concatenation."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def other_pairs(S: int, B: int, H: int, n: int, width: int) -> dict[str, Pair]:
    """Everything of a layer but attention."""
    x, w, b, wide = leaf(S, B, H), leaf(H), leaf(H), leaf(S, B, 2 * width)
    q = leaf(S, B, n, H // n)
    cos, sin = rope.rope_tables(
        rope.inverse_frequencies(H // n, 10000.0), torch.arange(S), torch.float32
    )
    wide_cos, wide_sin = cos[:, None, None], sin[:, None, None]
    chosen = {
        op: table.choose(op, "auto", CPU, torch.float32) for op in ("rms_norm", "rope", "swiglu")
    }
    ours = {op: table.TABLE[op][name].implementation for op, name in chosen.items()}
    half = [leaf(128, H).to(torch.bfloat16).detach().requires_grad_() for _ in range(2)]
    return {
        "layer norm": (
            lambda: norm.layer_norm(x, w, b, 1e-5),
            lambda: F.layer_norm(x, (H,), w, b, 1e-5),
            [x, w, b],
        ),
        f"rms norm ({chosen['rms_norm']})": (
            lambda: ours["rms_norm"](x, w, 1e-5),
            lambda: F.rms_norm(x, (H,), w, 1e-5),
            [x, w],
        ),
        f"rope ({chosen['rope']})": (
            lambda: ours["rope"](q, cos, sin),
            lambda: rotate_plain(q, wide_cos, wide_sin),
            [q],
        ),
        f"swiglu ({chosen['swiglu']})": (
            lambda: ours["swiglu"](wide),
            lambda: F.silu(wide.chunk(2, -1)[0]) * wide.chunk(2, -1)[1],
            [wide],
        ),
        "bf16 linear": (lambda: matmul.linear(*half), lambda: F.linear(*half), half),
    }


def seconds(function: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    """Return the CPU seconds of one forward and backward."""
    start = time.process_time()
    torch.autograd.grad(function(), inputs, grad)
    return time.process_time() - start


def main() -> None:
    """Print one line per op and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    repeats = options.repeats
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error(f"torch {torch.__version__} sees no CUDA device; leave out --device cuda")
        fused.show(torch.device("cuda"), repeats)
        return
    for name, (S, B, H, n, width) in SIZES.items():
        pairs = attention_pairs(S, B, H, n) | other_pairs(S, B, H, n, width)
        for label, (ours, plain, inputs) in pairs.items():
            grad = torch.randn_like(ours())
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats + 1):
                for side, function in zip(times, (ours, plain), strict=True):
                    side.append(seconds(function, inputs, grad))
            # The first round warms up.
            mine, theirs = (statistics.median(side[1:]) for side in times)
            print(
                f"{name} {label:28s} {mine * 1e3:8.1f} ms  plain torch {theirs * 1e3:8.1f} ms"
                f"  ratio {mine / theirs:.2f}"
            )


if __name__ == "__main__":
    main()
