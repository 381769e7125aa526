"""Running tools/preprocess_data.py, and reading what it wrote."""

import json
from pathlib import Path

import tokenizers

from megatron.core.datasets.indexed import IndexedDataset
from tools import preprocess_data

ROOT = Path(__file__).resolve().parent.parent.parent
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
EOD = 256


def write_lines(path: Path, records: list, ending: str = "\n") -> Path:
    path.write_text("".join(json.dumps(record) + ending for record in records), encoding="utf-8")
    return path


def run(*words: object) -> int:
    return preprocess_data.main([str(word) for word in words])


def tokens_of(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


def texts_of(prefix: Path) -> list[str]:
    return [bytes(t for t in ids if t < 256).decode() for ids in tokens_of(prefix)]


def report_of(prefix: Path) -> dict:
    return json.loads(Path(f"{prefix}_report.json").read_text(encoding="utf-8"))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def pair_bytes(prefix: Path) -> tuple[bytes, bytes, bytes]:
    first, second, note = (Path(f"{prefix}{ending}") for ending in (".bin", ".idx", ".json"))
    return first.read_bytes(), second.read_bytes(), note.read_bytes()


def word_tokenizer(path: Path, special: list[str], added: int = 0, closing: str = "") -> Path:
    """Write a word-level tokenizer.json, whose post-processor may close every text."""
    words = ["[UNK]", "red", "green", "blue", *special]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([f"extra{i}" for i in range(added)])
    if closing:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {closing}", special_tokens=[(closing, tokenizer.token_to_id(closing))]
        )
    tokenizer.save(str(path))
    return path


def hugging_face(path: Path) -> list[object]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]
