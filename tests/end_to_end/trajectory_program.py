"""pretrain_gpt.py on the very batches of one of Megatron-core's runs, whose folder comes first."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import pretrain_gpt
from megatron.training.arguments import parse
from megatron.training.external import Loaders, Start
from megatron.training.pretrain import Program, pretrain
from megatron.training.processes.launch import discover


def main(words: list[str]) -> int:
    """Run the program and return its exit code."""
    folder, *rest = words
    with np.load(Path(folder) / "batches.npz") as arrays:
        # Stored as [iteration, microbatch, sample, position]; samples are taken in that order.
        rows = {key: torch.from_numpy(arrays[key]).flatten(0, 2) for key in arrays}

    def loader(start: Start) -> Iterator[dict[str, torch.Tensor]]:
        size = start.micro_batch_size
        first = start.consumed_samples + start.replica * size
        for begin in range(first, len(rows["tokens"]), size * start.replicas):
            yield {key: values[begin : begin + size] for key, values in rows.items()}

    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=lambda *arguments: Loaders(train=loader),
        forward_step=pretrain_gpt.forward_step,
    )
    place = discover(os.environ)
    return pretrain(parse(rest, world_size=place.world_size), place, program)
