"""An encoder's samples of one corpus, from flags."""

from megatron.core.datasets.bert import FRAME, BertDataset, BertOptions
from megatron.core.datasets.cache import IndexStore
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.sentence_corpus import Joining, SentenceBuilder
from megatron.core.datasets.source import FEW_MOCK_ROWS, MockSource, TokenSource
from megatron.core.datasets.sources import SplitSource
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.datasets.word_masking import WordMasking
from megatron.core.utils import Say, UserError

NEEDED = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
STAND_INS = (1, 2, 3)


class BertMaker:
    """Makes data sets of masked words.

    Raises:
        UserError: the tokenizer lacks tokens.
    """

    def __init__(
        self, config: DataConfig, info: TokenInfo, seed: int, store: IndexStore, say: Say
    ) -> None:
        cls, sep, mask = special_ids(config, info, say)
        pad = info.tokenizer.special.pad
        self._seed = seed
        self._options = BertOptions(
            seq_length=config.seq_length,
            vocab_size=info.vocab_size,
            cls=cls,
            sep=sep,
            pad=0 if pad is None else pad,  # never looked at
            in_order=config.bert.bert_binary_head,
        )
        self._masking = WordMasking(
            mask_prob=config.masking.mask_prob,
            max_ngram=config.masking.masking_max_ngram,
            mask=mask,
            vocab_size=info.vocab_size,
            apart=(cls, sep),
            continues_word=info.tokenizer.continues_word(),
        )
        joining = Joining(
            kind="BERTDataset",
            room=text_room(config),
            min_sentences=2 if config.bert.bert_binary_head else 1,
            key={"classification_head": config.bert.bert_binary_head},
        )
        self._builder = SentenceBuilder(config, info, seed, store, joining)

    def mock(self) -> MockSource:
        """Return made-up rows."""
        return MockSource(self._options.vocab_size, self._options.sep, FEW_MOCK_ROWS)

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> BertDataset:
        """Return the data set of one split of one corpus."""
        texts = self._builder.build(source, tokens, asked)
        return BertDataset(texts, self._masking, self._options, self._seed)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        return self._builder.shortfall(source, tokens)


def text_room(config: DataConfig) -> int:
    """Return the tokens of a sample without those that frame it."""
    return config.seq_length - FRAME


def special_ids(config: DataConfig, info: TokenInfo, say: Say) -> tuple[int, int, int]:
    """Return the ids of [CLS], [SEP] and [MASK].

    Among made-up tokens some stand for those that the tokenizer lacks.

    Raises:
        UserError: the tokenizer lacks one of them.
    """
    special = info.tokenizer.special
    missing = [name for field, name in NEEDED.items() if getattr(special, field) is None]
    if missing and config.mock_data:
        say(
            f"made-up tokens {', '.join(map(str, STAND_INS))} stand for "
            f"{', '.join(NEEDED.values())}, of which the {info.tokenizer.kind} has no "
            f"{' and no '.join(missing)}"
        )
        return STAND_INS
    if missing:
        raise UserError(
            f"masked words need the tokens {', '.join(NEEDED.values())}, but the "
            f"{info.tokenizer.kind} has no {' and no '.join(missing)}; give a tokenizer that has "
            "them: BertWordPieceLowerCase or BertWordPieceCase with BERT's --vocab-file vocab.txt, "
            "a HuggingFaceTokenizer trained with tools/train_tokenizer.py --special-tokens '[CLS]' "
            "'[SEP]' '[MASK]', or a SentencePieceTokenizer with --tokenizer-sentencepiece-legacy, "
            "which adds them; prepare the data with the same tokenizer"
        )
    return special.cls, special.sep, special.mask
