"""Every benchmark, one after the other: what `make benchmark` runs.

    python benchmarks/run.py [NAME ...]

Names: train_step, moe, layouts, precision, preprocess, index_build, kernels, checkpoints.

Ratios are taken within one run, so they hold on a busy machine too; absolute figures do not. Each
script tells by its `--help` what it measures and how.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parent / "data" / "shakespeare.jsonl"


def plain_text(folder: str) -> str:
    """Return the path of the shipped corpus as plain text."""
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    path = Path(folder) / "shakespeare.txt"
    path.write_text("\n\n".join(json.loads(line)["text"] for line in lines), encoding="utf-8")
    return str(path)


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return the first exit code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "train_step": ["train_step.py", "--size", "S", "M"],
            "moe": ["moe.py", "--size", "S", "--rounds", "5"],
            "layouts": ["layouts.py", "--size", "M"],
            "precision": ["precision.py"],
            "preprocess": ["preprocess.py", plain_text(folder), "--mb", "90", "--rounds", "2"],
            "index_build": ["index_build.py", "--documents", "100_000_000"],
            "kernels": ["kernels.py"],
            "checkpoints": ["checkpoints.py", "--mb", "1024"],
        }
        unknown = sorted(set(names) - set(commands))
        if unknown:
            print(f"unknown: {', '.join(unknown)}; there are {', '.join(commands)}")
            return 2
        for name in names or commands:
            script, *arguments = commands[name]
            shown = " ".join(Path(word).name if "/" in word else word for word in arguments)
            print(f"\n=== python benchmarks/{script} {shown}", flush=True)
            code = subprocess.run([sys.executable, str(HERE / script), *arguments]).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
