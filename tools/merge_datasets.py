"""Join token files: the documents of several .bin/.idx pairs in one new pair.

    tools/merge_datasets.py --input folder/ other_prefix --output-prefix joined

Memory stays at the size of the index, whatever the size of the tokens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, option
from megatron.core.datasets.merge import find_prefixes, merge
from megatron.training.arguments import parse_tool, run_main

PROGRAM = "merge_datasets"


class MergeConfig(Config):
    """What to join."""

    input: tuple[str, ...] = option(aliases=("--datasets",))
    """Prefixes of pairs, or folders: all pairs in a folder, by name. Joined in this order."""

    output_prefix: str = option()
    """Path of the new pair without its ending."""

    mix_tokenizers: bool = option(False)
    """Join pairs even when the notes beside them say that different tokenizers made them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    config = parse_tool(argv, MergeConfig, PROGRAM).config
    prefixes = find_prefixes(config.input)
    merge(prefixes, config.output_prefix, mix_tokenizers=config.mix_tokenizers)
    return 0


if __name__ == "__main__":
    run_main(main, PROGRAM)
