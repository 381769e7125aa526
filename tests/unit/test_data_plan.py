"""Samples and epochs of each corpus, before any index is built, are those of the data sets."""

from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.builder import TokenInfo, build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.utils import UserError
from megatron.training.data_plan import training_sources


def corpus(prefix: Path, documents: int, length: int) -> str:
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for number in range(documents):
        builder.add_document(np.arange(number, number + length, dtype=np.uint16) % 50)
    builder.finalize()
    return str(prefix)


def test_one_corpus(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", documents=10, length=20)
    config = DataConfig.resolve(data_path=(prefix,), split="80,20,0", seq_length=8)
    (source,) = training_sources(config, 50)
    # 8 of 10 documents: 160 tokens; 50 samples of 8 read 400.
    assert (source.documents, source.tokens, source.samples) == (8, 160, 50)
    assert source.epochs == 2.5


def test_a_blend_is_shared_out_as_the_builder_does(tmp_path: Path) -> None:
    first = corpus(tmp_path / "a", documents=10, length=20)
    second = corpus(tmp_path / "b", documents=20, length=20)
    config = DataConfig.resolve(data_path=("3", first, "1", second), split="100,0,0", seq_length=8)
    planned = training_sources(config, 100)
    assert [source.samples for source in planned] == [75, 25]
    assert [source.epochs for source in planned] == [3.0, 0.5]
    info = TokenInfo(eod=0, vocab_size=50)
    built = build_datasets(config, (100, 0, 0), info, seed=1)
    assert [int(n) for n in built.train.consumed(100)] == [75, 25]  # type: ignore[union-attr]


def test_no_training_share_and_no_files_are_errors(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", documents=10, length=20)
    config = DataConfig.resolve(data_path=(prefix,), split="0,1,0", seq_length=8)
    with pytest.raises(UserError, match="--split"):
        training_sources(config, 5)
    absent = DataConfig.resolve(data_path=(str(tmp_path / "x"),), seq_length=8)
    with pytest.raises(UserError, match="x.idx does not exist"):
        training_sources(absent, 5)
