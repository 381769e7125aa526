"""Samples under ``--span-corruption ngrams`` equal Megatron-core's, all of every split.

Corpora and expectations in ``tests/data/mcore_t5`` were made with Megatron-core 0.16.1
(``T5MaskedWordPieceDataset`` through its builder): ``s`` is split into sentences, ``d`` has a
sequence for each document. ``sha`` is over text_enc, enc_mask, text_dec, dec_mask, labels (0 for
-1) and loss_mask of all samples in order, as int64; ``index_sha`` over the sample index.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.builder import Built, build_datasets
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.masked_samples import SentenceTexts
from megatron.core.datasets.t5 import T5Dataset
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig

DATA = Path(__file__).resolve().parent.parent / "data" / "mcore_t5"
EXPECT: dict[str, Any] = json.loads((DATA / "expect.json").read_text())
NAMES = ("encoder_tokens", "encoder_valid", "decoder_tokens", "loss_mask")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenInfo:
    """Work in a folder that holds the corpora and the vocabulary that they were made with."""
    for path in DATA.glob("?.*"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    pieces = [f"##p{i}" if i >= 20 and i % 3 == 0 else f"w{i}" for i in range(5, 200)]
    Path("vocab.txt").write_text("\n".join([*SPECIAL, *pieces]))
    config = TokenizerConfig.resolve(vocab_file="vocab.txt", vocab_extra_ids=20)
    return TokenInfo.of(build_tokenizer(config))


def build(name: str, info: TokenInfo) -> Built:
    case = EXPECT[name]
    config = DataConfig.resolve(
        data_path=tuple(case["paths"]),
        split=case["split"],
        seq_length=case["enc"],
        decoder_seq_length=case["dec"],
        mask_prob=case["mask_prob"],
        short_seq_prob=case["short"],
        mid_level_dataset_surplus=0.005,
    )
    return build_datasets(config, tuple(case["sizes"]), info, case["seed"])


@pytest.mark.parametrize("name", EXPECT)
def test_samples_are_megatrons(info: TokenInfo, name: str) -> None:
    built = build(name, info)
    for split, expected in EXPECT[name]["splits"].items():
        dataset = built.valid[0] if split == "valid" else getattr(built, split)
        assert len(dataset) == expected["len"]
        if isinstance(dataset, T5Dataset):
            assert isinstance(dataset.texts, SentenceTexts)
            index = np.ascontiguousarray(dataset.texts.index.sample, dtype=np.int64)
            assert hashlib.sha256(index.tobytes()).hexdigest()[:16] == expected["index_sha"]
        first = dataset[0]
        for ours, theirs in (("encoder_tokens", "text_enc"), ("decoder_tokens", "text_dec")):
            assert first[ours].tolist() == expected["first"][theirs]
        assert first["labels"].tolist() == [max(i, 0) for i in expected["first"]["labels"]]
        digest = hashlib.sha256()
        for i in range(len(dataset)):
            sample = dataset[i]
            for one in (*NAMES, "labels", "loss_mask"):
                digest.update(np.ascontiguousarray(sample[one], dtype=np.int64).tobytes())
        assert digest.hexdigest()[:16] == expected["sha"]
