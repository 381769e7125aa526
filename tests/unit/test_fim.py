"""Fill-in-the-middle: undoing it gives the text back; rates, ends of documents, length, purity."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.builder import Built, build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.fim import FimDataset, FimOptions, fim_options, generator, permute
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.tokenizers.byte_level import ByteLevelTokenizer
from megatron.core.utils import UserError
from megatron.training.arguments import parse

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("<|endoftext|>", "<pad>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
EOD, PAD, PREFIX, MIDDLE, SUFFIX, FIM_PAD = range(256, 262)
TOKENIZER = ByteLevelTokenizer(NAMES)
INFO = TokenInfo.of(TOKENIZER)


def options(**flags: Any) -> FimOptions:
    return fim_options(DataConfig.resolve(seq_length=8, fim_data=True, **flags).fim, INFO)


def permuted(text: str | list[int], seed: int = 0, **flags: Any) -> list[int]:
    ids = TOKENIZER.encode(text) if isinstance(text, str) else text
    return permute(np.array(ids, dtype=np.int64), options(**flags), generator(1, seed)).tolist()


def undone(ids: list[int]) -> tuple[str, str]:
    """Return (form, text) of one document, read from the marks alone."""
    if PREFIX not in ids:
        return "plain", TOKENIZER.decode(ids)
    text = TOKENIZER.decode(ids)
    psm = re.fullmatch("<fim_prefix>(.*)<fim_suffix>(.*)<fim_middle>(.*)", text, re.DOTALL)
    spm = re.fullmatch("<fim_prefix><fim_suffix>(.*)<fim_middle>(.*)", text, re.DOTALL)
    if spm:
        return "spm", spm[2] + spm[1]
    assert psm, text
    return "psm", psm[1] + psm[3] + psm[2]


def documents(ids: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in ids:
        if token == EOD:
            found.append([])
        else:
            found[-1].append(token)
    return found


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd<"), max_size=20)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 10**6))
def test_undoing_the_permutation_gives_every_text_back(texts: list[str], seed: int) -> None:
    ids = [i for text in texts for i in [*TOKENIZER.encode(text), EOD]][:-1]
    for spm_rate in (0, 1):
        result = documents(permuted(ids, seed, fim_rate=1, fim_spm_rate=spm_rate))
        assert [undone(one)[1] for one in result] == texts
        for one, text in zip(result, texts, strict=True):
            # An empty prefix makes the two forms look alike.
            assert {undone(one)[0]} <= ({"spm", "psm"} if text else {"plain"})
            assert len(one) == len(text.encode()) + 3 * bool(text)


def test_the_two_forms_and_every_cut() -> None:
    """All that may become of a text of five characters, listed, does; and nothing else."""
    text = list(b"abcde")
    cuts = [(text[:a], text[a:b], text[b:]) for a in range(6) for b in range(a, 6)]
    psm = {(PREFIX, *p, SUFFIX, *s, MIDDLE, *m) for p, m, s in cuts}
    spm = {(PREFIX, SUFFIX, *s, MIDDLE, *p, *m) for p, m, s in cuts}
    for rate, wanted in ((0, psm), (1, spm)):
        found = {tuple(permuted("abcde", n, fim_rate=1, fim_spm_rate=rate)) for n in range(800)}
        assert found == wanted


def test_rates_are_shares_of_documents() -> None:
    forms = []
    for seed in range(40):
        ids = [i for n in range(50) for i in [*f"document {n}".encode(), EOD]]
        forms += [undone(one)[0] for one in documents(permuted(ids, seed, fim_rate=0.3))[:-1]]
    share = {form: forms.count(form) / len(forms) for form in ("plain", "spm", "psm")}
    assert len(forms) == 2000
    # Six standard deviations of a share of 2000 are below 0.065. An empty prefix, the smaller of
    # two draws from twelve places, makes PSM look like SPM.
    assert share["plain"] == pytest.approx(0.7, abs=0.065)
    assert share["spm"] == pytest.approx(0.15 * (1 + 1 - (11 / 12) ** 2), abs=0.05)


def test_cuts_are_uniform_over_characters() -> None:
    """Both cuts of a text of four characters are equally often at each of five places."""
    counts = np.zeros(5)
    for seed in range(600):
        text = TOKENIZER.decode(permuted("äöüß", seed, fim_rate=1, fim_spm_rate=0))
        parts = re.fullmatch("<fim_prefix>(.*)<fim_suffix>(.*)<fim_middle>(.*)", text)
        assert parts and sum(map(len, parts.groups())) == 4, "a character was torn"
        counts[len(parts[1])] += 1
        counts[4 - len(parts[2])] += 1
    # Six standard deviations of a share of 1200 draws: 6 * sqrt(0.2 * 0.8 / 1200) < 0.07.
    assert counts / 1200 == pytest.approx([0.2] * 5, abs=0.07)


def test_ends_of_documents_and_special_tokens_stay() -> None:
    ids = [EOD, *b"ab", EOD, EOD, *b"cd", PAD, *b"ef", EOD]
    result = permuted(ids, fim_rate=1)
    assert [i for i in result if i in (EOD, PAD)] == [EOD, EOD, EOD, PAD, EOD]
    assert result[0] == EOD and result[-1] == EOD
    assert result.count(PREFIX) == 3
    assert permuted(ids, fim_rate=0) == ids


def test_half_a_character_is_left_alone() -> None:
    torn = "ä".encode()[1:] + b"bcd"
    assert permuted(list(torn), fim_rate=1) == list(torn)


def test_no_prefix_leaves_documents_that_start_with_it() -> None:
    ids = [*b"#no", EOD, *b"yes"]
    for seed in range(20):
        first, second = documents(permuted(ids, seed, fim_rate=1, fim_no_prefix="#"))
        assert bytes(first) == b"#no" and second.count(MIDDLE) == 1


def test_fragments_are_permuted_one_by_one() -> None:
    flags: dict[str, Any] = {"fim_split_sample": "\n", "fim_rate": 1, "fim_spm_rate": 0}
    ids = [*b"ab\n\ncd\nef", EOD, *b"no split"]
    first, second = documents(permuted(ids, fim_fragment_rate=1, **flags))
    assert first.count(10) == 3 and first.count(PREFIX) == 3
    fragments = "".join(map(chr, (i if i < 256 else 0 for i in first))).split("\n")
    assert [fragment.count("\0") for fragment in fragments] == [3, 0, 3, 3]
    assert second.count(PREFIX) == 1  # by the rate of whole documents
    first, second = documents(permuted(ids, fim_fragment_rate=0, **flags))
    assert bytes(first) == b"ab\n\ncd\nef" and second.count(PREFIX) == 1
    flags["fim_rate"] = 0
    assert permuted(ids, fim_fragment_rate=1, **flags) == ids


# Data sets


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for n in range(60):
            builder.add_document([*f"Document {n} says {'hello ' * (n % 7)}".encode(), EOD])
        builder.finalize()
    return str(tmp_path / "text")


def build(corpus: str, **flags: Any) -> Built:
    config = DataConfig.resolve(seq_length=64, data_path=(corpus,), split="8,2", **flags)
    return build_datasets(config, (40, 8, 0), INFO, 5)


def test_a_sample_keeps_its_length_and_the_data_set_its_order(corpus: str) -> None:
    plain = build(corpus)
    for rate in (0, 1):
        fim = build(corpus, fim_data=True, fim_rate=rate)
        assert isinstance(fim.train, FimDataset) and isinstance(fim.valid[0], FimDataset)
        for mine, other in ((fim.train, plain.train), (fim.valid[0], plain.valid[0])):
            assert mine is not None and other is not None and len(mine) == len(other)
            for i in range(len(mine)):
                sample, raw = mine[i], other[i]
                assert sample["tokens"].shape == sample["labels"].shape == (64,)
                assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
                if rate == 0:
                    assert all((sample[name] == raw[name]).all() for name in raw)
                else:
                    # The expected sample, from the plain one: permuted, then cut off.
                    text = np.append(raw["tokens"], raw["labels"][-1])
                    options = mine.fim
                    wanted = permute(text, options, generator(5, i))[:65]
                    assert (np.append(sample["tokens"], sample["labels"][-1]) == wanted).all()
                    assert PREFIX in wanted


def test_a_shorter_sample_is_padded_and_padding_has_no_loss(corpus: str) -> None:
    """A tokenizer that merges on encoding: two tokens for the text of three."""
    built = build(corpus, fim_data=True, fim_rate=1)
    assert isinstance(built.train, FimDataset)
    shrinking = FimOptions(
        **{
            **vars(built.train.fim),
            "encode": lambda text: TOKENIZER.encode(text)[: len(text) // 2],
        }
    )
    built.train.fim = shrinking
    sample = built.train[0]
    real = len(built.train.permuted(0, built.train.text(0)))
    assert real < 60
    assert (sample["tokens"][real:] == FIM_PAD).all()
    assert (sample["labels"][real - 1 :] == FIM_PAD).all()
    assert sample["loss_mask"][: real - 1].all() and not sample["loss_mask"][real - 1 :].any()


def test_a_sample_follows_from_seed_and_number_alone(corpus: str) -> None:
    """Whatever was read before, and in another process, as after a resume."""
    train = build(corpus, fim_data=True).train
    assert train is not None
    forward = [train[i]["tokens"].tolist() for i in range(20)]
    again = build(corpus, fim_data=True).train
    assert again is not None
    assert [again[i]["tokens"].tolist() for i in reversed(range(20))] == forward[::-1]
    assert len({str(tokens) for tokens in forward}) == 20
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.unit.test_fim import build\n"
        "print(build(sys.argv[1], fim_data=True).train[13]['tokens'].tolist())"
    )
    command = [sys.executable, "-c", program, corpus]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(forward[13])
    states = [generator(seed, i).randint(2**30) for seed, i in ((5, 7), (7, 5), (5 + 2**32, 7))]
    assert len(set(states)) == 3


def test_what_a_user_can_get_wrong(corpus: str) -> None:
    for flags, message in (
        ({"fim_rate": 1.5}, r"--fim-rate \(1.5\) must be between 0 and 1"),
        ({"fim_split_sample": "\n"}, "needs --fim-fragment-rate"),
        ({"fim_pad_token": "<nope>"}, r"--fim-pad-token '<nope>' is no token of the ByteLevel"),
    ):
        with pytest.raises(UserError, match=message):
            build(corpus, fim_data=True, **flags)
    with pytest.raises(UserError, match="--fim-data permutes text, but --mock-data has none"):
        DataConfig.resolve(seq_length=8, mock_data=True, fim_data=True)


def test_flags_that_count_only_with_fim_data_are_named() -> None:
    base = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --data-path text --dry-run"
    ).split()
    assert parse([*base, "--fim-rate", "0.9"]).no_effect == ("--fim-rate (no --fim-data)",)
    run = parse([*base, "--fim-rate", "0.9", "--fim-data"])
    assert run.no_effect == () and run.config.data.fim.fim_rate == 0.9
