"""Ranks that would read or write different things are told apart before they train."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.datasets import builder
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.mesh import Axis
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError
from megatron.training import agreement
from tests.harness import Pool

LENGTHS = np.random.default_rng(0).integers(5, 40, 50)


def corpus(prefix: Path, seed: int, lengths: Any = LENGTHS) -> str:
    prefix.parent.mkdir(exist_ok=True)
    generator = np.random.default_rng(seed)
    with IndexedDatasetBuilder(str(prefix), np.uint16) as built:
        for length in lengths:
            built.add_document([*generator.integers(60, size=length - 1).tolist(), 60])
        built.finalize()
    return str(prefix)


def world() -> Axis:
    size = dist.get_world_size()
    return Axis("world", tuple(range(size)), dist.get_rank(), dist.group.WORLD)


def inputs(rank: int, paths: list[list[str]], flags: dict[str, Any], sizes: list[int]) -> str:
    config = DataConfig.resolve(data_path=tuple(paths[rank]), seq_length=8, **flags)
    text = TokenizerConfig.resolve(tokenizer_type="NullTokenizer", vocab_size=sizes[rank])
    tokenizer = build_tokenizer(text)
    info = builder.TokenInfo.of(tokenizer)
    data = builder.build_datasets(config, (20, 4, 0), info, 1)
    try:
        agreement.check_inputs(world(), tokenizer, data)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["equal", "tokens", "lengths", "weights", "tokenizer"])
def test_ranks_read_the_same(pool: Pool, tmp_path: Path, case: str) -> None:
    """Whatever the paths are: what lies there is compared."""
    a, a_again = corpus(tmp_path / "0" / "a", 1), corpus(tmp_path / "1" / "a", 1)
    b = corpus(tmp_path / "0" / "b", 2)  # of equal form
    other_end = [*LENGTHS[:-3], *LENGTHS[:-4:-1]]
    paths, flags, sizes, said = {
        "equal": ([[a], [a_again], [a]], {}, [60, 60, 60], ""),
        "tokens": ([[a], [b], [b]], {}, [60, 60, 60], f"ranks 1, 2 have another training.*{b}"),
        "lengths": (
            [[a], [a], [corpus(tmp_path / "1" / "b", 1, other_end)]],
            {"split": "90,10,0"},
            [60, 60, 60],
            "rank 2 has another",
        ),
        "weights": (
            [["0.9", a, "0.1", b], ["0.9", a, "0.1", b], ["0.1", a, "0.9", b]],
            {},
            [60, 60, 60],
            "rank 2 has another training set",
        ),
        "tokenizer": ([[a], [a], [a]], {}, [60, 62, 60], "rank 1 has another tokenizer"),
    }[case]
    messages = pool.run(3, inputs, paths, flags, sizes)
    assert len(set(messages)) == 1
    assert re.match(said or "$", messages[0]), messages[0]


def files(rank: int, paths: list[list[str]]) -> str:
    config = DataConfig.resolve(data_path=tuple(paths[rank]), seq_length=8)
    try:
        agreement.check_sources(world(), config)
    except UserError as error:
        return str(error)
    return ""


def test_other_files_are_found_before_an_index_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    a, a_again = corpus(tmp_path / "0" / "a", 1), corpus(tmp_path / "1" / "a", 1)
    other = corpus(tmp_path / "0" / "b", 2)  # of equal form
    assert pool.run(2, files, [[a], [a_again]]) == ["", ""]
    assert pool.run(2, files, [[a], [str(tmp_path / "missing")]]) == ["", ""]
    for paths in ([[a], [other]], [["0.9", a, "0.1", other], ["0.1", a, "0.9", other]]):
        messages = pool.run(2, files, paths)
        assert len(set(messages)) == 1
        assert messages[0].startswith("rank 1 has another set of files (train) than rank 0: rank 1")
        assert other in messages[0]


def saved(rank: int, folders: list[Path]) -> str:
    try:
        agreement.check_save_folder(world(), str(folders[rank]))
    except UserError as error:
        return str(error)
    return ""


def test_one_folder_takes_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """It may have a name of its own on each machine; that of another is refused at the start."""
    shared, link, own = tmp_path / "shared", tmp_path / "link", tmp_path / "own"
    link.symlink_to(shared)
    assert pool.run(3, saved, [shared, shared, link]) == ["", "", ""]
    messages = pool.run(3, saved, [shared, own, link])
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1 has another folder than rank 0 as --save")
    assert str(own) in messages[0] and str(shared) in messages[0]
    assert list(shared.iterdir()) == [] and not own.exists()
