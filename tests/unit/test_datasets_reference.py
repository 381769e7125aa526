"""Index arrays, samples and cache keys equal Megatron-core's, on data that it wrote.

The corpora ``a``, ``b``, ``c`` and everything expected (``expect.json``, ``arrays.npz``) were made
with Megatron-core 0.19.2. Vocabulary 1000, end of document 0, no padding token.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended import BlendedDataset, Dataset
from megatron.core.datasets.builder import Built, build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.datasets.token_info import TokenInfo

DATA = Path(__file__).resolve().parent.parent / "data" / "mcore_data"
EXPECT = json.loads((DATA / "expect.json").read_text())["cases"]
ARRAYS = np.load(DATA / "arrays.npz")
INFO = TokenInfo(vocab_size=1000, eod=0, identifiers={"class": "Tok", "vocab": 1000})

SOURCES: dict[str, dict[str, Any]] = {
    "one_epoch": {"data_path": ("a",)},
    "multi_epoch_sep": {"data_path": ("a",)},
    "no_extra_token": {"data_path": ("a",)},
    "blend_weights": {"data_path": ("0.5", "a", "0.3", "b", "0.2", "c")},
    "per_split": {
        "train_data_path": ("0.7", "a", "0.3", "b"),
        "valid_data_path": ("c",),
        "test_data_path": ("0.5", "b", "0.5", "c"),
    },
    "resets": {"data_path": ("a",)},
    "mock": {"mock_data": True},
}


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds the corpora: the key is made of the paths as they are given."""
    for path in DATA.glob("?.*"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(name: str, **more: Any) -> Built:
    case = EXPECT[name]
    options = dict(case["opts"])
    extra = int(options.pop("add_extra_token_to_sequence", True))
    if case["split"]:
        options["split"] = case["split"]
    config = DataConfig.resolve(
        seq_length=case["seq"], data_cache_path="cache", **SOURCES[name], **options, **more
    )
    return build_datasets(config, tuple(case["sizes"]), INFO, case["seed"], extra=extra)


def of(built: Built, split: str) -> Dataset:
    dataset = built.valid[0] if split == "valid" else getattr(built, split)
    assert dataset is not None
    return dataset


def check_index(dataset: GPTDataset, prefix: str, expected: dict[str, Any]) -> None:
    for name, array in zip(
        ("document_index", "sample_index", "shuffle_index"), dataset.index, strict=True
    ):
        assert str(array.dtype) == expected["dtypes"][name]
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        assert digest[:16] == expected["sha"][name]
        if f"{prefix}.{name}" in ARRAYS:
            np.testing.assert_array_equal(array, ARRAYS[f"{prefix}.{name}"])
    assert len(dataset) == expected["len"]
    assert json.dumps(dataset.description, indent=4) == expected["description"]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_split_is_megatrons(corpora: Path, name: str, split: str) -> None:
    expected = EXPECT[name]["splits"][split]
    dataset = of(build(name), split)
    if isinstance(dataset, BlendedDataset):
        assert expected["kind"] == "blended" and len(dataset) == expected["len"]
        assert dataset.weights == expected["weights"]
        members, numbers = dataset.index
        assert (members.dtype, numbers.dtype) == (np.int16, np.int64)
        np.testing.assert_array_equal(members, ARRAYS[f"{name}.{split}.dataset_index"])
        np.testing.assert_array_equal(numbers, ARRAYS[f"{name}.{split}.dataset_sample_index"])
        for i, member in enumerate(dataset.members):
            check_index(member, f"{name}.{split}.m{i}", expected["members"][i])
    else:
        assert expected["kind"] == "gpt"
        check_index(dataset, f"{name}.{split}", expected)
    for i, tokens in enumerate(expected["samples"]):
        assert dataset[i]["tokens"].tolist() == tokens[: EXPECT[name]["seq"]]


@pytest.mark.parametrize("name", SOURCES)
def test_the_first_item_is_megatrons(corpora: Path, name: str) -> None:
    case = EXPECT[name]
    item = of(build(name), "train")[0]
    expected = case["first_item"]
    dense = causal(item.get("cu_seqlens", np.array([0, case["seq"]])))
    arrays = {**item, "attention_mask": dense}
    for key, (shape, dtype, sha) in expected.items():
        assert list(arrays[key].shape) == shape
        assert str(arrays[key].dtype) == dtype.removeprefix("torch.")
        assert hashlib.sha256(arrays[key].tobytes()).hexdigest()[:16] == sha, key
    assert item["position_ids"].tolist() == case["position_ids0"]
    assert item["loss_mask"].tolist() == case["loss_mask0"]


def causal(bounds: np.ndarray) -> np.ndarray:
    """Return Megatron-core's dense mask, True where attention may not look."""
    document = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    order = np.arange(len(document))
    seen = (order[:, None] >= order) & (document[:, None] == document)
    return ~seen[None]


@pytest.mark.parametrize("name", SOURCES)
def test_cache_files_have_megatrons_names(corpora: Path, name: str) -> None:
    build(name)
    made = {path.name for path in Path("cache").iterdir()}
    ours = {file for file in made if file.endswith("-inputs.json")}
    assert made - ours == set(EXPECT[name]["cache_files"])


def test_tokens_of_the_first_400_samples(corpora: Path) -> None:
    for name in ("one_epoch", "multi_epoch_sep", "blend_weights"):
        for split, expected in EXPECT[name]["splits"].items():
            dataset = of(build(name), split)
            digest = hashlib.sha256()
            for i in range(min(400, len(dataset))):
                digest.update(dataset[i]["tokens"].tobytes())
            assert digest.hexdigest()[:16] == expected["tokens_sha_first400"], (name, split)
