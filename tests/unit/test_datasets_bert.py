"""An encoder's samples from flags: what they are made of, masks, odd documents, wrong settings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.bert import BertDataset
from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.builder import Built, Sizes, build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.gpt import Sample
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.plan import describe
from megatron.core.datasets.source import FileSource
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.datasets.trace import trace
from megatron.core.kernels.attention import Packing
from megatron.core.tokenizers.byte_level import ByteLevelTokenizer
from megatron.core.utils import UserError
from megatron.training.batches import PADDING, UNKNOWN, Batches
from tests.unit import tokenizer_files as files

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += [f"##p{i}" if i % 3 == 0 else f"w{i}" for i in range(5, 120)]
PAD, CLS, SEP, MASK = 0, 2, 3, 4
SEQ = 48


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> TokenInfo:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(PIECES))
    return TokenInfo.of(files.build(vocab_file=str(path)))


def corpus(prefix: Path, documents: list[list[list[int]]]) -> str:
    """Write documents of sentences."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in documents:
            builder.add_document([i for part in document for i in part], [*map(len, document)])
        builder.finalize()
    return str(prefix)


def sentences(seed: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 120, random.integers(3, 20)).tolist() for _ in range(count)]


@pytest.fixture
def a(tmp_path: Path) -> str:
    return corpus(tmp_path / "a", [sentences(i, 2 + i % 9) for i in range(60)])


def build(sizes: Sizes, info: TokenInfo, said: list[str] | None = None, **flags: Any) -> Built:
    given = {"seq_length": SEQ, "masked_words": True, **flags}
    say = (lambda line: None) if said is None else said.append
    return build_datasets(DataConfig.resolve(**given), sizes, info, 5, say=say)


def train(info: TokenInfo, asked: int | None = 200, **flags: Any) -> BertDataset:
    dataset = build((asked, 0, 0), info, **{"split": "1", **flags}).train
    assert isinstance(dataset, BertDataset)
    return dataset


def framed(sample: Sample) -> list[int]:
    """Return the framed text before it was masked."""
    whole = np.where(sample["loss_mask"] > 0, sample["labels"], sample["tokens"])
    return whole[: int(sample["cu_seqlens"][1])].tolist()  # type: ignore[no-any-return]


def parts(sample: Sample) -> list[list[int]]:
    """Return the one or two parts of a sample's text; no sentence here holds a [SEP]."""
    words = framed(sample)
    assert words[0] == CLS and words[-1] == SEP
    ends = [i for i, word in enumerate(words) if word == SEP]
    starts = [1, *(end + 1 for end in ends)]
    return [words[start:end] for start, end in zip(starts, ends, strict=False)]


def is_run_of(part: list[int], text: list[int]) -> int:
    """Return where a part stands in a text."""
    places = [i for i in range(len(text)) if text[i : i + len(part)] == part]
    assert places, (part, text)
    return places[0]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_sample_is_runs_of_its_sentences_framed(a: str, info: TokenInfo, in_order: bool) -> None:
    """Put the labels back, and there are runs of the document, in the order that is told."""
    dataset = train(info, data_path=(a,), bert_binary_head=in_order)
    swapped = []
    for i in range(len(dataset)):
        sample, text = dataset[i], dataset.text(i).tolist()
        names = {"tokens", "token_types", "labels", "loss_mask", "cu_seqlens"}
        assert set(sample) == names | ({"sentence_order"} if in_order else set())
        found = parts(sample)
        assert len(found) == 1 + in_order and all(found)
        where = [is_run_of(part, text) for part in found]
        assert sum(map(len, found)) <= min(dataset.texts.target(i), SEQ - 3)
        if in_order:
            assert (where[1] < where[0]) == bool(sample["sentence_order"])
            swapped.append(int(sample["sentence_order"]))
        types = [0] * (2 + len(found[0])) + [1] * (sum(map(len, found[1:])) + in_order)
        assert sample["token_types"].tolist() == types + [0] * (SEQ - len(types))
        _, count, end = sample["cu_seqlens"].tolist()
        assert (count, end) == (len(types), SEQ) and set(sample["tokens"][count:]) <= {PAD}
        assert not sample["loss_mask"][count:].any()
        assert not sample["labels"][sample["loss_mask"] == 0].any()
        dtypes = {name: array.dtype.name for name, array in sample.items()}
        assert dtypes["tokens"] == dtypes["labels"] == "int64"
        assert dtypes["loss_mask"] == "float32" and dtypes["cu_seqlens"] == "int32"
    if in_order:
        assert 0.35 < np.mean(swapped) < 0.65


def test_most_masked_tokens_become_the_mask(a: str, info: TokenInfo) -> None:
    """80 % the mask, 10 % a random token, 10 % themselves; up to 15 % of the tokens in all."""
    dataset = train(info, 3000, data_path=(a,), short_seq_prob=0.0)
    mask = same = other = tokens = 0
    drawn = set()
    for i in range(3000):
        sample = dataset[i]
        at = sample["loss_mask"] > 0
        seen, labels = sample["tokens"][at], sample["labels"][at]
        mask += int((seen == MASK).sum())
        same += int((seen == labels).sum())
        others = seen[(seen != MASK) & (seen != labels)]
        other += len(others)
        drawn |= set(others.tolist())
        tokens += int(sample["cu_seqlens"][1])
    whole = mask + same + other
    assert 0.12 < whole / tokens < 0.155  # what is left is too little for some words
    assert mask / whole == pytest.approx(0.8, abs=0.02)
    assert other / whole == pytest.approx(0.1, abs=0.02)
    assert same / whole == pytest.approx(0.1, abs=0.02)
    assert min(drawn) < 5 and max(drawn) >= info.vocab_size - 3  # of the whole vocabulary


def test_whole_words_are_masked(a: str, info: TokenInfo) -> None:
    """A piece that goes on with a word is masked if and only if the piece before is."""
    dataset = train(info, data_path=(a,), bert_binary_head=False, mask_prob=0.4)
    continues = info.tokenizer.continues_word()
    for i in range(200):
        sample = dataset[i]
        masked = (sample["loss_mask"] > 0)[1:]
        words = framed(sample)[1:-1]
        for k in range(1, len(words)):
            if continues[words[k]]:
                assert masked[k] == masked[k - 1]


def test_without_word_pieces_each_token_is_a_word(tmp_path: Path) -> None:
    class Framed(ByteLevelTokenizer):
        pass

    tokenizer = Framed(("<eos>", "<pad>", "<cls>", "<sep>", "<mask>"))
    special = type(tokenizer.special)(eod=256, pad=257, cls=258, sep=259, mask=260)
    tokenizer.special = special
    info = TokenInfo.of(tokenizer)
    prefix = corpus(tmp_path / "b", [[[65, 66, 67] * 9, [68] * 20]] * 20)
    dataset = train(info, 40, data_path=(prefix,), short_seq_prob=0.0)
    for i in range(40):
        assert 1 <= dataset[i]["loss_mask"].sum() <= round(SEQ * 0.15)


@pytest.mark.parametrize("in_order", [True, False])
def test_short_empty_and_over_long_documents(
    tmp_path: Path, info: TokenInfo, in_order: bool
) -> None:
    """Empty sentences count for nothing, long ones are cut; one sentence has no second part."""
    documents = [[[7]], [], [[], []], [[8] * 200], [[9], [], [10]], [[11] * 5, [12] * 90]]
    prefix = corpus(tmp_path / "odd", documents)
    flags = {"data_path": (prefix,), "short_seq_prob": 0.0, "bert_binary_head": in_order}
    dataset = train(info, None, **flags)
    seen = np.concatenate([dataset.text(i) for i in range(len(dataset))])
    counts = {token: int((seen == token).sum()) for token in (7, 8, 9, 10, 11, 12)}
    assert counts == {7: 0 if in_order else 1, 8: 200, 9: 1, 10: 1, 11: 5, 12: 90}
    for i in range(len(dataset)):
        assert all(parts(dataset[i])) and len(parts(dataset[i])) == 1 + in_order


def test_a_corpus_without_two_sentences_is_refused_or_left_out(
    a: str, tmp_path: Path, info: TokenInfo
) -> None:
    single = corpus(tmp_path / "single", [[[7] * 9]] * 5)
    with pytest.raises(UserError, match="2 or more sentences.*--split-sentences"):
        train(info, data_path=(single,))
    said: list[str] = []
    blend = build((None, 0, 0), info, said, data_path=(a, single), split="1").train
    assert isinstance(blend, BlendedDataset) and len(blend.members) == 1
    assert any("fewer than 2 sentences in each of 5 documents" in line for line in said)
    train(info, data_path=(single,), bert_binary_head=False)


def test_a_sample_is_a_pure_function_of_its_number(a: str, info: TokenInfo) -> None:
    first = train(info, data_path=(a,))
    again = train(info, data_path=(a,), mmap_bin_files=False)
    backwards = [again[i] for i in reversed(range(60))][::-1]
    for i in range(60):
        assert all(np.array_equal(first[i][name], backwards[i][name]) for name in first[i])
    assert not np.array_equal(first[0]["tokens"], first[1]["tokens"])


def test_microbatches_are_read_on_where_another_run_stopped(a: str, info: TokenInfo) -> None:
    """With and without reading processes; a place without a sample counts for nothing."""
    dataset = train(info, data_path=(a,))
    numbers = [[2 * i, 2 * i + 1] for i in range(8)] + [[16, PADDING]]
    device = torch.device("cpu")
    whole = list(Batches(dataset, iter(numbers), device, 0).take(9))
    resumed = list(Batches(dataset, iter(numbers[5:]), device, 1).take(4))
    for one, other in zip(whole[5:], resumed, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    batch = whole[0]
    documents = Packing(batch["cu_seqlens"]).documents(SEQ)
    ends = [int(dataset[i]["cu_seqlens"][1]) for i in (0, 1)]
    assert (0, 0, ends[0]) in documents and (1, 0, ends[1]) in documents
    assert batch["sentence_order"].tolist() == [int(dataset[i]["sentence_order"]) for i in (0, 1)]
    assert whole[8]["sentence_order"][1] == UNKNOWN and not whole[8]["loss_mask"][1].any()


def test_splits_are_of_documents_and_share_none(a: str, info: TokenInfo) -> None:
    built = build((None, None, None), info, data_path=(a,), split="80,10,10")
    bounds, seen = FileSource(a).documents, []
    for dataset in (built.train, built.valid[0], built.test):
        assert isinstance(dataset, BertDataset)
        rows = {row for i in range(len(dataset)) for row, *_ in dataset.places(i)}
        seen.append({int(np.searchsorted(bounds, row, side="right")) - 1 for row in rows})
    assert seen[0] == set(range(48)) and seen[1] == set(range(48, 54))
    assert seen[2] == set(range(54, 60))


def test_a_sample_is_traced_to_its_documents(a: str, info: TokenInfo) -> None:
    dataset = train(info, data_path=(a,))
    for i in (0, 7, 31):
        found = trace(dataset, i)
        read = np.concatenate([piece.tokens for piece in found.pieces])
        assert (
            np.array_equal(read, dataset.text(i)) and len({p.document for p in found.pieces}) == 1
        )
        assert found.encoder is not None and found.target is not None and not found.has_decoder
        assert found.encoder[0] == CLS and found.counted == len(found.target)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_plan_knows_the_epochs_beforehand(
    a: str, tmp_path: Path, info: TokenInfo, in_order: bool
) -> None:
    """From the index alone, nearly: where samples end follows from sentences and draws."""
    long = corpus(tmp_path / "long", [[[7 + i] * (90 + 40 * i)] for i in range(20)])
    for prefix in (a, long):
        flags = {"data_path": (prefix,), "split": "1", "bert_binary_head": in_order}
        config = DataConfig.resolve(seq_length=SEQ, masked_words=True, **flags)
        (row,) = describe(config, (None, 0, 0))
        count = len(train(info, None, **flags))
        assert row.samples is not None and abs(row.samples - count) <= 0.25 * count


def test_mock_data(info: TokenInfo) -> None:
    dataset = train(info, 50, data_path=None, mock_data=True)
    assert dataset.source.name == "mock data"
    assert dataset[49]["loss_mask"].sum() > 1


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"seq_length": 4}, r"--seq-length \(4\) leaves no room"),
        ({"reset_position_ids": True}, "--reset-position-ids is for a decoder alone"),
        ({"fim_data": True, "mock_data": False}, "--fim-data is for a decoder alone"),
        ({"decoder_seq_length": 16}, r"--masked-words .* --decoder-seq-length \(16\)"),
        ({"mask_prob": 1.5}, "--mask-prob"),
    ],
)
def test_wrong_settings_are_refused(info: TokenInfo, flags: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        build((10, 0, 0), info, **{"mock_data": True, **flags})


def test_a_tokenizer_without_the_tokens_is_refused(a: str) -> None:
    none = TokenInfo.of(ByteLevelTokenizer(("<eos>", "<pad>")))
    with pytest.raises(UserError, match=r"has no \[CLS\] and no \[SEP\].*BertWordPieceLowerCase"):
        build((10, 0, 0), none, data_path=(a,), split="1")
    said: list[str] = []
    dataset = build((10, 0, 0), none, said, mock_data=True).train
    assert dataset is not None and dataset[0]["tokens"][0] == 1
    assert "made-up tokens 1, 2, 3 stand for [CLS], [SEP], [MASK]" in said[0]


def test_a_foreign_token_is_named(tmp_path: Path, info: TokenInfo) -> None:
    prefix = corpus(tmp_path / "f", [[[7, 8], [9, 999]]])
    with pytest.raises(UserError, match="sequence 1 holds token 999"):
        train(info, 2, data_path=(prefix,))[0]


def test_ngrams_have_the_length_of_the_program(info: TokenInfo) -> None:
    assert DataConfig.resolve(seq_length=8, masked_words=True).masking.masking_max_ngram == 3
    assert DataConfig.resolve(seq_length=8).masking.masking_max_ngram == 10
