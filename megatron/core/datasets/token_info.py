"""What data sets need to know of a tokenizer, and whether a corpus was made with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.gpt import SampleOptions
from megatron.core.datasets.sidecar import are_alike, read_json, sidecar_path
from megatron.core.utils import UserError


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """What samples depend on of the tokenizer."""

    vocab_size: int
    eod: int | None = None
    pad: int | None = None
    eos: int | None = None
    identifiers: Mapping[str, Any] = field(default_factory=dict)
    """Part of the cache key."""
    fingerprint: str | None = None
    """Compared with what the corpus says it was made with; None compares nothing."""
    without_sentinels: str | None = None
    """The same, whatever sentinels were added."""
    tokenizer: Any = field(default=None, compare=False, repr=False)
    """The tokenizer itself, for data sets that work on text."""

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return what a tokenizer says; its fingerprints are methods, the rest are values."""
        return cls(
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            pad=tokenizer.pad,
            eos=tokenizer.eos,
            identifiers=dict(tokenizer.unique_identifiers),
            fingerprint=tokenizer.fingerprint(),
            without_sentinels=tokenizer.without_sentinels(),
            tokenizer=tokenizer,
        )


def sample_options(config: DataConfig, info: TokenInfo, extra: int = 1) -> SampleOptions:
    """Return how samples are made under these flags."""
    # Padding that doubles as another token cannot be told from it: then only position masks.
    pad = None if info.pad in (info.eod, info.eos) else info.pad
    return SampleOptions(
        seq_length=config.seq_length,
        vocab_size=info.vocab_size,
        eod=info.eod,
        pad=pad,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        extra=extra,
    )


def check_tokenizer(prefix: str, info: TokenInfo) -> None:
    """Refuse a corpus whose note names another tokenizer than the run's.

    Tokenizers that differ in the sentinels added to them give texts equal ids. A corpus without a
    note (made by other tools) passes: its tokens are checked as they are read.

    Raises:
        UserError: the fingerprints differ, or the note is damaged.
    """
    path = sidecar_path(prefix)
    if info.fingerprint is None or not path.is_file():
        return
    tokenizer = read_json(path).get("tokenizer")
    if not isinstance(tokenizer, dict) or "fingerprint" not in tokenizer:
        return
    mine = {"fingerprint": info.fingerprint}
    if info.without_sentinels is not None:
        mine["without_sentinels"] = info.without_sentinels
    if not are_alike(tokenizer, mine):
        raise UserError(
            f"{prefix} was made with another tokenizer than this run's: {path} says "
            f"{tokenizer.get('type', '?')} with {tokenizer.get('vocab_size', '?')} ids, "
            f"fingerprint {tokenizer['fingerprint']}; the run has {info.vocab_size} ids, "
            f"fingerprint {info.fingerprint}. Use the corpus' tokenizer, or run "
            "tools/preprocess_data.py again; --ignore-tokenizer-mismatch goes on regardless"
        )
