"""How well an encoder-decoder fills in masked spans of texts that it was not trained on.

    python tools/span_accuracy.py --load CHECKPOINTS [--samples 128]

Validation samples of the run are read by the encoder, and the decoder says the most probable token
each time. A masked token is right if the same one stands at the same place of what was said for its
mark. Beside it: how often the commonest of the masked tokens is right, said everywhere.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, check_at_least, option, specs
from megatron.core.datasets.builder import build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.grid import ParallelConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import UserError
from megatron.training import data_trace
from megatron.training.arguments import parse_tool, run_main
from megatron.training.processes.launch import discover

PROGRAM = "span_accuracy"
LIMIT = timedelta(minutes=10)
Text = Sequence[int]


class AccuracyConfig(Config):
    """Which model, and how much text."""

    load: str = option()
    """Folder of checkpoints of pretrain_t5.py, as given to --save."""

    samples: int = option(128)
    """Validation samples to fill in."""

    batch_size: int = option(32)
    """Samples at a time."""

    device: Literal["auto", "cpu", "cuda"] = option("auto")
    """Where to compute; ``auto`` is CUDA where there is a device, else the CPU."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "samples", "batch_size")


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


def held_out(
    values: dict[str, object], tokenizer: Tokenizer, count: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (what the encoder reads, what is wanted of the decoder, without eos)."""
    config = DataConfig.resolve(**{name: values[name] for name in specs(DataConfig)})
    seed = values["seed"]
    assert isinstance(seed, int)
    (dataset,) = build_datasets(config, (0, count, 0), TokenInfo.of(tokenizer), seed).valid
    for number in range(count):
        sample = dataset[number]
        encoder = sample["encoder_tokens"][sample["encoder_valid"]].tolist()
        yield encoder, sample["labels"][sample["loss_mask"] > 0].tolist()[:-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    config = parse_tool(argv, AccuracyConfig, PROGRAM).config
    launch = discover(os.environ)
    from megatron.core.inference.sampling import Sampling
    from megatron.training.checkpoints.source import stored_config
    from megatron.training.generation import Filler, connected, open_checkpoint

    alone = ParallelConfig.resolve()
    with connected(config, alone, launch, config.device, LIMIT, print) as processes:
        generator = open_checkpoint(config.load, None, processes, print)
        stored = stored_config(config.load, None)
        if not isinstance(generator, Filler) or stored is None:
            raise UserError(f"--load ({config.load}) is of no encoder-decoder (pretrain_t5.py)")
        sentinels = generator.tokenizer.special.sentinels
        values = data_trace.stored_values(stored)
        pairs = list(held_out(values, generator.tokenizer, config.samples))
        right = masked = 0
        for start in range(0, len(pairs), config.batch_size):
            batch = pairs[start : start + config.batch_size]
            results = generator.run(
                [encoder for encoder, _ in batch],
                max_new_tokens=max(len(wanted) for _, wanted in batch) + 1,
                sampling=Sampling(temperature=0.0),
                stop_tokens=generator.stop_tokens((), True),
            )
            for (_, wanted), (_, completion) in zip(batch, results, strict=True):
                one, of = right_tokens(completion.tokens, wanted, sentinels)
                right, masked = right + one, masked + of
    counts = Counter(i for _, wanted in pairs for i in wanted if i not in sentinels)
    token, commonest = counts.most_common(1)[0]
    print(
        f"{config.samples} validation samples: {right / masked:.1%} of {masked:,} masked tokens "
        f"are right; the commonest one ({generator.tokenizer.decode([token])!r}) everywhere: "
        f"{commonest / masked:.1%}, by chance: {1 / len(counts):.1%}"
    )
    return 0 if right > commonest else 1


if __name__ == "__main__":
    run_main(main, PROGRAM)
