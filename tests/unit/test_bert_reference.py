"""Samples under ``--masked-words`` equal Megatron-core's, all of every split.

Expectations in ``tests/data/mcore_bert`` were made with Megatron-core 0.16.1
(``BERTMaskedWordPieceDataset`` through its builder, as its ``pretrain_bert.py`` sets it) from the
corpora in ``tests/data/mcore_t5``: ``s`` is split into sentences, ``d`` has a sequence for each
document. ``sha`` is over text, types, labels (0 for -1), loss_mask, validity and is_random of all
samples in order, as int64; ``index_sha`` over the sample index. Validity is by place: Megatron-core
takes a token that the masking replaced by [PAD] for padding, in ``clash`` of the samples.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.bert import BertDataset
from megatron.core.datasets.builder import Built, build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig

DATA = Path(__file__).resolve().parent.parent / "data"
EXPECT: dict[str, Any] = json.loads((DATA / "mcore_bert" / "expect.json").read_text())
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenInfo:
    """Work in a folder that holds the corpora and the vocabulary that they were made with."""
    for path in (DATA / "mcore_t5").glob("?.*"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    pieces = [f"##p{i}" if i >= 20 and i % 3 == 0 else f"w{i}" for i in range(5, 200)]
    Path("vocab.txt").write_text("\n".join([*SPECIAL, *pieces]))
    return TokenInfo.of(build_tokenizer(TokenizerConfig.resolve(vocab_file="vocab.txt")))


def build(name: str, info: TokenInfo) -> Built:
    case = EXPECT[name]
    config = DataConfig.resolve(
        masked_words=True,
        data_path=tuple(case["paths"]),
        split=case["split"],
        seq_length=case["seq"],
        mask_prob=case["mask_prob"],
        short_seq_prob=case["short"],
        bert_binary_head=case["head"],
    )
    return build_datasets(config, tuple(case["sizes"]), info, case["seed"])


@pytest.mark.parametrize("name", EXPECT)
def test_samples_are_megatrons(info: TokenInfo, name: str) -> None:
    built = build(name, info)
    for split, expected in EXPECT[name]["splits"].items():
        dataset = built.valid[0] if split == "valid" else getattr(built, split)
        assert len(dataset) == expected["len"]
        if isinstance(dataset, BertDataset):
            index = np.ascontiguousarray(dataset.texts.index.sample, dtype=np.int64)
            assert hashlib.sha256(index.tobytes()).hexdigest()[:16] == expected["index_sha"]
        first, theirs = dataset[0], expected["first"]
        assert first["tokens"].tolist() == theirs["text"]
        assert first["token_types"].tolist() == theirs["types"]
        assert first["labels"].tolist() == [max(i, 0) for i in theirs["labels"]]
        swapped, digest = 0, hashlib.sha256()
        for i in range(len(dataset)):
            sample = dataset[i]
            _, count, length = sample["cu_seqlens"].tolist()
            order = int(sample.get("sentence_order", 0))
            parts = [sample[one] for one in ("tokens", "token_types", "labels", "loss_mask")]
            for part in (*parts, np.arange(length) < count, [order]):
                digest.update(np.ascontiguousarray(part, dtype=np.int64).tobytes())
            swapped += order
        assert swapped == expected["swapped"]
        assert digest.hexdigest()[:16] == expected["sha"]
