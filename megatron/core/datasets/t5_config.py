"""What a user says about samples whose spans are masked, for an encoder and a decoder.

Shares and n-grams are also those of `bert_config`'s samples.
"""

from typing import Literal

from megatron.core.config import Config, check_at_least, flag_of, option
from megatron.core.utils import UserError


class T5DataConfig(Config):
    """Span corruption: an encoder reads a text without some spans, a decoder says them."""

    decoder_seq_length: int | None = option(None)
    """Tokens that the decoder reads of a sample. Given, samples are those of an encoder-decoder,
    whose encoder reads --seq-length tokens."""

    span_corruption: Literal["ngrams", "random_spans"] = option("ngrams")
    """How spans are chosen: ``ngrams`` of whole words within sentences of one document
    (Megatron-LM's), or ``random_spans`` of documents end to end (T5's)."""

    mask_prob: float = option(0.15)
    """Share of the tokens that is masked."""

    short_seq_prob: float = option(0.1)
    """Share of the samples that are made shorter, under --span-corruption ngrams or
    --masked-words."""

    masking_max_ngram: int = option(derived="10, or 3 with --masked-words")
    """Words of a span at most, under --span-corruption ngrams or --masked-words."""

    mean_noise_span_length: float = option(3.0)
    """Mean tokens of a span, under --span-corruption random_spans."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "masking_max_ngram", "mean_noise_span_length")
        check_at_least(self, 3, "decoder_seq_length")  # begin, a sentinel, a token
        if not 0 < self.mask_prob < 1:
            raise UserError(f"{_flag('mask_prob')} ({self.mask_prob}) must be above 0 and below 1")
        if not 0 <= self.short_seq_prob <= 1:
            raise UserError(
                f"{_flag('short_seq_prob')} ({self.short_seq_prob}) must be between 0 and 1"
            )


def _flag(name: str) -> str:
    return flag_of(T5DataConfig, name)
