"""Generate text from a checkpoint: one prompt, a file of prompts, or a conversation line by line.

    tools/generate_text.py --load CHECKPOINTS --prompt "To be, or" --num-tokens-to-generate 100
    tools/generate_text.py --load CHECKPOINTS --prompt-file prompts.txt --output out.jsonl
    tools/generate_text.py --load CHECKPOINTS                  (interactive: one prompt per line)
    torchrun --nproc-per-node 2 tools/generate_text.py --tensor-model-parallel-size 2 --load ...

An encoder-decoder (pretrain_t5.py) fills in the marks of its prompts:

    tools/generate_text.py --load CHECKPOINTS --prompt "To be, or <extra_id_0> to be"

Architecture and tokenizer come from the checkpoint; name the tokenizer's files where they moved.
Several processes share one copy of the model, in a layout of their own; the first one reads and
prints.
"""

import functools
import json
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, check_at_least, option
from megatron.core.grid import ParallelConfig
from megatron.core.utils import UserError, atomic_path, check_file, silent
from megatron.training.arguments import parse_tool, run_main
from megatron.training.processes.launch import discover

if TYPE_CHECKING:  # torch is imported when the flags are in order: --help does without
    from megatron.core.inference.sampling import Sampling
    from megatron.training.generation import Generator, Processes

PROGRAM = "generate_text"
ROUND = 10.0
"""Seconds of a conversation's silence after which the others hear that the first one is there."""


class GenerateConfig(Config):
    """What to generate, from which model."""

    parallel: ParallelConfig

    load: str = option()
    """Folder of checkpoints, as given to --save."""

    ckpt_step: int | None = option(None)
    """Iteration to take; the newest when absent."""

    prompt: tuple[str, ...] | None = option(None, may_be_empty=True)
    """Prompts, together in one batch: to continue or, by an encoder-decoder, to fill in at marks
    <extra_id_0>, <extra_id_1> and so on."""

    prompt_file: str | None = option(None, metavar="FILE")
    """File with one prompt per line."""

    num_tokens_to_generate: int = option(100, aliases=("--max-new-tokens",))
    """Tokens to add to each prompt at the most."""

    num_samples: int = option(1)
    """Continuations of each prompt, or ways to fill it in."""

    temperature: float = option(1.0)
    """Divides the logits; 0 takes the most probable token."""

    top_k: int = option(0)
    """Draw from this many most probable tokens; 0 from all."""

    top_p: float = option(0.0)
    """Draw from the most probable tokens that reach this probability; 0 from all."""

    stop_token: tuple[str, ...] = option(())
    """End a text with any of these, each a single token."""

    stop_at_eod: bool = option(True, aliases={"--ignore-eod": False})
    """End a text at the end of its document."""

    seed: int = option(1234)
    """Seed of the sampling."""

    kv_cache: bool = option(True)
    """Keep keys and values of earlier tokens; without, each step reads the whole text again."""

    output: str | None = option(None, metavar="FILE")
    """Write one JSON object per text instead of printing."""

    device: Literal["auto", "cpu", "cuda"] = option("auto")
    """Where to compute; ``auto`` is CUDA where there is a device, else the CPU."""

    distributed_timeout_minutes: int = option(10)
    """Minutes that processes wait for each other."""

    tokenizer_model: str | None = option(None)
    """Tokenizer model, when it is no longer where training found it."""

    vocab_file: str | None = option(None)
    """Vocabulary file, likewise."""

    merge_file: str | None = option(None)
    """Merge file, likewise."""

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("--prompt and --prompt-file exclude each other; give one")
        check_at_least(
            self, 1, "num_tokens_to_generate", "num_samples", "distributed_timeout_minutes"
        )
        check_at_least(self, 0, "seed")


def prompts_of(config: GenerateConfig) -> list[str] | None:
    """Return the prompts that the flags name; None asks for a conversation.

    Raises:
        UserError: the file is missing, no text, or empty.
    """
    if config.prompt is not None:
        return list(config.prompt)
    if config.prompt_file is None:
        return None
    try:
        text = Path(config.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt-file {config.prompt_file}: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"--prompt-file {config.prompt_file} has no prompts")
    return lines


def sampling_of(config: GenerateConfig) -> "Sampling":
    """Return how tokens are drawn.

    Raises:
        UserError: a flag of it has a value that makes no sense.
    """
    from megatron.core.inference.sampling import Sampling

    return Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)


def answer(
    generator: "Generator", config: GenerateConfig, prompts: list[str], prints: bool
) -> Iterator[dict[str, object]]:
    """Continue every prompt and yield one record per text; a single text appears as it grows.

    A collective of the processes; one of them ``prints``.
    """
    repeated = [prompt for prompt in prompts for _ in range(config.num_samples)]
    prints = prints and config.output is None
    live = prints and len(repeated) == 1 and sys.stdout.isatty() and generator.streams
    if live:
        print(repeated[0], end="", flush=True)
    results = generator.run(
        [generator.encode(prompt) for prompt in repeated],
        max_new_tokens=config.num_tokens_to_generate,
        sampling=sampling_of(config),
        stop_tokens=generator.stop_tokens(config.stop_token, config.stop_at_eod),
        seed=config.seed,
        use_cache=config.kv_cache,
        stream=(lambda _, text: print(text, end="", flush=True)) if live else None,
    )
    if live:
        print()
    for prompt, (text, completion) in zip(repeated, results, strict=True):
        if prints and not live:
            print(generator.shown(prompt, text))
            if len(repeated) > 1:
                print("-" * 40)
        yield {
            "prompt": prompt,
            "text": text,
            "tokens": completion.tokens,
            "log_probabilities": completion.log_probabilities,
            "finish": completion.finish,
        }


class Lines:
    """Lines of a file that is being written, each as soon as it is there."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._rest = file, b""

    def next(self, seconds: float) -> str | None:
        """Return the next line, an empty one at the end; None if none comes for ``seconds``."""
        descriptor = self._file.fileno()  # below Python's buffer, in which `select` sees nothing
        while b"\n" not in self._rest:
            if not select.select([descriptor], [], [], seconds)[0]:
                return None
            data = os.read(descriptor, 1 << 16)
            if not data:
                break
            self._rest += data
        line, end, self._rest = self._rest.partition(b"\n")
        return (line + end).decode(self._file.encoding, self._file.errors or "strict")


def converse(generator: "Generator", config: GenerateConfig, processes: "Processes") -> None:
    """Continue one prompt per line until the first process's input ends.

    People take their time, and processes wait for each other only so long: while no line comes, the
    others are told that, time and again, so that one that is gone is missed.
    """
    from megatron.training.processes.rank_zero import from_first

    first = processes.world.coordinate == 0
    read: Callable[[], str | None] = sys.stdin.readline
    if processes.world.size > 1:
        read = functools.partial(Lines(sys.stdin).next, ROUND)
    if first and sys.stdin.isatty():
        print("one prompt per line; end with Ctrl-D", file=sys.stderr)
    while (line := from_first(processes.world, read)) != "":
        if line is not None and (prompt := line.rstrip("\n")):
            try:
                list(answer(generator, config, [prompt], first))
            except UserError as error:  # the same on all: they have the same prompt
                if first:
                    print(f"{PROGRAM}: {error}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    config = parse_tool(argv, GenerateConfig, PROGRAM).config
    launch = discover(os.environ)
    from megatron.training.generation import connected, open_checkpoint
    from megatron.training.processes.rank_zero import from_first

    sampling_of(config)  # a wrong flag is told before the model is read
    first = launch.rank == 0
    say = (lambda line: print(line, file=sys.stderr)) if first else silent
    if config.parallel.sequence_parallel:
        say("--sequence-parallel has no effect: one token at a time is read")
    limit = timedelta(minutes=config.distributed_timeout_minutes)
    with connected(config, config.parallel, launch, config.device, limit, say) as processes:
        prompts = from_first(processes.world, lambda: prepared(config))
        files = ("tokenizer_model", "vocab_file", "merge_file")
        generator = open_checkpoint(
            config.load,
            config.ckpt_step,
            processes,
            say,
            tokenizer_overrides={file: getattr(config, file) for file in files},
        )
        if prompts is None:
            converse(generator, config, processes)
            return 0
        records = list(answer(generator, config, prompts, first))
    if first and config.output is not None:
        with atomic_path(config.output) as path:
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


def prepared(config: GenerateConfig) -> list[str] | None:
    """Return the prompts as `prompts_of` does, when the place for the output is in order too."""
    if config.output is not None:
        check_file("--output", config.output)
    return prompts_of(config)


if __name__ == "__main__":
    run_main(main, PROGRAM)
