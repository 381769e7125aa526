"""An encoder-decoder's samples of one corpus, from flags."""

import math
from typing import Protocol

from megatron.core.datasets.cache import IndexStore
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.gpt import GPTDataset, SampleOptions
from megatron.core.datasets.noise_shape import check_random_spans, noise_shape
from megatron.core.datasets.sentence_corpus import Joining, SentenceBuilder
from megatron.core.datasets.source import FEW_MOCK_ROWS, MockSource, TokenSource, by_document
from megatron.core.datasets.sources import SplitSource
from megatron.core.datasets.span_corruption import GEOMETRIC, NgramLimits
from megatron.core.datasets.stream_corpus import Cut, StreamBuilder
from megatron.core.datasets.t5 import NgramMasking, RandomMasking, T5Dataset, T5Options
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.utils import Say, UserError

FREE_PLACES = 2
"""Places of the encoder that texts of sentences leave free, as Megatron-core's do."""


class _Part(Protocol):
    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> T5Dataset: ...

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None: ...


class T5Maker:
    """Makes data sets of span corruption.

    Raises:
        UserError: the tokenizer lacks tokens, or the lengths do not go together.
    """

    def __init__(
        self,
        config: DataConfig,
        info: TokenInfo,
        seed: int,
        store: IndexStore,
        keep_partial: bool,
        say: Say,
    ) -> None:
        options = t5_options(config, info)
        self._text_ids = min(options.sentinels)
        self._part: _Part
        if config.t5.span_corruption == "ngrams":
            self._part = NgramMaker(config, info, seed, store, options, say)
        else:
            self._part = StreamMaker(config, info, seed, store, options, keep_partial, say)

    def mock(self) -> MockSource:
        """Return made-up rows, in which no sentinel stands."""
        return MockSource(self._text_ids, 0, FEW_MOCK_ROWS)

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> T5Dataset:
        """Return the data set of one split of one corpus."""
        return self._part.make(source, tokens, asked)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        return self._part.shortfall(source, tokens)


def t5_options(config: DataConfig, info: TokenInfo) -> T5Options:
    """Return how texts become samples under these flags.

    Raises:
        UserError: the tokenizer lacks sentinels, an end, or a token that the decoder begins with.
    """
    assert config.t5.decoder_seq_length is not None and info.tokenizer is not None
    special, kind = info.tokenizer.special, info.tokenizer.kind
    if not special.sentinels:
        raise UserError(
            f"span corruption needs sentinel tokens, but the {kind} has none (<extra_id_0>, "
            "<extra_id_1>, ...); --vocab-extra-ids 100 adds them, to any tokenizer but "
            "NullTokenizer and TikTokenizer"
        )
    if special.eos is None:
        raise UserError(
            f"an encoder-decoder's targets end with an end-of-sequence token, but the {kind} has "
            "none; give a tokenizer that has one"
        )
    begin = special.bos if special.bos is not None else special.pad
    if begin is None:
        raise UserError(
            "the decoder begins with the tokenizer's beginning-of-sequence token, or else with its "
            f"padding, but the {kind} has neither; give a tokenizer that has one of them: train it "
            "with tools/train_tokenizer.py --special-tokens '<pad>' '<s>', or write "
            '"pad_token": "<pad>" into the tokenizer_config.json of a HuggingFaceTokenizer '
            "(--tokenizer-model), which adds the token where the vocabulary lacks it; prepare the "
            "data with the same tokenizer"
        )
    return T5Options(
        encoder_seq_length=config.seq_length,
        decoder_seq_length=config.t5.decoder_seq_length,
        vocab_size=info.vocab_size,
        begin=begin,
        eos=special.eos,
        pad=0 if special.pad is None else special.pad,  # never looked at
        sentinels=special.sentinels,
        encoder_ends=config.t5.span_corruption == "random_spans",
    )


class NgramMaker:
    """Makes data sets of Megatron-LM's kind: n-grams of words in sentences of one document."""

    def __init__(
        self,
        config: DataConfig,
        info: TokenInfo,
        seed: int,
        store: IndexStore,
        options: T5Options,
        say: Say,
    ) -> None:
        self._seed, self._options = seed, options
        room = options.encoder_seq_length - FREE_PLACES
        self._limits = NgramLimits(
            mask_prob=config.masking.mask_prob,
            max_ngram=config.masking.masking_max_ngram,
            most_spans=len(options.sentinels),
            most_targets=options.decoder_seq_length - 1,
        )
        self._continues_word = info.tokenizer.continues_word()
        self._builder = SentenceBuilder(
            config, info, seed, store, Joining(kind="T5Dataset", room=room)
        )
        for line in tight_limits(room, self._limits):
            say(f"WARNING: {line}")

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> T5Dataset:
        """Return the data set of one split of one corpus."""
        texts = self._builder.build(source, tokens, asked)
        masking = NgramMasking(
            limits=self._limits,
            targets=texts.index.sample[:, 2],
            continues_word=self._continues_word,
            seed=self._seed,
        )
        return T5Dataset(texts, masking, self._options)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        return self._builder.shortfall(source, tokens)


def tight_limits(room: int, limits: NgramLimits) -> list[str]:
    """Return what keeps samples of full length from being masked as much as is asked for."""
    masked = max(1, round(room * limits.mask_prob))
    mean = (1 - (1 - GEOMETRIC) ** limits.max_ngram) / GEOMETRIC
    spans = math.ceil(masked / mean)
    text = f"--mask-prob {limits.mask_prob} of {room} tokens is {masked}, in about {spans} spans"
    lines = []
    if masked + spans > limits.most_targets:
        lines.append(
            f"{text}, which --decoder-seq-length ({limits.most_targets + 1}) has no room for: "
            f"fewer are masked; it takes {masked + spans + 1} or more"
        )
    if spans > limits.most_spans:
        lines.append(
            f"{text}, but the tokenizer has {limits.most_spans} sentinel tokens: fewer are masked; "
            f"give --vocab-extra-ids {spans} or more"
        )
    return lines


class StreamMaker:
    """Makes data sets of T5's kind: documents end to end, cut so that texts fill the encoder."""

    def __init__(
        self,
        config: DataConfig,
        info: TokenInfo,
        seed: int,
        store: IndexStore,
        options: T5Options,
        keep_partial: bool,
        say: Say,
    ) -> None:
        shape = noise_shape(config)
        length = shape.longest_text(options.encoder_seq_length)
        check_random_spans(config, len(options.sentinels))
        self._masking = RandomMasking(shape=shape, seed=seed)
        self._options = options
        self._text_options = SampleOptions(
            seq_length=length, vocab_size=options.vocab_size, extra=0
        )
        cut = Cut(
            tokens=length,
            extra=0,
            why=f"what fills --encoder-seq-length {options.encoder_seq_length} when "
            f"--mask-prob {shape.density} of it is masked",
            kind="T5StreamDataset",
            mock_kind="T5StreamDataset",
            keep_partial=keep_partial,
        )
        self._builder = StreamBuilder(config, info, seed, cut, store, say)

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> T5Dataset:
        """Return the data set of one split of one corpus."""
        documents = by_document(tokens)
        stream = self._builder.build(source, documents, asked)
        texts = GPTDataset(
            documents, stream.plan, stream.index, self._text_options, stream.description
        )
        return T5Dataset(texts, self._masking, self._options)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        return self._builder.shortfall(source, by_document(tokens))
