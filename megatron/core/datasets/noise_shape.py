"""How much noise random spans make, in how many of them, and whether lengths have room for it.

Raffel et al. 2020, section 3.1.4; `span_corruption` says where the spans are. Plain Python, so that
flags can be checked before anything is read.
"""

from dataclasses import dataclass

from megatron.core.datasets.config import DataConfig
from megatron.core.utils import UserError


@dataclass(frozen=True, kw_only=True)
class NoiseShape:
    """How much noise there is, and in spans of which mean length."""

    density: float
    mean_span_length: float

    def counts(self, length: int) -> tuple[int, int]:
        """Return (noise tokens, spans) of a text of ``length`` tokens, at least two.

        At least one token is noise and one stays; there are no more spans than either.
        """
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(noise / self.mean_span_length), 1)
        return noise, min(spans, noise, length - noise)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the tokens (of encoder, of target) made of a text, each with its end token."""
        noise, spans = self.counts(length)
        return length - noise + spans + 1, noise + spans + 1

    def longest_text(self, encoder_length: int) -> int:
        """Return the longest text whose encoder tokens fit: 568 for T5's 512; 0 if none does."""
        text = 2
        if self.lengths(text)[0] > encoder_length:
            return 0
        while self.lengths(text + 1)[0] <= encoder_length:
            text += 1
        return text


def noise_shape(config: DataConfig) -> NoiseShape:
    """Return how much noise random spans make, and in spans of which length."""
    density, mean = config.masking.mask_prob, config.t5.mean_noise_span_length
    return NoiseShape(density=density, mean_span_length=mean)


def check_random_spans(config: DataConfig, sentinels: int | None) -> None:
    """Refuse lengths and numbers of sentinels that samples of random spans do not fit.

    Args:
        config: says that spans are random, and how long samples are.
        sentinels: how many the tokenizer has; None where nobody knows yet.

    Raises:
        UserError: an encoder or a decoder is too short, or there are too few sentinels.
    """
    decoder = config.t5.decoder_seq_length
    assert decoder is not None
    shape = noise_shape(config)
    length = shape.longest_text(config.seq_length)
    if not length:
        raise UserError(
            f"--encoder-seq-length ({config.seq_length}) is too short for a text of two "
            "tokens with --span-corruption random_spans; raise it"
        )
    _, targets = shape.lengths(length)
    _, spans = shape.counts(length)
    how = (
        f"--encoder-seq-length {config.seq_length}, --mask-prob {shape.density} and "
        f"--mean-noise-span-length {shape.mean_span_length} make texts of {length} tokens with "
        f"{spans} spans"
    )
    if targets > decoder:
        raise UserError(
            f"--decoder-seq-length ({decoder}) is too short: {how}, whose "
            f"targets are of {targets} tokens; give at least that"
        )
    if sentinels is not None and spans > sentinels:
        raise UserError(
            f"the tokenizer has {sentinels} sentinel tokens, but {how}; give "
            f"--vocab-extra-ids at least {spans}"
        )
