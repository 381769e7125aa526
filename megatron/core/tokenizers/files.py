"""Reading the files that tokenizers are made of, with one clear message when they are not there."""

import importlib
import json
from pathlib import Path
from typing import Any

from megatron.core.utils import UserError


def require(value: str | None, kind: str, flag: str, expected: str) -> str:
    """Return the value of a flag without which a kind cannot be built.

    Raises:
        UserError: the flag was not given.
    """
    if not value:
        raise UserError(f"--tokenizer-type {kind} needs {flag}: {expected}")
    return value


def read_file(path: str | Path, flag: str, expected: str) -> bytes:
    """Return the bytes of the file that ``flag`` names.

    Raises:
        UserError: there is no such file, it is a folder, empty, or may not be read.
    """
    wanted = f"{flag} expects {expected}"
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"{flag} {path}: no such file; {wanted}") from None
    except (IsADirectoryError, NotADirectoryError):
        raise UserError(f"{flag} {path} is a folder or lies under a file; {wanted}") from None
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}; {wanted}") from None
    if not data:
        raise UserError(f"{flag} {path} is an empty file; {wanted}")
    return data


def parse_text(data: bytes, path: str | Path, flag: str, expected: str) -> str:
    """Return ``data`` as UTF-8 text, without a byte-order mark.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong_format(path, flag, expected, f"byte {error.start} is no UTF-8") from None


def parse_json(data: bytes, path: str | Path, flag: str, expected: str) -> Any:
    """Return ``data`` as a JSON value.

    Raises:
        UserError: it is not JSON.
    """
    text = parse_text(data, path, flag, expected)
    try:
        return json.loads(text)
    except ValueError as error:
        raise wrong_format(path, flag, expected, f"it is not JSON ({error})") from None


def wrong_format(path: str | Path, flag: str, expected: str, why: str) -> UserError:
    """Return the error that says what ``flag`` expects and why ``path`` is not it."""
    return UserError(f"{flag} {path} is not {expected}: {why}")


def import_library(name: str, kind: str) -> Any:
    """Return the library that does the work for a kind.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--tokenizer-type {kind} needs the package {name} ({error}); pip install {name}"
        ) from None
