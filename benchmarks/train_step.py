"""Our training step beside a plain torch loop and a measured matrix product.

    python benchmarks/train_step.py [--size S M] [--arch gpt2 llama] [--threads 2] [--rounds 7]

Three processes take turns: `gemm` (2048 cubed in fp32), `plain` (the smallest loop over torch's own
modules: forward, backward, fused AdamW) and `megatron` (the step that `pretrain_gpt.py` runs, with
gradient norm and clipping, which the plain loop does not do). A round visits each once, the product
right before and after, so that load of other programs hits all alike. The ratio is the median over
rounds of plain over megatron seconds; MFU is a step's rate over the neighbouring product's, where a
step counts matrix products only, causal attention at half, and nothing recomputed.

Our programs ask for large pages of memory and keep what is freed, and so does our process here;
THP_MEM_ALLOC_ENABLE=1 in the environment asks for large pages of all, 0 for nobody's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sizes import BETAS, DECAY, EPSILON, LR, SIZES, Size

from megatron.training.processes.host_memory import ask_for_huge_pages, keep_freed_memory

Step = Callable[[Any, Any], Any]
GEMM = 2048


def megatron(
    size: Size, arch: str, device: str = "cpu", bf16: bool = False, **choices: Any
) -> Step:
    """Return the step that the training loop runs; ``choices`` are the architecture's besides."""
    import torch
    from torch import Tensor

    from megatron.core import rng
    from megatron.core.mesh import Mesh
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer.config import OptimizerConfig
    from megatron.core.optimizer.optimizer import build_optimizer
    from megatron.core.precision.config import PrecisionConfig
    from megatron.core.transformer.config import TransformerConfig
    from megatron.training.config import HealthConfig
    from megatron.training.health import Health
    from megatron.training.objective import Objective
    from megatron.training.passes import Passes
    from megatron.training.step import Plan, TrainStep
    from megatron.training.timers import Timers
    from pretrain_gpt import forward_step

    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "ffn_hidden_size": size.gated_width,
    }
    config = TransformerConfig.resolve(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        max_position_embeddings=size.sequence,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **{**(llama if arch == "llama" else {"bias_gelu_fusion": False}), **choices},
    )
    mesh, precision = Mesh.serial(device), PrecisionConfig.resolve(bf16=bf16)
    dtype = getattr(torch, precision.params_dtype)
    model = GPTModel(config, mesh, vocab_size=size.vocab, dtype=dtype)
    rng.initialize(model, 0)
    settings = OptimizerConfig.resolve(
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPSILON, weight_decay=DECAY
    )
    optimizer = build_optimizer(settings, [model], mesh, precision)
    objective = Objective(per_token=True, mesh=mesh)
    passes = Passes([model], forward_step, objective, Timers(0))
    runner = TrainStep(passes, optimizer, Health(HealthConfig()), seed=0)
    plan = Plan(iteration=1, samples=range(size.batch), learning_rate=LR, weight_decay=DECAY)
    nominal = objective.nominal(size.batch, size.batch, size.sequence)

    def step(tokens: Tensor, labels: Tensor) -> float:
        mask = torch.ones(tokens.shape, device=tokens.device)
        batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        result = runner.run(plan, [batch], 1, nominal, lambda: (False, False, False))
        return result.totals.loss

    return step


def gemm() -> Step:
    """Return the product that everything is measured against."""
    import torch

    a, b, c = (torch.randn(GEMM, GEMM) for _ in range(3))
    return lambda *_: torch.mm(a, b, out=c)


def _contestant(name: str, size: Size, arch: str) -> Step:
    if name == "gemm":
        return gemm()
    if name == "megatron":
        return megatron(size, arch)
    from plain_loop import plain

    return plain(size, arch)


def work(
    build: Callable[[], Step],
    size: Size,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Serve one contestant: a count on stdin, seconds of each step on stdout."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = build()
    data = torch.randint(0, size.vocab, (size.batch, size.sequence + 1))
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    first = step(tokens, labels)
    step(tokens, labels)
    print(json.dumps(first if isinstance(first, float) else None), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = clock()
            step(tokens, labels)
            seconds.append(clock() - start)
        print(json.dumps(seconds), flush=True)


class Worker:
    """A contestant in a process of its own, which ``script`` serves."""

    def __init__(
        self, name: str, size: str, threads: int, *options: str, script: str = __file__
    ) -> None:
        command = [sys.executable, script, "--serve", name, "--size", size, *options]
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.first_loss = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant died with exit code {self.process.wait()}")
        return json.loads(line)

    def run(self, count: int) -> float:
        """Return the median seconds of ``count`` steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return statistics.median(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def compare(size_name: str, arch: str, threads: int, rounds: int) -> dict[str, float]:
    """Run the rounds of one size and print its row."""
    size = SIZES[size_name]
    names = ("gemm", "plain", "megatron")
    workers = {name: Worker(name, size_name, threads, "--arch", arch) for name in names}
    times: dict[str, list[float]] = {"plain": [], "megatron": []}
    rates: dict[str, list[float]] = {"plain": [], "megatron": []}
    for _ in range(rounds):
        for name in times:
            before = workers["gemm"].run(2)
            seconds = workers[name].run(2)
            product = (before + workers["gemm"].run(2)) / 2
            times[name].append(seconds)
            rates[name].append(size.flops(arch) / seconds * product / (2.0 * GEMM**3))
    for worker in workers.values():
        worker.close()
    ratio = statistics.median(a / b for a, b in zip(times["plain"], times["megatron"], strict=True))
    tokens = size.batch * size.sequence
    row = {"ratio": ratio}
    for name in times:
        median = statistics.median(times[name])
        row[f"{name}_ms"] = median * 1e3
        row[f"{name}_tokens_per_second"] = tokens / median
        row[f"{name}_mfu"] = statistics.median(rates[name])
    print(
        f"{size_name:>4} {arch:>6} {threads:>7} {row['plain_ms']:>9.1f} {row['megatron_ms']:>12.1f}"
        f" {row['megatron_tokens_per_second']:>9.0f} {row['plain_mfu']:>10.1%}"
        f" {row['megatron_mfu']:>13.1%} {ratio:>7.2f}",
        flush=True,
    )
    return row


def main() -> int:
    """Run what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", nargs="+", default=["S", "M"], choices=list(SIZES))
    parser.add_argument("--arch", nargs="+", default=["gpt2", "llama"], choices=["gpt2", "llama"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, size, arch = options.serve, SIZES[options.size[0]], options.arch[0]
        if name == "megatron":
            ask_for_huge_pages(os.environ)  # as our programs do
            keep_freed_memory(os.environ)
        work(lambda: _contestant(name, size, arch), size, options.threads)
        return 0
    print("size   arch threads  plain ms  megatron ms  tokens/s  plain MFU  megatron MFU   ratio")
    rows = {
        f"{size} {arch}": compare(size, arch, options.threads, options.rounds)
        for size in options.size
        for arch in options.arch
    }
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
