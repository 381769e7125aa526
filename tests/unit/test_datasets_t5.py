"""An encoder-decoder's samples from flags: tokenizers, masks, caches, blends, wrong settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.builder import Built, Sizes, build_datasets
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.gpt import Sample
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.plan import describe, positions
from megatron.core.datasets.source import DocumentSource, FileSource
from megatron.core.datasets.t5 import T5Dataset
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.datasets.trace import trace
from megatron.core.tokenizers.byte_level import ByteLevelTokenizer
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.batches import Batches
from tests.restored import restored
from tests.unit import tokenizer_files as files
from tools import inspect_dataset, preprocess_data

TOKENIZER = ByteLevelTokenizer(("<eos>", "<pad>", "<bos>"), sentinels=30)
EOS, PAD, BOS = 256, 257, 258
INFO = TokenInfo.of(TOKENIZER)
KINDS = ("ngrams", "random_spans")
SENTENCES = ["It was a dark night. ", "A shot rang out! ", "Nobody heard it, ", "or so they said. "]


def corpus(prefix: Path, documents: list[list[str]]) -> str:
    """Write documents of sentences as bytes."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in documents:
            parts = [list(sentence.encode()) for sentence in document]
            builder.add_document([i for part in parts for i in part], [*map(len, parts)])
        builder.finalize()
    return str(prefix)


@pytest.fixture
def a(tmp_path: Path) -> str:
    random = np.random.default_rng(1)
    return corpus(
        tmp_path / "a",
        [[SENTENCES[i] for i in random.integers(0, 4, random.integers(1, 9))] for _ in range(60)],
    )


def build(
    sizes: Sizes,
    said: list[str] | None = None,
    policy: BuildPolicy | None = None,
    info: TokenInfo = INFO,
    **flags: Any,
) -> Built:
    given = {"seq_length": 48, "decoder_seq_length": 40, "span_corruption": "ngrams", **flags}
    say = (lambda line: None) if said is None else said.append
    return build_datasets(DataConfig.resolve(**given), sizes, info, 5, policy, say=say)


def train(asked: int | None = 100, **flags: Any) -> T5Dataset:
    dataset = build((asked, 0, 0), **{"split": "1", **flags}).train
    assert isinstance(dataset, T5Dataset)
    return dataset


def same(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


# Samples


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_holds_its_text_and_padding_nothing(a: str, kind: str) -> None:
    """Encoder and labels give the text back; beyond them there is padding without loss."""
    dataset = train(data_path=(a,), span_corruption=kind)
    assert len(dataset) >= 100
    for i in range(100):
        sample, text = dataset[i], dataset.text(i)
        dtypes = {name: (array.dtype.name, len(array)) for name, array in sample.items()}
        assert dtypes == {
            "encoder_tokens": ("int64", 48),
            "encoder_valid": ("bool", 48),
            "decoder_tokens": ("int64", 40),
            "labels": ("int64", 40),
            "loss_mask": ("float32", 40),
        }
        encoder = sample["encoder_tokens"][sample["encoder_valid"]].tolist()
        decoder = sample["decoder_tokens"][sample["loss_mask"] > 0].tolist()
        labels = sample["labels"][sample["loss_mask"] > 0].tolist()
        assert (encoder[-1] == EOS) == (kind == "random_spans")
        body = np.array(encoder[:-1] if kind == "random_spans" else encoder)
        assert decoder[0] == BOS and labels[-1] == EOS and decoder[1:] == labels[:-1]
        target = np.array(labels[:-1])
        assert np.array_equal(restored(body, target, TOKENIZER.special.sentinels), text)
        for tokens, valid, fill in (
            ("encoder_tokens", "encoder_valid", PAD),
            ("decoder_tokens", "loss_mask", PAD),
            ("labels", "loss_mask", 0),
        ):
            count = int(sample[valid].sum())
            assert sample[valid].tolist() == [True] * count + [False] * (len(sample[valid]) - count)
            assert set(sample[tokens][count:].tolist()) <= {fill}
        assert set(sample["loss_mask"].tolist()) <= {0.0, 1.0}


def test_random_spans_fill_the_encoder(a: str) -> None:
    dataset = train(data_path=(a,), span_corruption="random_spans")
    text = len(dataset.text(0))
    noise, spans = round(0.15 * text), round(round(0.15 * text) / 3)
    assert text - noise + spans + 1 in (47, 48)
    assert {int(dataset[i]["loss_mask"].sum()) for i in range(50)} == {noise + spans + 1}
    every = np.concatenate([dataset.text(i) for i in range(len(dataset))])
    assert len(every) == len(dataset) * text


def test_ngrams_stay_inside_documents_and_stream_does_not(a: str) -> None:
    bounds = FileSource(a).documents

    def documents(dataset: T5Dataset, i: int) -> set[int]:
        rows = [row for row, first, last in dataset.places(i) if first < last]
        return {int(np.searchsorted(bounds, row, side="right")) for row in rows}

    ngrams = train(data_path=(a,))
    assert all(len(documents(ngrams, i)) == 1 for i in range(100))
    stream = train(data_path=(a,), span_corruption="random_spans")
    assert any(len([p for p in stream.places(i) if p[1] < p[2]]) > 1 for i in range(100))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_a_pure_function_of_its_number(a: str, kind: str) -> None:
    """Whoever reads it, after whatever else, from an index just built or found, mapped or not."""
    first = train(data_path=(a,), span_corruption=kind)
    again = train(data_path=(a,), span_corruption=kind, mmap_bin_files=False)
    backwards = [again[i] for i in reversed(range(60))][::-1]
    assert all(same(first[i], backwards[i]) for i in range(60))
    assert not same(first[0], first[1])
    other = build_datasets(
        DataConfig.resolve(
            data_path=(a,), split="1", seq_length=48, decoder_seq_length=40, span_corruption=kind
        ),
        (100, 0, 0),
        INFO,
        6,
    ).train
    assert other is not None and not all(same(first[i], other[i]) for i in range(5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_reads_on_where_the_other_stopped(a: str, kind: str) -> None:
    """Microbatches from the middle on, with and without reading processes."""
    dataset = train(data_path=(a,), span_corruption=kind)
    numbers = [[2 * i, 2 * i + 1] for i in range(12)]
    device = torch.device("cpu")
    whole = list(Batches(dataset, iter(numbers), device, 0).take(12))
    resumed = list(Batches(dataset, iter(numbers[5:]), device, 2).take(7))
    for one, other in zip(whole[5:], resumed, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole[0]["encoder_valid"].dtype == torch.bool
    assert whole[0]["encoder_valid"].shape == (2, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_short_empty_and_over_long_documents(tmp_path: Path, kind: str) -> None:
    documents = [["x"], [], ["", ""], ["word " * 500], ["y", "", "z"]]
    prefix = corpus(tmp_path / "odd", documents)
    dataset = train(None, data_path=(prefix,), span_corruption=kind, short_seq_prob=0.0)
    sizes = [len(dataset.text(i)) for i in range(len(dataset))]
    # A stream leaves out what does not fill a last sample; sentences leave out nothing.
    assert sum(sizes) == (2503 if kind == "ngrams" else 2503 // sizes[0] * sizes[0])
    assert min(sizes) == (1 if kind == "ngrams" else sizes[0])
    for i in range(len(dataset)):
        sample = dataset[i]
        assert sample["encoder_valid"].any() and sample["loss_mask"].sum() >= 1


def test_documents_of_many_sentences_are_one_row(a: str) -> None:
    source = FileSource(a)
    documents = DocumentSource(source)
    bounds = source.documents
    assert documents.sequence_lengths.sum() == source.sequence_lengths.sum()
    rows = np.array([3, 0, 17])
    lasts = source.sequence_lengths[bounds[rows + 1] - 1].tolist()
    ranges = [np.arange(bounds[row], bounds[row + 1]) for row in rows]
    whole = [source.join(one, 0, last) for one, last in zip(ranges, lasts, strict=True)]
    joined = documents.join(rows, 5, 7)
    assert np.array_equal(joined, np.concatenate([whole[0][5:], whole[1], whole[2][:7]]))
    one = documents.join(np.array([3]), 2, 30)
    assert np.array_equal(one, whole[0][2:30])
    assert documents.join(np.array([3]), 4, 4).tolist() == []


def test_mock_data() -> None:
    for kind in KINDS:
        dataset = train(50, data_path=None, mock_data=True, span_corruption=kind)
        assert dataset.source.name == "mock data"
        assert int(dataset.text(0).max()) < min(TOKENIZER.special.sentinels)
        assert dataset[49]["loss_mask"].sum() > 1


# Tokenizers

PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] it was a dark night ##s shot rang out nobody ##y hear ##d"
OWN = ["<pad>", "</s>", *(f"<extra_id_{i}>" for i in reversed(range(12)))]


def tokenizer_flags(kind: str, folder: Path) -> dict[str, Any]:
    """Return the flags of a tokenizer with 12 sentinels, its files made."""
    if kind.startswith("Bert"):
        (folder / "vocab.txt").write_text(PIECES.replace(" ", "\n"))
        given = {"vocab_file": f"{folder}/vocab.txt", "vocab_extra_ids": 12}
        # As in old scripts: the file alone means the lower-case kind.
        return given if kind == "BertWordPieceLowerCase" else {**given, "tokenizer_type": kind}
    if kind == "SentencePieceTokenizer":
        (folder / "tiny.model").write_bytes(files.sentencepiece_model())
        model = f"{folder}/tiny.model"
        return {"tokenizer_type": kind, "tokenizer_model": model, "vocab_extra_ids": 12}
    # T5's own file: sentinels in the vocabulary, the first one last, no beginning of sequence.
    words = ["<unk>", "it", "It", "was", "a", "A", "dark", "shot", "rang", "Nobody", "heard"]
    content = files.word_level_json(words, OWN)
    beside = {"eos_token": "</s>", "pad_token": "<pad>"}
    model = files.write_hugging_face(folder, content, tokenizer_config=beside)
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": model}


@pytest.mark.parametrize(
    "kind",
    [
        "BertWordPieceLowerCase",
        "BertWordPieceCase",
        "SentencePieceTokenizer",
        "HuggingFaceTokenizer",
    ],
)
def test_from_text_to_samples_with_each_tokenizer(tmp_path: Path, kind: str) -> None:
    """Sentences by the tool, then samples; sentinels found, the decoder begins as the kind says."""
    flags = tokenizer_flags(kind, tmp_path)
    text = tmp_path / "text.jsonl"
    stories = ["It was a dark night. A shot rang out! Nobody heard it." for _ in range(20)]
    text.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    preprocess_data.main(
        [f"--input={text}", f"--output-prefix={tmp_path}/c", "--split-sentences", "--workers=1"]
        + words
    )
    prefix = f"{tmp_path}/c_text_sentence"
    assert len(FileSource(prefix).sequence_lengths) == 60
    tokenizer = files.build(**flags)
    special = tokenizer.special
    assert len(special.sentinels) == 12
    names = [tokenizer.decode([i]) for i in special.sentinels]
    assert names == [f"<extra_id_{i}>" for i in range(12)]
    for spans in KINDS:
        info = TokenInfo.of(tokenizer)
        dataset = train(50, data_path=(prefix,), info=info, span_corruption=spans)
        sample = dataset[3]
        begin = special.pad if special.bos is None else special.bos
        assert sample["decoder_tokens"][:2].tolist() == [begin, special.sentinels[0]]
        count = int(sample["loss_mask"].sum())
        assert sample["labels"][count - 1] == special.eos
        assert special.sentinels[0] in sample["encoder_tokens"]


def test_whole_words_are_masked(tmp_path: Path) -> None:
    """Word pieces: no span begins or ends inside a word."""
    tokenizer = files.build(**tokenizer_flags("BertWordPieceLowerCase", tmp_path))
    continues = tokenizer.continues_word()
    assert continues is not None
    pieces = PIECES.split()
    assert [pieces[i] for i in np.flatnonzero(continues)] == ["##s", "##y", "##d"]
    with IndexedDatasetBuilder(tmp_path / "w", np.uint16) as builder:
        for seed in range(30):
            builder.add_document(np.random.default_rng(seed).integers(5, len(pieces), 40))
        builder.finalize()
    info = TokenInfo.of(tokenizer)
    dataset = train(60, data_path=(f"{tmp_path}/w",), info=info, mask_prob=0.3)
    for i in range(60):
        text = dataset.text(i)
        spans = dataset.masking.spans(i, text)
        inside = [edge for edge in spans.ravel().tolist() if 0 < edge < len(text)]
        assert not continues[text[inside]].any()


def test_added_sentinels_are_as_many_as_asked_for(tmp_path: Path) -> None:
    """With --vocab-extra-ids, a vocabulary's own count up to it, and what it lacks is added."""
    flags = tokenizer_flags("HuggingFaceTokenizer", tmp_path)
    assert len(files.build(**flags, vocab_extra_ids=5).special.sentinels) == 5
    more = files.build(**flags, vocab_extra_ids=14)
    assert more.special.sentinels[-2:] == (more.vocab_size - 2, more.vocab_size - 1)


# What a user can get wrong


def refused(match: str, info: TokenInfo = INFO, **flags: Any) -> str:
    with pytest.raises(UserError, match=match) as caught:
        build((10, 0, 0), info=info, **{"mock_data": True, **flags})
    return str(caught.value)


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    none = TokenInfo.of(ByteLevelTokenizer(("<eos>", "<pad>")))
    assert "--vocab-extra-ids 100" in refused("needs sentinel tokens", none)
    only = TokenInfo.of(ByteLevelTokenizer(("<eos>",), sentinels=3))
    text = refused("the decoder begins with .* has neither", only)
    assert "--special-tokens '<pad>' '<s>'" in text and '"pad_token": "<pad>"' in text
    nothing = TokenInfo.of(ByteLevelTokenizer((), sentinels=3))
    refused("end with an end-of-sequence token", nothing)


def test_lengths_that_do_not_fit_are_refused_or_warned_of() -> None:
    text = refused("--decoder-seq-length", span_corruption="random_spans", decoder_seq_length=8)
    assert "--encoder-seq-length 48" in text and "give at least that" in text
    few = TokenInfo.of(ByteLevelTokenizer(("<eos>", "<pad>"), sentinels=1))
    text = refused("has 1 sentinel tokens", few, span_corruption="random_spans")
    needed = int(text.rsplit(" ", 1)[1])
    enough = TokenInfo.of(ByteLevelTokenizer(("<eos>", "<pad>"), sentinels=needed))
    build((10, 0, 0), info=enough, mock_data=True, span_corruption="random_spans")
    said: list[str] = []
    build((10, 0, 0), said, info=few, mock_data=True, decoder_seq_length=6)
    assert any("--decoder-seq-length (6) has no room" in line for line in said)
    assert any("has 1 sentinel tokens: fewer are masked" in line for line in said)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"mask_prob": 0.0}, r"--mask-prob \(0.0\) must be above 0"),
        ({"mask_prob": 1.0}, "--mask-prob"),
        ({"short_seq_prob": 1.5}, "--short-seq-prob"),
        ({"masking_max_ngram": 0}, "--masking-max-ngram"),
        ({"mean_noise_span_length": 0.5}, "--mean-noise-span-length"),
        ({"decoder_seq_length": 2}, "--decoder-seq-length"),
        ({"seq_length": 3}, "--encoder-seq-length"),
        ({"reset_position_ids": True}, "--reset-position-ids is for a decoder alone"),
        ({"fim_data": True, "mock_data": False}, "--fim-data is for a decoder alone"),
    ],
)
def test_settings_out_of_range_are_refused(flags: dict[str, Any], match: str) -> None:
    refused(match, **flags)


def test_a_split_without_documents_is_refused(a: str) -> None:
    for kind in KINDS:
        with pytest.raises(UserError, match="the valid split .* is empty"):
            build((10, 5, 0), data_path=(a,), split="999,1,0", span_corruption=kind)


def test_a_foreign_token_is_named(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "f", np.uint16) as builder:
        builder.add_document([1, 2, 3, 999], [2, 2])
        builder.finalize()
    dataset = train(4, data_path=(f"{tmp_path}/f",), short_seq_prob=0.0)
    with pytest.raises(UserError, match="sequence 1 holds token 999"):
        dataset[0]
    with IndexedDatasetBuilder(tmp_path / "g", np.uint16) as builder:
        builder.add_document([1] * 20, [10, 10])
        builder.add_document([2] * 31 + [999], [31, 1])
        builder.finalize()
    stream = train(1, data_path=(f"{tmp_path}/g",), span_corruption="random_spans")
    with pytest.raises(UserError, match="document 1 holds token 999"):
        stream[0]


# Splits, blends, caches


@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_of_documents_and_share_none(a: str, kind: str) -> None:
    built = build((None, None, None), data_path=(a,), split="80,10,10", span_corruption=kind)
    bounds, seen = FileSource(a).documents, []
    for dataset in (built.train, built.valid[0], built.test):
        assert isinstance(dataset, T5Dataset)
        rows = {row for i in range(len(dataset)) for row, *_ in dataset.places(i)}
        if kind == "random_spans":  # its rows are documents
            seen.append(rows)
        else:
            seen.append({int(np.searchsorted(bounds, row, side="right")) - 1 for row in rows})
    assert seen[0] <= set(range(48)) and seen[1] <= set(range(48, 54))
    assert seen[2] <= set(range(54, 60)) and all(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_blend_takes_its_shares(a: str, tmp_path: Path, kind: str) -> None:
    b = corpus(tmp_path / "b", [["another text altogether. " * 9]] * 30)
    blend = build((80, 0, 0), data_path=("3", a, "1", b), split="1", span_corruption=kind).train
    assert isinstance(blend, BlendedDataset) and len(blend) == 80
    assert blend.consumed(80) == [60, 20]
    member, number = blend.members[int(blend.index[0][7])], int(blend.index[1][7])
    assert same(blend[7], member[number])
    by_size = build((None, 0, 0), data_path=(a, b), split="1", span_corruption=kind).train
    assert isinstance(by_size, BlendedDataset)
    assert len(by_size) == sum(map(len, by_size.members))


def test_a_corpus_without_tokens_is_left_out_of_a_blend_by_size(a: str, tmp_path: Path) -> None:
    said: list[str] = []
    empty = corpus(tmp_path / "e", [["", ""], [""]])
    blend = build((None, 0, 0), said, data_path=(a, empty), split="1").train
    assert isinstance(blend, BlendedDataset) and len(blend.members) == 1
    assert any("no tokens in 2 documents" in line for line in said)


@pytest.mark.parametrize("kind", KINDS)
def test_index_files_are_found_again_and_rebuilt_for_other_data(
    a: str, tmp_path: Path, kind: str
) -> None:
    flags = {"data_path": (a,), "split": "90,10,0", "span_corruption": kind}
    first = build((50, 5, 0), **flags)
    assert set(first.files.values()) == {"built"} and len(first.files) == 2
    found = build((50, 5, 0), policy=BuildPolicy(build=False, timeout=0), **flags)
    assert set(found.files.values()) == {"hit"} and set(found.files) == set(first.files)
    other = build((50, 5, 0), **flags, seq_length=40)
    assert set(other.files.values()) == {"built"}
    b = corpus(tmp_path / "b", [["other text. "] * 7] * 60)
    for suffix in ("idx", "bin"):
        shutil.copy(f"{b}.{suffix}", f"{a}.{suffix}")
    said: list[str] = []
    again = build((50, 5, 0), said, **flags)
    assert set(again.files.values()) == {"built"}
    assert any("made from other data" in line for line in said)


@pytest.mark.parametrize("name", ["sample_index", "epoch_index"])
def test_a_damaged_index_is_built_again(a: str, name: str) -> None:
    flags = {"data_path": (a,), "split": "1"}
    first = build((50, 0, 0), **flags)
    path = Path(next(iter(first.files)) + f"-{name}.npy")
    sound = path.read_bytes()
    array = np.load(path)
    for damaged in (array[:-1], array + 10_000, array.astype(np.float32)):
        np.save(path, damaged)
        said: list[str] = []
        again = build((50, 0, 0), said, **flags)
        assert set(again.files.values()) == {"built"} and path.read_bytes() == sound
        assert any("index files are built again" in line for line in said)


def test_epochs_are_told(a: str) -> None:
    for kind in KINDS:
        one = train(None, data_path=(a,), span_corruption=kind)
        many = train(len(one) * 3 + 1, data_path=(a,), span_corruption=kind)
        (place,) = positions(many, 2 * len(one))
        assert place.epoch == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_knows_the_epochs_beforehand(a: str, kind: str) -> None:
    """From the index alone: exactly for a stream, nearly for sentences."""
    flags = {"data_path": (a,), "split": "80,20,0", "span_corruption": kind}
    config = DataConfig.resolve(seq_length=48, decoder_seq_length=40, **flags)
    built = build((None, 7, 0), **flags)
    assert built.train is not None
    row, valid = describe(config, (None, 7, 0))
    assert (row.sequences, valid.sequences, valid.samples) == (48, 12, 7)
    assert row.samples is not None and row.epochs is not None and valid.epochs is not None
    within = 0 if kind == "random_spans" else 0.15
    assert abs(row.samples - len(built.train)) <= within * len(built.train)
    (place,) = positions(built.valid[0], 7)
    assert valid.epochs == pytest.approx(place.epoch, rel=0.2)


# Flags and tools


def test_flags_of_an_encoder_decoder_are_refused_for_a_decoder() -> None:
    base = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3"
    words = f"{base} --micro-batch-size 2 --train-iters 5 --mock-data --vocab-size 100".split()
    words += ["--tokenizer-type", "NullTokenizer"]
    with pytest.raises(UserError, match=r"--decoder-seq-length \(16\)"):
        parse([*words, "--decoder-seq-length", "16"])
    idle = parse([*words, "--mask-prob", "0.2", "--short-seq-prob", "0.3"]).no_effect
    assert {"--mask-prob (no --decoder-seq-length)"} <= set(idle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_traced_to_its_documents(a: str, kind: str) -> None:
    dataset = train(data_path=(a,), span_corruption=kind)
    for i in (0, 7, 31):
        found = trace(dataset, i)
        read = np.concatenate([piece.tokens for piece in found.pieces])
        assert np.array_equal(read, dataset.text(i)) and np.array_equal(read, found.tokens)
        assert found.encoder is not None and found.target is not None
        assert found.counted == len(found.target)
        for piece in found.pieces:
            bounds = FileSource(a).documents[piece.document : piece.document + 2]
            whole = FileSource(a)
            rows = np.arange(*bounds)
            text = whole.join(rows, 0, int(whole.sequence_lengths[rows[-1]]))
            assert len(text) == piece.length
            assert np.array_equal(text[piece.first : piece.end], piece.tokens)


def test_the_inspection_tool_prints_what_encoder_and_decoder_get(
    a: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "train_iters": 4},
        **{"micro_batch_size": 2, "global_batch_size": 4, "lr": 1e-3, "data_path": [a]},
        **{"seq_length": 48, "decoder_seq_length": 40, "split": "1", "eval_iters": 0},
        **{"tokenizer_type": "ByteLevelTokenizer", "vocab_extra_ids": 30},
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    inspect_dataset.main(["--sample", "5", "--config", str(path)])
    printed = capsys.readouterr().out
    assert "what the encoder reads" in printed and "what the decoder is to say" in printed
    assert printed.count("<extra_id_0>") == 2 and "loss at" in printed
