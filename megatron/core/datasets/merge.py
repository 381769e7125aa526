"""Joining token files: the documents of several pairs, one after the other, in one new pair."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import (
    Index,
    IndexedDatasetBuilder,
    bin_path,
    idx_path,
    read_index,
)
from megatron.core.datasets.sidecar import are_alike, read_json, sidecar_path, write_json
from megatron.core.utils import Say, UserError


def find_prefixes(given: Sequence[str]) -> list[str]:
    """Return the prefixes that ``given`` names: prefixes, files of a pair, or folders of pairs.

    A pair wins over a folder of its name, which is where a run keeps the pair's index cache.

    Raises:
        UserError: a folder holds no pair, or half of one.
    """
    found: list[str] = []
    for path in given:
        if os.path.isdir(path) and not idx_path(path).exists():
            files = [file for file in Path(path).iterdir() if file.suffix in (".bin", ".idx")]
            names = sorted({str(file.with_suffix("")) for file in files if file.name[0] != "."})
            if not names:
                raise UserError(f"--input {path}: the folder holds no .bin/.idx pair")
            found += names
        else:
            found.append(path.removesuffix(".bin").removesuffix(".idx"))
    return found


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    *,
    mix_tokenizers: bool = False,
    say: Say = print,
) -> None:
    """Write the documents of all pairs, in order, as one pair that appears when it is complete.

    Raises:
        UserError: a pair is damaged, token types differ, or the notes beside the pairs say that
            different tokenizers made them (unless ``mix_tokenizers``). Nothing has been written.
    """
    output = os.path.realpath(bin_path(output_prefix))
    for prefix in prefixes:
        if os.path.realpath(bin_path(prefix)) == output:
            raise UserError(f"--output-prefix {output_prefix} is one of the inputs")
    indices = [_checked(prefix) for prefix in prefixes]
    first = indices[0]
    for index in indices[1:]:
        if index.dtype != first.dtype:
            raise UserError(
                f"{first.path} holds {first.dtype.name} tokens but {index.path} "
                f"{index.dtype.name}; encode both with the same tokenizer"
            )
    note = _joined_note(prefixes, mix_tokenizers, say)
    with IndexedDatasetBuilder(output_prefix, first.dtype) as builder:
        for prefix in prefixes:
            before = builder.num_documents
            builder.add_index(prefix)
            say(f"{prefix}: {builder.num_documents - before} documents")
        builder.seal()
        if note is not None:
            write_json(sidecar_path(output_prefix), note)
        else:
            # A note of an older pair of this name would be wrong.
            sidecar_path(output_prefix).unlink(missing_ok=True)
        builder.publish()
        say(
            f"{idx_path(output_prefix)}: {builder.num_documents} documents, "
            f"{builder.num_sequences} sequences"
        )


def _checked(prefix: str) -> Index:
    index = read_index(prefix)
    index.check_last_boundary()
    index.check_bin()
    if index.has_modes:
        raise UserError(f"{index.path} is a multimodal set; these cannot be joined")
    return index


def _joined_note(prefixes: Sequence[str], mix_tokenizers: bool, say: Say) -> dict[str, Any] | None:
    """Return what holds for all parts, or None when some part has no note."""
    missing = [prefix for prefix in prefixes if not sidecar_path(prefix).is_file()]
    notes = {p: read_json(sidecar_path(p)) for p in prefixes if p not in missing}
    made_by = {p: note.get("tokenizer", {}) for p, note in notes.items()}
    reference = next(iter(made_by), None)
    for prefix, tokenizer in made_by.items():
        expected = made_by[str(reference)]
        if not are_alike(tokenizer, expected) and not mix_tokenizers:
            raise UserError(
                f"{reference} was made with {_describe(expected)}, {prefix} with "
                f"{_describe(tokenizer)}; --mix-tokenizers joins them all the same"
            )
    if missing:
        say(f"no note of the tokenizer beside {', '.join(missing)}: the result has none either")
        return None
    if not all(are_alike(tokenizer, made_by[str(reference)]) for tokenizer in made_by.values()):
        return None
    parts = list(notes.values())
    joined = {
        name: value if all(part.get(name) == value for part in parts) else None
        for name, value in parts[0].items()
    }
    if "tokenizer" in joined:
        # Where they differ it is in sentinels, which are in no part: any of them fits all parts,
        # and best one whose note knows of sentinels, as those of older files do not.
        joined["tokenizer"] = max(made_by.values(), key=lambda one: "without_sentinels" in one)
    for name in ("documents", "sequences", "tokens"):
        joined[name] = sum(part.get(name, 0) for part in parts)
    return joined


def _describe(tokenizer: dict[str, Any]) -> str:
    mark = str(tokenizer.get("fingerprint"))[:12]
    return f"{tokenizer.get('type')} of {tokenizer.get('vocab_size')} ids ({mark})"
