"""What a user says about samples whose words are masked, for an encoder alone."""

from megatron.core.config import Config, option


class BertDataConfig(Config):
    """Masked words: an encoder reads a text, and says what stood where words were masked."""

    masked_words: bool = option(False)
    """Samples are those of an encoder alone, BERT's. It is what pretrain_bert.py trains on, where
    it need not be given; tools that read a run's data want to be told."""

    bert_binary_head: bool = option(True, aliases={"--bert-no-binary-head": False})
    """Let samples have two parts of a document, in their order or swapped, and the model say which.
    Without it samples are of one part, and tokens have no types."""
