"""Build the index files of a training run beforehand, so that the run itself finds them.

    tools/prepare_index.py FLAGS OF pretrain_gpt.py [--dry-run-world-size N]

Takes the run's own flags and needs neither its devices nor its processes; flags that do not concern
data change nothing. Each line says of one set of files whether it was there (hit) or was built; the
start of its name is the cache key. The number of processes matters only where --global-batch-size
is left to follow from it: then give it with --dry-run-world-size. The files must lie where the run
looks for them: with --data-cache-path in that folder, else beside each corpus. For pretrain_bert.py
add --masked-words, which that program has by itself.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.datasets.plan import describe
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training import data
from megatron.training.arguments import parse, run_main

PROGRAM = "prepare_index"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    started = time.monotonic()
    run = parse(argv, pretrain_gpt.PROGRAM, planner=PROGRAM)
    for line in run.lines():
        say(line)
    config = run.config
    sizes = data.sizes(config, say)
    for row in describe(config.data, sizes):
        say(row.line())
    tokenizer = build_tokenizer(config.tokenizer)
    built = pretrain_gpt.build_datasets(config, sizes, tokenizer, BuildPolicy(), say)
    for path, state in built.files.items():
        say(f"{state:<5} {path}")
    for line in data.index_lines(built):
        say(f"{line}, {time.monotonic() - started:.1f} s")
    return 0


def say(text: str) -> None:
    """Print a line at once: building takes long, and somebody may watch the log."""
    print(f"{PROGRAM}: {text}", flush=True)


if __name__ == "__main__":
    run_main(main, PROGRAM)
