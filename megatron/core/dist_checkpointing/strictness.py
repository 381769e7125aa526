"""What a tensor without a partner means, in Megatron's words; plain Python, for flags and loading.

A key of the run that the checkpoint lacks is *missing*, one of the checkpoint that the run lacks is
*unexpected*.
"""

from typing import Literal

Strictness = Literal[
    "raise_all",
    "raise_unexpected",
    "log_all",
    "log_unexpected",
    "assume_ok_unexpected",
    "return_all",
    "return_unexpected",
    "ignore_all",
]

LENIENT_ABOUT_MISSING = ("log_all", "return_all", "ignore_all")
STRICT_ABOUT_UNEXPECTED = ("raise_all", "raise_unexpected")
