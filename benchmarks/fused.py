"""Every backend of the fused operations on one device: what `kernels.py --device cuda` shows.

Sizes are those of a layer with a hidden size of 4096, 8192 tokens a microbatch, bf16; a vocabulary
of 32,000 columns; 64 million elements for Adam. Milliseconds are the median of a forward and
backward, the launches among them, with the device idle before and after.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import rope, table
from megatron.core.kernels.adam import AdamStep
from megatron.core.kernels.cross_entropy import Kernels

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One operation: how a backend is called, and what torch has for it."""

    op: str
    inputs: list[Tensor]
    call: Callable[..., Tensor | None]
    """Of an implementation and the inputs; returns what is differentiated, if anything."""
    torchs: Callable[..., Tensor | None]
    """Of the inputs."""


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    tokens: int = 8192
    hidden: int = 4096
    head: int = 128
    keys: int = 2048
    columns: int = 32000
    parameters: int = 1 << 26


def cases(device: torch.device, sizes: Sizes) -> list[Case]:
    """Return the operations on tensors of a device."""
    tokens, hidden, head, keys = sizes.tokens, sizes.hidden, sizes.head, sizes.keys

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=BF16, requires_grad=True)

    x, y, gain, shift = leaf(tokens, 1, hidden), leaf(tokens, 1, hidden), leaf(hidden), leaf(hidden)
    wide, wide_bias = leaf(tokens, 1, 7 * hidden), leaf(7 * hidden)
    heads, positions = leaf(tokens, 1, hidden // head, head), torch.arange(tokens, device=device)
    cos, sin = rope.rope_tables(rope.inverse_frequencies(head, 1e4), positions, BF16)
    scores = leaf(1, 8, keys, keys)

    def rotated(heads: Tensor) -> Tensor:
        a, b = heads.chunk(2, -1)
        c, s = (t[:, None, None].to(BF16) for t in (cos, sin))
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def gate(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    hidden_keys = torch.ones(keys, keys, dtype=torch.bool, device=device).triu(1)
    return [
        Case(
            "layer_norm", [x, gain, shift], lambda f, *t: f(*t, 1e-5),
            lambda x, w, b: F.layer_norm(x, (hidden,), w, b, 1e-5),
        ),
        Case(
            "rms_norm", [x, gain], lambda f, *t: f(*t, 1e-5),
            lambda x, w: F.rms_norm(x, (hidden,), w, 1e-5),
        ),
        Case("rope", [heads], lambda f, x: f(x, cos, sin), rotated),
        Case("swiglu", [wide], lambda f, x: f(x), gate),
        Case(
            "gelu_tanh", [wide, wide_bias], lambda f, *t: f(*t),
            lambda x, b: F.gelu(x + b, approximate="tanh"),
        ),
        Case(
            "bias_dropout_add", [y, shift, x], lambda f, *t: f(*t, 0.1, 7),
            lambda y, b, x: x + F.dropout(y + b, 0.1),
        ),
        Case(
            "masked_softmax", [scores], lambda f, x: f(x, None, True, 0.1),
            lambda x: torch.softmax(x.masked_fill(hidden_keys, -torch.inf) * 0.1, -1),
        ),
        losses(device, tokens, sizes.columns),
        adam(device, sizes.parameters),
    ]  # fmt: skip


def losses(device: torch.device, tokens: int, columns: int) -> Case:
    """Return both halves of a cross entropy, one after the other."""
    logits = torch.randn(tokens, columns, device=device, dtype=BF16)
    labels = torch.randint(0, columns, (tokens,), device=device)
    grad = torch.rand(tokens, device=device)

    def call(kernels: Kernels, logits: Tensor) -> None:
        own = kernels.statistics(logits.clone(), labels, columns, False)
        largest = None if kernels.keeps_exponentials else own.largest_N
        kernels.gradient(own.kept_Nv, labels, columns, largest, own.total_N, grad, grad, 0.0)

    def torchs(logits: Tensor) -> None:
        leaf = logits.clone().requires_grad_()
        loss = F.cross_entropy(leaf.float(), labels, reduction="none")
        torch.autograd.grad(loss, leaf, grad)

    return Case("cross_entropy", [logits], call, torchs)


def adam(device: torch.device, count: int) -> Case:
    """Return a step with everything in fp32, as torch's kernel wants it."""
    arrays = [torch.rand(count, device=device) for _ in range(4)]
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    step = AdamStep(1e-4, 0.9, 0.95, 1e-8, 0.1, True, one, one, zero)

    def torchs(*arrays: Tensor) -> None:
        torch._fused_adamw_(
            *([array] for array in arrays), [], [one], lr=1e-4, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, grad_scale=one,
            found_inf=zero,
        )  # fmt: skip

    return Case("adam", arrays, lambda f, *t: f(*t, step), torchs)


def milliseconds(
    function: Callable[..., Tensor | None], inputs: list[Tensor], repeats: int
) -> float:
    """Return the median of a forward and backward."""
    device, took = inputs[0].device, []
    for _ in range(repeats + 2):
        _wait(device)
        start = time.perf_counter()
        out = function(*inputs)
        if out is not None:
            torch.autograd.grad(out, inputs, torch.ones_like(out))
        _wait(device)
        took.append(time.perf_counter() - start)
    return 1e3 * statistics.median(took[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(device: torch.device, repeats: int, sizes: Sizes = Sizes()) -> None:
    """Print a line for each backend of each operation."""
    print(f"{'op':18s} {'backend':20s} {'ms':>9s} {'of reference':>13s} {'of torch':>9s}")
    for case in cases(device, sizes):
        plain = milliseconds(case.torchs, case.inputs, repeats)
        found: dict[str, float | str] = {}
        for name, backend in table.TABLE[case.op].items():
            reason = backend.missing(device, BF16)
            if case.op == "cross_entropy" and name in table.PACKAGES:
                reason = "takes the process group itself"
            if reason is None:
                call, function = case.call, backend.implementation
                run = lambda *t, c=call, f=function: c(f, *t)  # noqa: E731
                found[name] = milliseconds(run, case.inputs, repeats)
            else:
                found[name] = reason
        reference = found["reference"]
        assert isinstance(reference, float)
        found["torch's op"] = plain
        for name, took in found.items():
            line = f"{case.op:18s} {name:20s} "
            if isinstance(took, float):
                line += f"{took:9.3f} {took / reference:13.2f} {took / plain:9.2f}"
            else:
                line += took
            print(line, flush=True)
