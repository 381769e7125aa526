"""The note beside a pair of token files: how it was made, in JSON.

``PREFIX.json`` lies beside ``PREFIX.bin`` and ``PREFIX.idx`` where preprocessing made them: the
tokenizer with its fingerprints, documents and tokens. Pairs from elsewhere have none.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.utils import UserError, atomic_path


def sidecar_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the file that says how the pair ``prefix`` was made."""
    return Path(f"{os.fspath(prefix)}.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that an earlier run wrote.

    Raises:
        UserError: the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; mend it or take it away") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return content


def are_alike(tokenizer: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two tokenizers, as notes describe them, give texts equal ids.

    They may differ in sentinels that were added after the vocabulary: no text is encoded to these.
    Notes of older files have no fingerprint without them; the whole one is equal to it then if no
    sentinels were added.
    """
    mine, others = (
        {one.get("fingerprint"), one.get("without_sentinels", one.get("fingerprint"))}
        for one in (tokenizer, other)
    )
    return not mine.isdisjoint(others)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    with atomic_path(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
