"""An encoder alone: what makes it another model than a decoder."""

from collections.abc import Mapping
from typing import Any

from megatron.core.config import Config, option


class BertConfig(Config):
    """BERT (Devlin et al., 2019): attention both ways, heads for masked words and their order."""

    encoder_alone: bool = option(derived="true with --masked-words")
    """The model is an encoder alone: a token attends to all of its sample, and what is said are
    masked words."""

    sentence_order_head: bool = option(
        derived="true with --masked-words, unless --bert-no-binary-head"
    )
    """Tokens have one of two types, and a head says from a sample's first token whether its two
    parts are in order."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the model be one for the samples."""
        alone = bool(values.get("masked_words"))
        has_order = alone and bool(values.get("bert_binary_head", True))
        return {"encoder_alone": alone, "sentence_order_head": has_order}

    @property
    def token_types(self) -> int:
        """Return how many types of tokens there are vectors for."""
        return TOKEN_TYPES if self.sentence_order_head else 0

    @property
    def loss_weights(self) -> dict[str, float]:
        """Return the weight of the loss besides that of masked words, by the name of logs."""
        return {ORDER_LOSS: 1.0} if self.sentence_order_head else {}


TOKEN_TYPES = 2
ORDER_LOSS = "sop loss"
"""Megatron-LM's name for it (sentence order prediction)."""
