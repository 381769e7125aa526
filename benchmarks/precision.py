"""Loss curves in half precision beside the fp32 one: `pretrain_gpt.py` on the shipped plays.

    python benchmarks/precision.py [--iterations 200] [--runs bf16 fp16 ...] [--products native]

Every run starts from the same weights (rounded to its format) and reads the same samples. Losses
are means over windows of 10 iterations, of which the first is left out: at the start a curve falls
so steeply that one skipped step shows. For each run:

    largest      largest difference of a window from fp32's, relative to fp32's
    last         the same of the last window
    validation   relative difference of the loss on the validation set at the end
    skipped      iterations left out because gradients overflowed, and the loss scale at the end

The first run is fp32 too, with microbatches of half the size: it only adds up in another order, so
its differences are what rounding alone grows into. Runs with
`SLOW_DECAY` have Adam's default beta2 of 0.999, and so has the fp32 run beside them; the others
have 0.95. The program ends with 1 if a run leaves its bounds (`BOUNDS`). Products of halves go by
way of fp32 on every CPU, so that its units for half precision, if it has any, do not count; with
``--products native`` they do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {ROOT}/data/tokenizer.json"
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--qk-layernorm --init-method-std 0.05 --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--micro-batch-size 8 --global-batch-size 8 --lr 5e-3 --min-lr 2.5e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 --split 90,10,0 --num-workers 0 "
    "--make-vocab-size-divisible-by 64 --eval-iters 20 --log-interval 100 --device cpu"
)
SLOW_DECAY = "--adam-beta2 0.999"
PRECISE = "--bf16 --use-precision-aware-optimizer"
# A scale that grows every 20 steps overflows now and then, as it does in a long run.
FP16 = "--fp16 --initial-loss-scale 65536 --loss-scale-window 20 --hysteresis 1"
RUNS = {
    "fp32-halves": "--micro-batch-size 4",
    "bf16": "--bf16",
    "bf16-stream": "--bf16 --fp32-residual-connection",
    "bf16-grads": "--bf16 --grad-reduce-in-bf16",
    "bf16-optimizer": f"{PRECISE} --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16",
    "fp16": FP16,
    "fp16-losses": f"{FP16} --fp16-lm-cross-entropy",
    "bf16-slow": f"--bf16 {SLOW_DECAY}",
    "fp16-moments": f"{PRECISE} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 {SLOW_DECAY}",
    "mixed-moments": f"{PRECISE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16 {SLOW_DECAY}",
}
WINDOW = 10
BOUNDS = {
    "fp32-halves": (0.001, 0.001),
    "bf16": (0.03, 0.015),
    "bf16-stream": (0.03, 0.015),
    "bf16-grads": (0.03, 0.015),
    "bf16-optimizer": (0.03, 0.015),
    "fp16": (0.01, 0.005),
    "fp16-losses": (0.01, 0.005),
    "bf16-slow": (0.03, 0.015),
    "fp16-moments": (0.03, 0.015),
    "mixed-moments": (0.03, 0.015),
}
"""Most that a window, and the validation loss, may differ from fp32's, relative to it."""


UPCAST = """
import sys
import pretrain_gpt
from megatron.core.kernels import matmul
matmul.cpu_features = frozenset
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
"""Trains as if the CPU had no units for half precision."""


def call(*command: str) -> None:
    """Run Python with ``command`` on one thread; show what it said if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def train(
    folder: Path, name: str, flags: str, iterations: int, native: bool
) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics file."""
    path = folder / f"{name}.jsonl"
    words = f"{MODEL} {TRAINING} {TOKENIZER} --data-path {folder}/plays_text_document {flags}"
    more = f"--train-iters {iterations} --metrics-file {path}"
    program = ["pretrain_gpt.py"] if native else ["-c", UPCAST]
    call(*program, *words.split(), *more.split())
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compare(rows: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far a run is from the fp32 one."""
    windows, expected = windows_of(rows), windows_of(exact)
    apart = [abs(x / y - 1) for x, y in zip(windows, expected, strict=True)]
    training = [row for row in rows if "split" not in row]
    return {
        "largest": max(apart[1:]),
        "last": apart[-1],
        "loss": windows[-1],
        "validation": abs(validation(rows) / validation(exact) - 1),
        "skipped": sum(row["skipped"] for row in training),
        "loss_scale": training[-1]["loss_scale"],
    }


def decay_of(run: str) -> str:
    """Return the flags that a run shares with the fp32 run beside it."""
    return SLOW_DECAY if SLOW_DECAY in RUNS[run] else ""


def windows_of(rows: list[dict[str, Any]]) -> list[float]:
    """Return mean losses of windows of iterations; a skipped one has a loss as well."""
    losses = [row["lm_loss"] for row in rows if "split" not in row]
    return [
        sum(losses[at : at + WINDOW]) / len(losses[at : at + WINDOW])
        for at in range(0, len(losses), WINDOW)
    ]


def validation(rows: list[dict[str, Any]]) -> float:
    """Return the loss on the validation set at the end of a run."""
    return float(next(row["lm_loss"] for row in reversed(rows) if row.get("split") == "valid"))


def main(argv: list[str]) -> int:
    """Compare the runs; return 1 if one leaves its bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--products", choices=("upcast", "native"), default="upcast")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    asked = parser.parse_args(argv)
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = f"--input {ROOT}/data/shakespeare.jsonl --append-eod --workers 1"
        output = f"--output-prefix {folder}/plays"
        call("tools/preprocess_data.py", *f"{corpus} {TOKENIZER} {output}".split())
        native = asked.products == "native"
        exact = {}
        for decay in sorted({decay_of(run) for run in asked.runs}):
            name = "fp32-slow" if decay else "fp32"
            rows = train(folder, name, decay, asked.iterations, native)
            start, end = windows_of(rows)[0], windows_of(rows)[-1]
            print(f"{name}: loss {start:.3f} -> {end:.3f}, validation {validation(rows):.4f}")
            exact[decay] = rows
        print("| run | loss | largest | last | validation | skipped | loss scale |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for run in asked.runs:
            rows = train(folder, run, RUNS[run], asked.iterations, native)
            one = compare(rows, exact[decay_of(run)])
            found[run] = one
            shares = " | ".join(f"{one[key]:.3%}" for key in ("largest", "last", "validation"))
            tail = f"{one['skipped']:.0f} | {one['loss_scale']:g}"
            print(f"| {run} | {one['loss']:.3f} | {shares} | {tail} |", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    beyond = [
        run
        for run, one in found.items()
        if one["largest"] > BOUNDS[run][0] or one["validation"] > BOUNDS[run][1]
    ]
    if beyond:
        print(f"out of bounds: {', '.join(beyond)}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
