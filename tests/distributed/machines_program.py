"""pretrain_gpt.py where two ranks make a machine: ``{machine}`` in a word is its number."""

import os
import sys

import pretrain_gpt

RANKS = 2
"""On each machine."""


def main(words: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    given = sys.argv[1:] if words is None else words
    machine = int(os.environ["RANK"]) // RANKS
    return pretrain_gpt.main([word.replace("{machine}", str(machine)) for word in given])
