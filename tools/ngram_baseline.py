"""Loss of a unigram and a bigram model on a corpus: what a language model must beat.

    python tools/ngram_baseline.py --data-path PREFIX --split 90,10 --vocab-size 4096

Both are counted on the training share and measured on the validation share that a training run with
the same ``--split`` uses, in nats per token. The unigram model adds one to every count; the bigram
model mixes its shares with the unigram's by the weight that suits the validation share best, so it
is the strongest bigram of this kind.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt

from megatron.core.config import Config, check_at_least, option
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.split import rows_of, split_matrix
from megatron.core.utils import UserError
from megatron.training.arguments import parse_tool, run_main

PROGRAM = "ngram_baseline"

Ids = npt.NDArray[np.int64]


def tokens_of(dataset: IndexedDataset, rows: tuple[int, int]) -> Ids:
    """Return the tokens of a range of rows, one after the other."""
    parts = [dataset.get(row) for row in range(*rows)]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def unigram_chances(train: Ids, vocab_size: int) -> npt.NDArray[np.float64]:
    """Return each token's probability, one added to every count."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return counts / counts.sum()


def bigram_loss(train: Ids, valid: Ids, unigram: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the loss of the best mixture of bigram and unigram, and the bigram's weight."""
    size = len(unigram)
    pairs, counts = np.unique(train[:-1] * size + train[1:], return_counts=True)
    firsts = np.maximum(np.bincount(train[:-1], minlength=size), 1)
    wanted = valid[:-1] * size + valid[1:]
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place], 0)
    bigram = seen / firsts[valid[:-1]]
    losses = {
        weight: float(-np.log(weight * bigram + (1 - weight) * unigram[valid[1:]]).mean())
        for weight in np.linspace(0.02, 0.98, 49)
    }
    best = min(losses, key=lambda weight: losses[weight])
    return losses[best], float(best)


def baselines(prefix: str, split: str, vocab_size: int) -> dict[str, float]:
    """Return both losses on the validation share.

    Raises:
        UserError: a share is empty, or the corpus has ids beyond the vocabulary.
    """
    dataset = IndexedDataset(prefix)
    shares = split_matrix(split)[:2]
    if shares[0] is None or shares[1] is None:
        raise UserError(f"--split {split} leaves training or validation without a share")
    train, valid = (tokens_of(dataset, rows_of(share, len(dataset))) for share in shares if share)
    if min(len(train), len(valid)) < 2:
        raise UserError(
            f"{prefix} with --split {split} has {len(train)} training and {len(valid)} validation "
            "tokens; both need at least 2"
        )
    largest = int(max(train.max(), valid.max()))
    if largest >= vocab_size:
        raise UserError(f"{prefix} holds token {largest}; --vocab-size is {vocab_size}")
    unigram = unigram_chances(train, vocab_size)
    loss, weight = bigram_loss(train, valid, unigram)
    return {
        "unigram": float(-np.log(unigram[valid]).mean()),
        "bigram": loss,
        "bigram_weight": weight,
        "train_tokens": len(train),
        "valid_tokens": len(valid),
    }


def last_validation_loss(metrics: str) -> float:
    """Return the last validation loss of a metrics file.

    Raises:
        UserError: it has none, or cannot be read.
    """
    try:
        lines = Path(metrics).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UserError(f"--metrics-file {metrics} cannot be read: {error}") from None
    losses = [row["lm_loss"] for row in rows if row.get("split") == "valid"]
    if not losses:
        raise UserError(f"--metrics-file {metrics} has no validation rows")
    return float(losses[-1])


class BaselineConfig(Config):
    """What to measure, and what to compare with."""

    data_path: str = option(metavar="PREFIX")
    """Prefix of a .bin/.idx pair."""

    split: str = option()
    """The run's --split."""

    vocab_size: int = option()
    """Ids of the tokenizer."""

    metrics_file: str | None = option(None, metavar="FILE")
    """Metrics of a run to compare with; the exit code is 1 when it does not beat both models."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "vocab_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0, or 1 when a given run does not beat both models.

    Raises:
        UserError: something that the user can fix.
    """
    config = parse_tool(argv, BaselineConfig, PROGRAM).config
    found = baselines(config.data_path, config.split, config.vocab_size)
    rows = {"unigram": found["unigram"], "bigram": found["bigram"]}
    if config.metrics_file:
        rows["this run"] = last_validation_loss(config.metrics_file)
    print(f"validation loss over {found['valid_tokens']:,} tokens (nats per token):")
    for name, loss in rows.items():
        print(f"  {name:<10} {loss:.4f}   perplexity {np.exp(loss):10.1f}")
    behind = "this run" in rows and rows["this run"] >= min(rows["unigram"], rows["bigram"])
    if behind:
        print("this run does not beat both models: the exit code is 1")
    return int(behind)


if __name__ == "__main__":
    run_main(main, PROGRAM)
