"""One GPU: our training step beside a plain torch loop in bf16, and kernels beside each other.

    python benchmarks/gpu.py [--size 345M 1B] [--steps 10] [--compile] [--json FILE]

Steps: forward, backward and fused AdamW of a GPT-2 of 345 million and a Llama-like model of 1.1
billion parameters. `megatron` is the step that `pretrain_gpt.py` runs: bf16 weights, fp32 masters
and gradients, with gradient norm and clipping. `plain` is the smallest loop over torch's modules:
fp32 weights under autocast, without norm and clipping; `compiled`, with --compile, is the same loop
through torch.compile. All take the largest micro-batch, halved from the first, that each of them
can hold, and each runs in a process of its own. MFU is matrix products, causal attention at half,
over the device's peak of the data sheet.

Kernels: forward and backward of each attention backend, and the products of a linear layer.
"""

import argparse
import functools
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402
from plain_loop import Model  # noqa: E402
from sizes import BETAS, DECAY, EPSILON, LR, Size  # noqa: E402
from torch import Tensor  # noqa: E402
from train_step import Step, megatron  # noqa: E402

from megatron.core.kernels import matmul, table  # noqa: E402
from megatron.core.kernels.attention import Extras, Rule  # noqa: E402
from megatron.training.devices import peak_by_name  # noqa: E402

MODELS: dict[str, tuple[str, Size]] = {
    "345M": ("gpt2", Size(24, 1024, 16, 1024, 32, 50304, 2816)),
    "1B": ("llama", Size(20, 2048, 16, 2048, 16, 32000, 5632)),
    "T": ("llama", Size(2, 64, 4, 64, 4, 512, 192)),
}
"""Architecture and shape; the batch is the first micro-batch that is tried."""

WARM_UP = 3
BF16 = torch.bfloat16
Row = dict[str, Any]


def plain(size: Size, arch: str, device: str, compiled: bool) -> Step:
    """Return the plain loop's step: autocast, backward, fused AdamW."""
    with torch.device(device):
        model = Model(size, arch == "llama")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
    )
    forward = torch.compile(model) if compiled else model

    def step(tokens: Tensor, labels: Tensor) -> float:
        with torch.autocast(device, BF16):
            loss = forward(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def serve(name: str, size_name: str, device: str, steps: int, first: int) -> Row:
    """Run one contestant with the largest micro-batch that fits, ``first`` or less."""
    arch, size = MODELS[size_name]
    torch.manual_seed(0)
    if name == "megatron":
        step = megatron(size, arch, device, bf16=True)
    else:
        step = plain(size, arch, device, name == "compiled")
    batch = first
    while True:
        try:
            return measure(step, replace(size, batch=batch), arch, device, steps)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        # Here the error is gone, and with it the frames that hold the step's tensors.
        batch //= 2
        gc.collect()
        torch.cuda.empty_cache()


def measure(step: Step, size: Size, arch: str, device: str, steps: int) -> Row:
    """Return what steps of one micro-batch took."""
    data = torch.randint(0, size.vocab, (size.batch, size.sequence + 1), device=device)
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    losses = [step(tokens, labels) for _ in range(WARM_UP)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step(tokens, labels)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    median, peak = statistics.median(seconds), peak_of(device)
    return {
        "micro_batch": size.batch,
        "ms": 1e3 * median,
        "tokens_per_second": size.batch * size.sequence / median,
        "mfu": None if peak is None else size.flops(arch) / median / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "first_loss": losses[0],
    }


def peak_of(device: str) -> float | None:
    """Return the FLOP/s of the device in bf16; None where no data sheet is known."""
    return peak_by_name(torch.cuda.get_device_name()) if device == "cuda" else None


def compare(size_name: str, options: argparse.Namespace) -> list[Row]:
    """Run the contestants of a model, with one micro-batch for all, and print their rows."""
    names = ["plain", "megatron", *(["compiled"] if options.compile else [])]
    first, found = MODELS[size_name][1].batch, {}
    while True:
        for name in names:
            if name not in found or found[name]["micro_batch"] > first:
                found[name] = contest(name, size_name, options, first)
                first = min(first, found[name]["micro_batch"])
        if all(row["micro_batch"] == first for row in found.values()):
            break
    for name in names:
        row = found[name]
        row["ratio"] = found["plain"]["ms"] / row["ms"]
        print(
            f"{size_name:>5} {name:>9} {row['micro_batch']:>11} {row['ms']:>9.1f}"
            f" {row['tokens_per_second']:>10.0f} {shown(row['mfu'], '.1%'):>7}"
            f" {shown(row['peak_gib'], '.1f'):>9} {row['first_loss']:>11.3f} {row['ratio']:>6.2f}",
            flush=True,
        )
    return [{"model": size_name, "contestant": name, **found[name]} for name in names]


def contest(name: str, size_name: str, options: argparse.Namespace, first: int) -> Row:
    """Run one contestant in a process of its own."""
    words = ["--serve", name, "--size", size_name, "--first", str(first)]
    words += ["--device", options.device, "--steps", str(options.steps)]
    done = subprocess.run(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} of {size_name} ended with exit code {done.returncode}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def shown(value: float | None, form: str) -> str:
    """Return a number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def timed(function: Callable[[], Any], device: str, repeats: int) -> float | str:
    """Return median seconds of a call, or why there are none."""
    seconds = []
    try:
        for _ in range(repeats + 2):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    except (RuntimeError, TypeError) as error:  # out of memory, or not in this version of torch
        gc.collect()
        return " ".join(str(error).split())[:100]
    return statistics.median(seconds[2:])


def synchronize(device: str) -> None:
    """Wait until the device has done all that was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


def report(kind: str, name: str, flops: float, took: float | str) -> Row:
    """Print and return the row of a kernel."""
    if isinstance(took, str):
        print(f"{kind:<34} {name:<34} {took}", flush=True)
        return {"kind": kind, "name": name, "reason": took}
    print(f"{kind:<34} {name:<34} {1e3 * took:>9.3f} {flops / took / 1e12:>9.1f}", flush=True)
    return {"kind": kind, "name": name, "ms": 1e3 * took, "tflops": flops / took / 1e12}


def attention_rows(device: str, shapes: Sequence[tuple[int, int, int]], repeats: int) -> list[Row]:
    """Time forward and backward of every backend on (sequence, batch, window or 0)."""
    rows, heads, groups, channels = [], 16, 4, 128
    for S, B, window in shapes:
        inputs = [
            torch.randn(S, B, n, channels, device=device, dtype=BF16).requires_grad_()
            for n in (heads, groups, groups)
        ]
        rule = Rule(scale=channels**-0.5, window=(window, 0) if window else None)
        pairs = (window or S / 2) * S * B * heads
        kind = f"attention S {S} B {B}" + (f" window {window}" if window else "")
        for name, backend in table.TABLE["attention"].items():
            took: float | str | None = backend.missing(torch.device(device), BF16)
            if took is None:
                call = functools.partial(there_and_back, backend.implementation, inputs, rule)
                took = timed(call, device, repeats)
            rows.append(report(kind, name, 3 * 4 * pairs * channels, took))
    return rows


def there_and_back(attention: Callable[..., Tensor], inputs: list[Tensor], rule: Rule) -> None:
    """Run an attention forward and backward."""
    out = attention(*inputs, rule, Extras())
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def product_rows(device: str, tokens: int, width: int, repeats: int) -> list[Row]:
    """Time the products of a square linear layer: forward, and the weight gradient into fp32."""
    x, grad = (torch.randn(tokens, width, device=device, dtype=BF16) for _ in range(2))
    weight = torch.randn(width, width, device=device, dtype=BF16)
    buffer = torch.zeros(width, width, device=device)

    def fused() -> None:
        # In one product, where this version of torch has it for an fp32 buffer.
        torch.addmm(buffer, grad.t(), x, out_dtype=torch.float32, out=buffer)

    calls: dict[str, Callable[[], Any]] = {
        "linear": lambda: matmul.linear(x, weight),
        "weight gradient": lambda: matmul.accumulate_wgrad(buffer, grad, x),
        "weight gradient, rounded to bf16": lambda: buffer.add_(grad.t() @ x),
        "weight gradient, addmm": fused,
    }
    kind = f"product {tokens} x {width} x {width}"
    flops = 2.0 * tokens * width**2
    return [report(kind, name, flops, timed(f, device, repeats)) for name, f in calls.items()]


def facts(device: str) -> Row:
    """Return what the figures are of."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    try:
        flash = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        flash = None
    found = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    return {**found, "flash_attn": flash, "peak_flops": peak_of(device)}


def main() -> int:
    """Run what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", nargs="+", default=["345M", "1B"], choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="also the plain loop, compiled")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    # To try the script itself where there is no GPU; its figures mean nothing there.
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu: error: torch {torch.__version__} sees no CUDA device, and this measures one; run"
            " it where there is one (benchmarks/train_step.py measures the CPU)",
            file=sys.stderr,
        )
        return 2
    if options.serve:
        name, size = options.serve, options.size[0]
        print(json.dumps(serve(name, size, options.device, options.steps, options.first)))
        return 0
    found: Row = facts(options.device)
    print(", ".join(f"{name}: {value}" for name, value in found.items()))
    print("model  contestant micro-batch   ms/step   tokens/s     MFU  peak GiB  first loss  ratio")
    found["models"] = [row for size in options.size for row in compare(size, options)]
    print(f"\n{'kernel':<34} {'':<34} {'ms':>9} {'TFLOP/s':>9}")
    on_gpu = options.device == "cuda"
    shapes = [(2048, 4, 0), (8192, 1, 0), (8192, 1, 1024)] if on_gpu else [(64, 1, 0), (64, 1, 8)]
    found["attention"] = attention_rows(options.device, shapes, options.steps)
    found["products"] = product_rows(options.device, *(8192, 4096) if on_gpu else (64, 32), 10)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
