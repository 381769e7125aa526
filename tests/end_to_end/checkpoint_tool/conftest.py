"""The tool, a model of the transformers library, and checkpoints of a run that started from it."""

import shutil
from pathlib import Path

import pytest

import pretrain_gpt
from tests.end_to_end.checkpoint_tool.words import NULL, TRAIN, Tool
from tests.unit.hub_files import (
    write_llama,
)
from tools import checkpoint


@pytest.fixture
def tool() -> Tool:
    return lambda *words: checkpoint.main([str(word) for word in words])


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("theirs") / "llama", bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="session")
def imported(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints with the imported model."""
    folder = tmp_path_factory.mktemp("imported") / "save"
    words = ["convert", "--load", str(theirs), "--save", str(folder), *NULL]
    assert checkpoint.main(words) == 0
    return folder


@pytest.fixture(scope="session")
def run(imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two checkpoints of a run in bf16 that started from the imported model."""
    folder = tmp_path_factory.mktemp("run") / "save"
    words = f"{TRAIN} --load {imported} --save {folder} --save-interval 1 --train-iters 2 --bf16"
    assert pretrain_gpt.main(f"{words} --global-batch-size 3".split()) == 0
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))
