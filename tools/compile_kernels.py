"""Compile every Triton kernel for GPUs that are not here, and say what each one takes of them.

    python tools/compile_kernels.py [--targets 80 90 100]

Ops run on CPU tensors of the sizes of real models, but in place of launching a kernel its
arguments are taken down, and it is compiled for them with the assembler that Triton brings. The
table has, for each kernel and compute capability, the most registers of a thread and the most
shared memory of a program over all cases. A kernel that keeps anything of a thread in local memory
spills, and the exit code is 1.

Needs Triton (`make test-kernels` makes an environment with it), no GPU, and no TRITON_INTERPRET.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.kernels import permute, table  # noqa: E402
from megatron.core.kernels.adam import AdamStep  # noqa: E402
from megatron.core.kernels.permute import Moves  # noqa: E402
from megatron.core.kernels.probe import INSTALL, missing  # noqa: E402
from megatron.core.kernels.routing import WIDEST_FUSED, Routes, Rule  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
TARGETS = (80, 90, 100)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor that wants a gradient; nobody reads its values."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def both_ways(op: str, *arguments: Any) -> None:
    """Run an op and its backward."""
    out = table.TABLE[op]["triton"].implementation(*arguments)
    out.backward(torch.zeros_like(out))


def norms(op: str, width: int, dtype: torch.dtype = BF16) -> None:
    """Run a norm of rows of ``width``."""
    vectors = [leaf(width, dtype=dtype) for _ in range(2 if op == "layer_norm" else 1)]
    both_ways(op, leaf(64, width, dtype=dtype), *vectors, 1e-5)


def rotary(interleaved: bool, pairs: int) -> None:
    """Run a rotation of heads of 128 channels."""
    both_ways(
        "rope", leaf(16, 2, 32, 128), torch.zeros(16, pairs), torch.zeros(16, pairs), interleaved
    )


def losses(summed: bool, dtype: torch.dtype) -> None:
    """Run both halves of a cross entropy over a vocabulary of 128,000 on 8 ranks."""
    kernels = table.TABLE["cross_entropy"]["triton"].implementation
    labels, tokens = torch.zeros(32, dtype=torch.int64), torch.zeros(32)
    kept = kernels.statistics(torch.zeros(32, 16000, dtype=dtype), labels, 15999, summed).kept_Nv
    kernels.gradient(kept, labels, 15999, tokens, tokens, tokens, tokens, 0.0)


def scores(causal: bool) -> None:
    """Run a softmax over 4096 keys, causal or under a mask."""
    visible = None if causal else torch.ones(1, 1, 16, 4096, dtype=torch.bool)
    both_ways("masked_softmax", leaf(1, 2, 16, 4096), visible, causal, 0.1)


def moves(choices: int, dtype: torch.dtype) -> None:
    """Sort 64 tokens by expert and join what experts make of them."""
    ours: Moves = table.TABLE["permute"]["triton"].implementation
    by = permute.sort_choices(torch.arange(64 * choices).view(64, choices), None, 64 * choices)
    rows = ours.permute(leaf(64, 7168, dtype=dtype), by)
    out = ours.unpermute(rows, leaf(64, choices, dtype=F32), by)
    out.backward(torch.zeros_like(out))


def routes(rule: Rule, experts: int, bias: bool = False, given: bool = False) -> None:
    """Send 64 tokens to experts that are chosen, or given."""
    ours: Routes = table.TABLE["routing"]["triton"].implementation
    logits = leaf(64, experts, dtype=F32)
    if given:
        chosen = torch.arange(rule.topk).repeat(64, 1)
        weights = ours.weigh(logits, chosen, rule)
    else:
        weights = ours.route(logits, torch.zeros(experts) if bias else None, rule)[1]
    weights.backward(torch.zeros_like(weights))


def steps(decoupled: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    """Run a step of Adam on a range."""
    scalar = torch.ones(())
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled, scalar, scalar, torch.zeros(()))
    table.TABLE["adam"]["triton"].implementation(
        *(torch.zeros(1 << 16, dtype=dtype) for dtype in dtypes), step
    )


def cases() -> list[Callable[[], None]]:
    """Return what is run: the widest rows, and one of every form a kernel has."""
    wide = 28672
    plain = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "squared_relu")
    gated = ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu")
    return [
        *(lambda w=w: norms("layer_norm", w) for w in (128, 8192, 16384)),
        *(lambda w=w: norms("layer_norm", w, F32) for w in (8192, 16384)),
        *(lambda w=w: norms("rms_norm", w) for w in (128, 4096, 8192, 16384)),
        *(lambda i=i, pairs=p: rotary(i, pairs) for i, p in ((False, 64), (True, 64), (False, 32))),
        *(lambda op=op: both_ways(op, leaf(64, wide), leaf(wide)) for op in plain),
        *(lambda op=op: both_ways(op, leaf(64, 2 * wide), leaf(2 * wide)) for op in gated),
        lambda: both_ways("swiglu", leaf(64, 2 * wide), None, 7.0, 1.0),
        lambda: both_ways("bias_dropout_add", leaf(64, 8192), leaf(8192), leaf(64, 8192), 0.1, 1),
        lambda: both_ways(
            "bias_dropout_add", leaf(64, 8192), None, leaf(64, 8192, dtype=F32), 0.1, 1
        ),
        lambda: losses(True, F32),
        lambda: losses(False, BF16),
        lambda: scores(True),
        lambda: scores(False),
        lambda: moves(8, BF16),
        lambda: moves(2, F32),
        lambda: routes(Rule(2, "logits"), 8),
        lambda: routes(Rule(1, "softmax"), 64),
        lambda: routes(Rule(10, "softmax"), WIDEST_FUSED),
        lambda: routes(Rule(8, "sigmoid", 8, 4, 2.5), 256, bias=True),
        lambda: routes(Rule(22, "sigmoid"), 512, bias=True),
        lambda: routes(Rule(6, "sqrtsoftplus"), 384, bias=True),
        lambda: routes(Rule(8, "sqrtsoftplus"), WIDEST_FUSED, given=True),
        lambda: steps(True, (F32, F32, F32, F32)),
        lambda: steps(False, (F32, BF16, BF16, BF16)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was to be launched with."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    """Arguments that are multiples of 16, which lets loads be wide."""
    warps: int

    @property
    def name(self) -> str:
        """Return module and name of the kernel."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"


def described(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Launch:
    """Return a launch as Triton would specialise it."""
    named = dict(zip((p.name for p in kernel.params), arguments, strict=False))
    named |= {key: value for key, value in keywords.items() if key != "num_warps"}
    signature, constants, divisible = [], [], []
    for parameter in kernel.params:
        value = named[parameter.name]
        plain = parameter.do_not_specialize
        is_one = isinstance(value, int) and value == 1 and not plain
        if parameter.is_constexpr or value is None or is_one:
            kind = "constexpr"
            constants.append((parameter.name, value))
        elif isinstance(value, Tensor):
            kind = POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(parameter.name)
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not plain:
                divisible.append(parameter.name)
        else:
            kind = "fp32"
        signature.append((parameter.name, kind))
    return Launch(
        kernel, tuple(signature), tuple(constants), tuple(divisible), keywords["num_warps"]
    )


def launches() -> list[Launch]:
    """Return every distinct launch of all cases."""
    from triton.runtime.jit import JITFunction

    found: dict[Launch, None] = {}

    def take_down(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        found[described(kernel, arguments, keywords)] = None

    with mock.patch.object(JITFunction, "run", take_down):
        for case in cases():
            case()
    return list(found)


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes."""

    registers: int
    shared: int
    spilled: int
    """Bytes of local memory of a thread, the stack among them."""


def usage(launch: Launch, capability: int) -> Usage:
    """Compile a kernel for a compute capability, such as 90, and measure it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {parameter.name: number for number, parameter in enumerate(launch.kernel.params)}
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs={(places[name],): value for name, value in launch.constants},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": launch.warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return Usage(registers, compiled.metadata.shared, stack + local)


def main() -> int:
    """Print the table; return 1 if a kernel spills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, metavar="CC")
    targets = parser.parse_args().targets
    reason = missing("triton")
    if os.environ.get("TRITON_INTERPRET"):
        reason = "TRITON_INTERPRET is set, under which nothing is compiled"
    if reason is not None:
        print(f"compile_kernels: error: {reason}; {INSTALL['triton']}", file=sys.stderr)
        return 2
    # Not what the compiler of the day thinks: a multiply and an add become one operation.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    rows: dict[str, dict[int, list[Usage]]] = {}
    for launch in launches():
        for target in targets:
            rows.setdefault(launch.name, {}).setdefault(target, []).append(usage(launch, target))
    heads = " | ".join(f"sm_{target}" for target in targets)
    print(f"| kernel | cases | {heads} |\n|---|---|{'---|' * len(targets)}")
    spills = []
    for name, by_target in rows.items():
        cells = []
        for target, found in by_target.items():
            spilled = max(each.spilled for each in found)
            cell = f"{max(e.registers for e in found)} regs, {max(e.shared for e in found)} B"
            cells.append(f"{cell}, spills {spilled} B" if spilled else cell)
            spills += [f"{name} on sm_{target}"] if spilled else []
        print(f"| {name} | {len(next(iter(by_target.values())))} | {' | '.join(cells)} |")
    print(
        f"\n{len(rows)} kernels for {len(targets)} targets; spills: {', '.join(spills) or 'none'}"
    )
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
