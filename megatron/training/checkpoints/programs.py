"""Of which program's model a checkpoint is, where that is another than a run's."""

from collections.abc import Mapping
from typing import Any

TRAINS = {
    "pretrain_gpt": "a decoder alone",
    "pretrain_bert": "an encoder alone",
    "pretrain_t5": "an encoder and a decoder",
}


def program_of(config: Mapping[str, Any]) -> str | None:
    """Return the program that trains the model of a flat config; None if it does not tell."""
    if not {"decoder_num_layers", "encoder_alone"} & set(config):
        return None
    if config.get("decoder_num_layers") is not None:
        return "pretrain_t5"
    return "pretrain_bert" if config.get("encoder_alone") else "pretrain_gpt"


def other_program(stored: Mapping[str, Any], here: str | None, what: object) -> str:
    """Return what is said of a checkpoint of another program's model; "" of one of this program's.

    Args:
        stored: flat config of the run that wrote the checkpoint.
        here: the program that trains this run's model, if that is known.
        what: the checkpoint, in words.
    """
    theirs = program_of(stored)
    if theirs is None or here not in TRAINS or theirs == here:
        return ""
    return (
        f"{what} is of {theirs}.py, which trains {TRAINS[theirs]}, and this run is of {here}.py, "
        f"which trains {TRAINS[here]}: load a checkpoint of {here}.py, or run {theirs}.py"
    )
