"""Turn text into token files for training: JSON lines, plain text or Parquet to .bin/.idx pairs.

    tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

writes data/corpus_text_document.bin, .idx and .json, and data/corpus_report.json. The output is the
same for any number of --workers and --partitions. On many machines, see
megatron/core/datasets/preprocess/partitions.py.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, option
from megatron.core.datasets.preprocess import partitions
from megatron.core.datasets.preprocess.config import PreprocessConfig
from megatron.core.datasets.preprocess.measure import measure
from megatron.core.datasets.preprocess.run import Job, encode_spans, prepare
from megatron.core.datasets.preprocess.sources import whole
from megatron.core.tokenizers import library
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import human_bytes
from megatron.training.arguments import parse_tool, run_main
from megatron.training.flags.flag_status import Row

PROGRAM = "preprocess_data"

# What scripts written for Megatron-LM and its relatives give besides the flags of the configs.
OTHERS = (
    Row("--vocab", "1", "successor", instead="--vocab-file {}"),
    Row("--tokenizer-name-or-path", "1", "successor", instead="--tokenizer-model {}"),
    Row("--keep-sequential-samples", "0", "no effect", why="documents stay in the input's order"),
    Row("--chunk-size", "1", "no effect", why="blocks of records are cut by their bytes"),
    Row("--dataset-impl", "1", "refused", default="mmap", why="token files have one format, mmap"),
    Row(
        "--append-bos", "0", "refused", why="only the end of a document is marked, by --append-eod"
    ),
    *(
        Row(flag, count, "refused", why="a flag of MindSpeed-LLM, whose instruction data differ")
        for flag, count in {
            "--handler-name": "1",
            "--prompt-type": "1",
            "--pack": "0",
            "--neat-pack": "0",
            "--seq-length": "1",
        }.items()
    ),
    *(
        Row(flag, "1", "refused", why="a flag of Pai-Megatron-Patch", instead=instead)
        for flag, instead in {
            "--patch-tokenizer-type": "use --tokenizer-type HuggingFaceTokenizer",
            "--load": "use --tokenizer-model with the folder that holds tokenizer.json",
        }.items()
    ),
)


class ToolConfig(Config):
    """All that this tool can be told."""

    preprocess: PreprocessConfig = option()
    tokenizer: TokenizerConfig = option()


def main(argv: Sequence[str] | None = None, check: Callable[[], None] = lambda: None) -> int:
    """Run the tool and return its exit code.

    Args:
        argv: words after the program's name; the process's own when absent.
        check: called between blocks; may raise to end the run.

    Raises:
        UserError: something that the user can fix.
    """
    run = parse_tool(argv, ToolConfig, PROGRAM, dry_run=True, others=OTHERS)
    config = run.config
    for line in run.lines():
        say(line)
    job = _job(config, check)
    say(
        f"{len(job.sources)} files, {human_bytes(sum(s.size for s in job.sources))}; "
        f"{job.tokenizer.kind} with {job.tokenizer.vocab_size} ids; {job.workers} workers"
    )
    if run.invocation.dry_run:
        return 0
    preprocess = config.preprocess
    if preprocess.find_optimal_num_workers:
        return _find_optimal(job)
    if preprocess.partition_index is not None:
        partitions.run_share(job, preprocess.partition_index, say)
        return 0
    if preprocess.launcher == "ray":
        partitions.run_on_ray(job, lambda index: partitions.run_share(_job(config), index, say))
    elif preprocess.partitions > 1 and not preprocess.merge_partitions:
        for index in range(preprocess.partitions):
            partitions.run_share(job, index, say)
    if preprocess.partitions > 1 or preprocess.launcher == "ray":
        counts = partitions.merge_shares(job)
    else:
        counts = encode_spans(job, whole(job.sources), preprocess.output_prefix)
    say(counts.summary())
    for line in partitions.describe(counts):
        say(line)
    say(f"report: {preprocess.output_prefix}_report.json")
    return 0


def _job(config: ToolConfig, check: Callable[[], None] = lambda: None) -> Job:
    if config.preprocess.launcher == "ray":
        partitions.import_ray()
    for name, value in library.use_threads(os.environ, 1).items():
        say(f"{name}={value} is set: a worker is a process with one thread")
    tokenizer = build_tokenizer(config.tokenizer)
    resolve_vocabulary(config.tokenizer, tokenizer.vocab_size)
    return prepare(config.preprocess, tokenizer, check)


def _find_optimal(job: Job) -> int:
    results = []
    for result in measure(job):
        say(
            f"{result.workers} workers: {result.records} records in {result.seconds:.2f} s, "
            f"{result.rate:.0f} records/s"
        )
        results.append(result)
    best = max(results, key=lambda result: result.rate)
    say(f"fastest: --workers {best.workers}")
    return 0


def say(text: str) -> None:
    """Print a line at once: the output may be a log file that somebody watches."""
    print(f"{PROGRAM}: {text}", flush=True)


class Stop:
    """Ends the program on a signal, after the block under way, so that nothing half-done stays.

    Raising in the handler itself could hit the moment between making a file and owning it, and is
    lost in callbacks of the interpreter; only a second signal does.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Be the handler of a signal."""
        if self.number is not None:
            sys.exit(128 + number)
        self.number = number

    def check(self) -> None:
        """Raise if a signal has come."""
        if self.number is not None:
            sys.exit(128 + self.number)


if __name__ == "__main__":
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.handle)
    run_main(lambda: main(check=stop.check), PROGRAM)
