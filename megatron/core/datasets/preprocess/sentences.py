"""Splitting a text into sentences, for models that pair sentences (BERT, T5).

The built-in splitter needs no data and no package: a sentence ends at ``. ! ?`` (closing quotes
included) before white space and a capital, digit or opening quote, unless the word before is a
usual abbreviation or an initial; and at a blank line. It also ends at the full-width marks of
Chinese and Japanese. nltk's Punkt models, which know abbreviations of many languages, are the
choice for more.
"""

import re
from collections.abc import Callable
from typing import Any

from megatron.core.utils import UserError

Splitter = Callable[[str], list[str]]

_END = re.compile(
    r"""(?P<mark>[.!?]+)["'”’)\]]*(?P<space>\s+)(?=["'“‘(\[]*[^\W_a-z])"""
    r"""|[。！？]["'”’」』）]*(?P<none>\s*)"""
    r"""|(?P<blank>\n\s*\n\s*)"""
)
_WORD = re.compile(r"(?:\w\.)*\w+$")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st sr jr vs etc inc ltd co corp no vol pp fig eq sec ch ed eds al e.g i.e "
    "cf jan feb mar apr jun jul aug sep sept oct nov dec gen col lt capt sgt rev hon pres gov "
    "sen rep mt ft approx dept est u.s u.k".split()
)


def simple_splitter(keep_newlines: bool) -> Splitter:
    """Return the built-in splitter.

    Args:
        keep_newlines: leave the white space after a sentence at its end, so that the sentences,
            joined, are the text; else sentences are stripped.
    """

    def split(text: str) -> list[str]:
        pieces = []
        start = 0
        for match in _END.finditer(text):
            if match["mark"] == "." and _is_abbreviation(text, start, match.start()):
                continue
            pieces.append(text[start : match.end()])
            start = match.end()
        pieces.append(text[start:])
        return _finish(pieces, keep_newlines)

    return split


def _is_abbreviation(text: str, start: int, end: int) -> bool:
    match = _WORD.search(text, max(start, end - 20), end)
    if match is None:
        return False
    word = match[0]
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


def _finish(pieces: list[str], keep_newlines: bool) -> list[str]:
    if not keep_newlines:
        pieces = [piece.strip() for piece in pieces]
    return [piece for piece in pieces if piece]


def nltk_splitter(language: str, keep_newlines: bool) -> Splitter:
    """Return nltk's Punkt splitter for a language.

    Raises:
        UserError: nltk or its model is not installed.
    """
    try:
        from nltk.tokenize import PunktTokenizer  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            "--sentence-splitter nltk needs the package nltk, 3.9 or newer (pip install nltk); "
            "--sentence-splitter simple needs nothing"
        ) from None
    try:
        punkt: Any = PunktTokenizer(language)
    except LookupError:
        raise UserError(
            f"--sentence-splitter nltk: the Punkt model for --lang {language} is not installed; "
            "`python -m nltk.downloader punkt_tab` fetches it"
        ) from None

    def split(text: str) -> list[str]:
        spans = list(punkt.span_tokenize(text))
        ends = [start for start, _ in spans[1:]] + [len(text)]
        pieces = [text[begin:end] for (begin, _), end in zip(spans, ends, strict=True)]
        return _finish(pieces, keep_newlines)

    return split
