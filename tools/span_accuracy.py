"""How well an encoder-decoder fills in masked spans of texts that it was not trained on.

    python tools/span_accuracy.py --load CHECKPOINTS [--samples 128]

Validation samples of the run are read by the encoder, and the decoder says the most probable token
each time. A masked token is right if the same one stands at the same place of what was said for its
mark. Beside it: how often the commonest of the masked tokens is right, said everywhere. Several
validation sets have a line each. Exit code 1, with a word on stderr: the model was not right more
often than the commonest tokens.

Data and tokenizer are those of the run; flags of either win, for other texts or files that have
moved.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, check_at_least, option, specs
from megatron.core.datasets.blended import Dataset
from megatron.core.datasets.builder import build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.grid import ParallelConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError
from megatron.training.arguments import parse_tool, run_main
from megatron.training.processes.launch import discover
from tools.inspect_dataset import given_values, stored_run

if TYPE_CHECKING:
    from megatron.training.generation import Filler

PROGRAM = "span_accuracy"
LIMIT = timedelta(minutes=10)
SOURCES = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"}
SOURCES |= {"per_split_data_args_path", "mock_data"}
Text = Sequence[int]


class AccuracyConfig(Config):
    """Which model, on how much of which text."""

    load: str = option()
    """Folder of checkpoints of pretrain_t5.py, as given to --save."""

    ckpt_step: int | None = option(None)
    """Iteration of the checkpoint; the newest complete one when absent."""

    samples: int = option(128)
    """Validation samples to fill in, of each validation set."""

    batch_size: int = option(32)
    """Samples at a time."""

    device: Literal["auto", "cpu", "cuda"] = option("auto")
    """Where to compute; ``auto`` is CUDA where there is a device, else the CPU."""

    seed: int = option(1234)
    """Seed of the samples; the run's unless given."""

    data: DataConfig
    tokenizer: TokenizerConfig

    def __post_init__(self) -> None:
        check_at_least(self, 1, "samples", "batch_size")
        if self.data.t5.decoder_seq_length is None:
            raise UserError(
                f"the run of --load ({self.load}) read no samples for an encoder and a decoder "
                "(pretrain_t5.py); for imported weights of one give --encoder-seq-length and "
                "--decoder-seq-length, how samples are masked (--span-corruption), and data"
            )


@dataclass
class Count:
    """Masked tokens of some samples."""

    samples: int = 0
    right: int = 0
    masked: Counter[int] = field(default_factory=Counter)

    def add(self, said: Text, wanted: Text, sentinels: Sequence[int]) -> None:
        """Count one sample."""
        self.samples += 1
        self.right += right_tokens(said, wanted, sentinels)[0]
        self.masked.update(token for token in wanted if token not in sentinels)

    @property
    def commonest(self) -> int:
        """How often the commonest masked token is right."""
        return max(self.masked.values(), default=0)

    def line(self, tokenizer: Tokenizer) -> str:
        """Return the count in words."""
        total = self.masked.total()
        if not total:
            return f"{self.samples} validation samples: no token is masked"
        token = max(self.masked, key=lambda token: self.masked[token])
        return (
            f"{self.samples} validation samples: {self.right / total:.1%} of {total:,} masked "
            f"tokens are right; the commonest one ({tokenizer.decode([token])!r}) everywhere: "
            f"{self.commonest / total:.1%}, by chance: {1 / len(self.masked):.1%}"
        )


def spans_of(said: Text, sentinels: Sequence[int]) -> dict[int, list[int]]:
    """Return what a decoder says for each mark; of a mark that comes again, the first counts.

    >>> spans_of([90, 5, 6, 91, 7], [90, 91, 92])
    {90: [5, 6], 91: [7]}
    """
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in said:
        if token in sentinels:
            current = []
            spans.setdefault(token, current)
        else:
            current.append(token)
    return spans


def right_tokens(said: Text, wanted: Text, sentinels: Sequence[int]) -> tuple[int, int]:
    """Return (masked tokens that were said right, masked tokens) of a sample.

    >>> right_tokens([90, 5, 6, 91, 8], [90, 5, 7, 91, 8, 9], [90, 91, 92])
    (2, 4)
    """
    found = spans_of(said, sentinels)
    right = masked = 0
    for mark, span in spans_of(wanted, sentinels).items():
        masked += len(span)
        right += sum(a == b for a, b in zip(found.get(mark, ()), span, strict=False))
    return right, masked


def held_out(dataset: Dataset, count: int) -> list[tuple[list[int], list[int]]]:
    """Return (what the encoder reads, what is wanted of the decoder, without eos) of samples."""
    pairs = []
    for number in range(min(count, len(dataset))):
        sample = dataset[number]
        encoder = sample["encoder_tokens"][sample["encoder_valid"]].tolist()
        pairs.append((encoder, sample["labels"][sample["loss_mask"] > 0].tolist()[:-1]))
    return pairs


def read_flags(argv: Sequence[str] | None) -> tuple[AccuracyConfig, dict[str, Any]]:
    """Return what was asked, the run's values where nothing was, and given tokenizer settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    declared, base = specs(AccuracyConfig), dict[str, Any]()
    given = given_values(words, declared)
    if "load" in given:
        base = {name: v for name, v in stored_run(given).items() if name in declared}
    if SOURCES & given.keys():  # other data: not beside the run's own
        base = {name: v for name, v in base.items() if name not in SOURCES | {"split"}}
    parsed = parse_tool(words, AccuracyConfig, PROGRAM, base=base)
    flat = parsed.config.tokenizer.flatten()
    return parsed.config, {n: v for n, v in flat.items() if parsed.origins[n] in ("flag", "file")}


def measure(generator: "Filler", dataset: Dataset, config: AccuracyConfig) -> Count:
    """Fill in samples and return what was right."""
    from megatron.core.inference.sampling import Sampling

    count, pairs = Count(), held_out(dataset, config.samples)
    for start in range(0, len(pairs), config.batch_size):
        batch = pairs[start : start + config.batch_size]
        results = generator.run(
            [encoder for encoder, _ in batch],
            max_new_tokens=max(len(wanted) for _, wanted in batch) + 1,
            sampling=Sampling(temperature=0.0),
            stop_tokens=generator.stop_tokens((), True),
        )
        for (_, wanted), (_, completion) in zip(batch, results, strict=True):
            count.add(completion.tokens, wanted, generator.tokenizer.special.sentinels)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    config, tokenizer = read_flags(argv)
    launch = discover(os.environ)
    from megatron.training.generation import Filler, connected, open_checkpoint

    alone = ParallelConfig.resolve()
    with connected(config, alone, launch, config.device, LIMIT, print) as processes:
        generator = open_checkpoint(
            config.load, config.ckpt_step, processes, print, tokenizer_overrides=tokenizer
        )
        if not isinstance(generator, Filler):
            raise UserError(f"--load ({config.load}) is of no encoder-decoder (pretrain_t5.py)")
        info = TokenInfo.of(generator.tokenizer)
        built = build_datasets(config.data, (0, config.samples, 0), info, config.seed)
        counts = []
        for name, dataset in zip(built.valid_names, built.valid, strict=True):
            counts.append(measure(generator, dataset, config))
            named = f"{name}: " if len(built.valid) > 1 else ""
            print(named + counts[-1].line(generator.tokenizer))
    right, masked, commonest = (
        sum(numbers)
        for numbers in zip(*((c.right, c.masked.total(), c.commonest) for c in counts), strict=True)
    )
    if not masked:
        share = config.data.masking.mask_prob
        raise UserError(
            f"no token of the {sum(c.samples for c in counts)} validation samples is masked, so "
            f"nothing can be said right; give a larger --mask-prob ({share}), "
            "more --samples, or other data (--valid-data-path)"
        )
    if right > commonest:
        return 0
    print(
        f"{PROGRAM}: not ahead of the commonest token, which is right {commonest:,} times of "
        f"{masked:,}, the model {right:,} times; train longer",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    run_main(main, PROGRAM)
