"""The split string and the flags that name the data."""

import pytest

from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.sources import parse_blend, read_sources
from megatron.core.datasets.split import parse_split, rows_of, split_matrix
from megatron.core.utils import UserError


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("-1,1,0", "'-1'"),
        ("90,abc5,5", "'abc5'"),
        ("0,0,0", "all fields are 0"),
        ("90,,10", "''"),
        ("nan,1", "'nan'"),
        ("inf,1", "'inf'"),
        ("1_0,1", "'1_0'"),
        ("1,2,3,4", "4 fields"),
        ("", "''"),
    ],
)
def test_ds_06_a_bad_split_is_refused_by_field(text: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        DataConfig.resolve(seq_length=8, data_path=("a",), split=text)
    assert named in str(caught.value) and "--split" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969, 30, 1", [0.969, 0.03, 0.001]),
        ("90,10", [0.9, 0.1, 0.0]),
        ("1", [1.0, 0.0, 0.0]),
        ("0.5,0.25,.25", [0.5, 0.25, 0.25]),
        ("1e1,1e1", [0.5, 0.5, 0.0]),
    ],
)
def test_ds_06_a_good_split_still_works(text: str, shares: list[float]) -> None:
    assert parse_split(text) == pytest.approx(shares)
    assert DataConfig.resolve(seq_length=8, data_path=("a",), split=text).split == text


def test_the_matrix_leaves_empty_shares_out() -> None:
    assert split_matrix("3,0,1") == [(0, 0.75), None, (0.75, 1.0)]


def test_rows_round_half_to_even() -> None:
    assert rows_of((0.25, 0.75), 10) == (2, 8)  # 2.5 -> 2, 7.5 -> 8
    assert rows_of((0.949, 0.999), 120) == (114, 120)


def test_splits_share_no_row_and_lose_none() -> None:
    for count in (1, 7, 120, 99_999):
        ranges = [rows_of(s, count) for s in split_matrix("969,30,1") if s]
        assert ranges[0][0] == 0 and ranges[-1][1] == count
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))


def test_the_default_split_goes_with_the_source() -> None:
    assert DataConfig.resolve(seq_length=8, data_path=("a",)).split == "969, 30, 1"
    assert DataConfig.resolve(seq_length=8, mock_data=True).split == "1,1,1"
    assert DataConfig.resolve(seq_length=8, train_data_path=("a",)).split is None


@pytest.mark.parametrize(
    "flags",
    [
        {"data_path": ("a",), "mock_data": True},
        {"data_path": ("a",), "train_data_path": ("b",)},
        {"train_data_path": ("a",), "per_split_data_args_path": "x.json"},
        {"train_data_path": ("a",), "split": "9,1"},
    ],
)
def test_two_sources_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(UserError, match="data-path"):
        DataConfig.resolve(seq_length=8, **flags)


def test_a_blend_has_weights_everywhere_or_nowhere() -> None:
    assert parse_blend(["0.3", "a", "2", "b"], "--data-path").weights == (0.3, 2.0)
    assert parse_blend(["a", "b"], "--data-path").weights is None
    for words in (["0.3", "a", "b"], ["a", "0.3", "b", "0.7"], ["0.3", "a", "0.7"], ["1", "2"]):
        with pytest.raises(UserError, match="must alternate"):
            parse_blend(words, "--data-path")
    for weight in ("0", "-1", "nan"):
        with pytest.raises(UserError, match="weight of b"):
            parse_blend(["1", "a", weight, "b"], "--data-path")


def test_lists_may_stand_in_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    listed = tmp_path / "list"
    listed.write_text("0.25 a\n0.75 b\n")
    sources = read_sources(DataConfig.resolve(seq_length=8, data_args_path=str(listed)))
    assert sources["train"].blend.prefixes == ("a", "b")
    assert sources["valid"].blend.shares == [0.25, 0.75]
    per_split = tmp_path / "splits.json"
    per_split.write_text('{"train": ["1", "a", "3", "b"], "valid": "c"}')
    config = DataConfig.resolve(seq_length=8, per_split_data_args_path=str(per_split))
    sources = read_sources(config)
    assert sources["train"].blend.shares == [0.25, 0.75]
    assert sources["valid"].blend.prefixes == ("c",) and sources["test"] is None
    for text in ("{", '{"train": [], "dev": []}', "[]"):
        per_split.write_text(text)
        with pytest.raises(UserError, match="splits.json"):
            read_sources(config)


def test_no_data_at_all_is_said() -> None:
    with pytest.raises(UserError, match="--data-path"):
        read_sources(DataConfig.resolve(seq_length=8))
