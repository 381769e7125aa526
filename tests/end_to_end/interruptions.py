"""Runs of a tiny model that something ends, and the run that nothing does."""

import multiprocessing
from pathlib import Path

from tests.programs import ByHand, Rows, by_hand, metrics

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --global-batch-size 4 --lr 1e-2 --mock-data --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --eval-iters 0 --device cpu --num-workers 0 "
    "--fp64 --metrics-file metrics.jsonl"
)
CONSTANT = "--lr-decay-style constant"
"""For runs whose length is not known before."""
LIMIT = 400.0
"""Seconds for a step of a test, on a machine that does much else."""


def import_once(module: str) -> None:
    """Let processes be forked from one that has imported ``module``, unless there is one already.

    Args:
        module: the program that is to be run; it imports torch.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [module, "megatron.training.pretrain"]
    )


def start(folder: Path, world: int, words: str, *planted: object) -> ByHand:
    """Start `killed_program`, which dies where ``planted`` says: rank, place and iteration."""
    given = [*(planted or (0, "nowhere", 0)), *RUN.split(), *CONSTANT.split(), *words.split()]
    return by_hand("tests.end_to_end.killed_program", given, folder=folder, world=world)


def straight(folder: Path, words: str, world: int = 1) -> dict[int, Rows]:
    """Return the rows of a run that goes to the end at once, by iteration.

    Args:
        folder: to make and to work in.
        words: after those of `RUN`.
        world: ranks.
    """
    folder.mkdir()
    run = by_hand("pretrain_gpt", f"{RUN} {words}".split(), folder=folder, world=world)
    assert run.codes(LIMIT) == [0] * world, run.errors.read_text()
    return {row["iteration"]: [row] for row in metrics(folder / "metrics.jsonl")}
