"""What a user says about how much of a sample is masked, whatever reads it."""

from megatron.core.config import Config, check_at_least, flag_of, option
from megatron.core.utils import UserError


class MaskingConfig(Config):
    """Masked tokens: of samples for an encoder and a decoder, and for an encoder alone."""

    mask_prob: float = option(0.15)
    """Share of the tokens that is masked."""

    short_seq_prob: float = option(0.1)
    """Share of the samples that are made shorter, under --span-corruption ngrams or
    --masked-words: one in round(1 / X), so 0.4 is a third, above two thirds all, and 0 none."""

    masking_max_ngram: int = option(derived="10, or 3 with --masked-words")
    """Words of a span at most, under --span-corruption ngrams or --masked-words."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "masking_max_ngram")
        if not 0 < self.mask_prob < 1:
            raise UserError(f"{_flag('mask_prob')} ({self.mask_prob}) must be above 0 and below 1")
        if not 0 <= self.short_seq_prob <= 1:
            raise UserError(
                f"{_flag('short_seq_prob')} ({self.short_seq_prob}) must be between 0 and 1"
            )


def _flag(name: str) -> str:
    return flag_of(MaskingConfig, name)
