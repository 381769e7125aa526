"""A program with loaders of its own, whose microbatches have lengths of their own."""

import itertools
import os
from collections.abc import Iterator
from functools import partial

import torch

import pretrain_gpt
from megatron.training.arguments import parse
from megatron.training.external import Loaders, Start
from megatron.training.pretrain import pretrain
from megatron.training.processes.launch import discover
from megatron.training.program import Program


def loader(start: Start, offset: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield microbatches of 8, 12 and 16 positions in turn, some of which do not count."""
    first = start.consumed_samples + start.replica * start.micro_batch_size
    for number in itertools.count(first, start.micro_batch_size * start.replicas):
        samples = torch.arange(number, number + start.micro_batch_size)
        length = 8 + 4 * (number // start.micro_batch_size % 3)
        text_BS = (offset + samples[:, None] * 7 + torch.arange(length + 1)) % 60
        mask_BS = (text_BS[:, 1:] % 5 != 0).float()
        yield {"tokens": text_BS[:, :-1], "labels": text_BS[:, 1:], "loss_mask": mask_BS}


def main(words: list[str]) -> int:
    """Run the program and return its exit code."""
    loaders = Loaders(train=partial(loader, offset=0), valid=[partial(loader, offset=3)])
    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=lambda *arguments: loaders,
        forward_step=pretrain_gpt.forward_step,
    )
    place = discover(os.environ)
    return pretrain(parse(words, world_size=place.world_size), place, program)
