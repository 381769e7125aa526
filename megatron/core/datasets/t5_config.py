"""What a user says about samples whose spans are masked, for an encoder and a decoder."""

from typing import Literal

from megatron.core.config import Config, check_at_least, option


class T5DataConfig(Config):
    """Span corruption: an encoder reads a text without some spans, a decoder says them."""

    decoder_seq_length: int | None = option(None)
    """Tokens that the decoder reads of a sample. Given, samples are those of an encoder-decoder,
    whose encoder reads --seq-length tokens."""

    span_corruption: Literal["ngrams", "random_spans"] = option("ngrams")
    """How spans are chosen: ``ngrams`` of whole words within sentences of one document
    (Megatron-LM's), or ``random_spans`` of documents end to end (T5's)."""

    mean_noise_span_length: float = option(3.0)
    """Mean tokens of a span, under --span-corruption random_spans."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "mean_noise_span_length")
        check_at_least(self, 3, "decoder_seq_length")  # begin, a sentinel, a token
