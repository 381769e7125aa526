"""What a run of preprocessing did: the report for people, and the note beside each pair of files.

``PREFIX_report.json`` has counts, skipped records with their places, options and versions.
``PREFIX_KEY_document.json`` says with which tokenizer the pair was made, so that training can
compare; it is the same for any number of workers.
"""

import platform
import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from megatron.core.datasets.preprocess.encode import FIRST_PROBLEMS, Tokenizer

LIBRARIES = ("numpy", "tokenizers", "sentencepiece", "tiktoken", "pyarrow", "zstandard", "nltk")


@dataclass
class Counts:
    """Records and tokens of a run or of a share."""

    read: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> messages of the first skipped records, each with file and line."""
    documents: Counter[str] = field(default_factory=Counter)
    sequences: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    """By key."""

    def note(self, kind: str, message: str) -> None:
        """Keep the place of a skipped record, if it is among the first of its kind."""
        messages = self.first.setdefault(kind, [])
        if len(messages) < FIRST_PROBLEMS:
            messages.append(message)

    def summary(self) -> str:
        """Return the counts in one line."""
        text = f"{self.read} records read, {self.kept} kept, {self.read - self.kept} dropped"
        if self.skipped:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.skipped.items()))
            text += f" ({kinds})"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON holds them."""
        return {
            "records": {"read": self.read, "kept": self.kept},
            "skipped": {
                kind: {"count": count, "first": self.first.get(kind, [])}
                for kind, count in sorted(self.skipped.items())
            },
            "keys": {
                key: {
                    "documents": self.documents[key],
                    "sequences": self.sequences[key],
                    "tokens": self.tokens[key],
                }
                for key in self.documents
            },
        }

    def add_json(self, content: dict[str, Any]) -> None:
        """Add the counts of a share that comes after what was added so far."""
        self.read += content["records"]["read"]
        self.kept += content["records"]["kept"]
        for kind, entry in content["skipped"].items():
            self.skipped[kind] += entry["count"]
            for message in entry["first"]:
                self.note(kind, message)
        for key, entry in content["keys"].items():
            self.documents[key] += entry["documents"]
            self.sequences[key] += entry["sequences"]
            self.tokens[key] += entry["tokens"]


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what identifies a tokenizer."""
    return {
        "type": tokenizer.kind,
        "fingerprint": tokenizer.fingerprint(),
        "without_sentinels": tokenizer.without_sentinels(),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that this process has loaded."""
    found = {"python": platform.python_version()}
    found |= {name: metadata.version(name) for name in LIBRARIES if name in sys.modules}
    return found
