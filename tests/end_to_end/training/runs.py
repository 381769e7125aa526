"""Runs of pretrain_gpt.py in the process of a test, on a tiny corpus."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.rng import DropoutKey
from megatron.training.objective import TokenLosses

VOCABULARY = 60


def flags(corpus: str, *more: object) -> list[str]:
    """Return a tiny model's command line, dropout on; later flags win."""
    model = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16"
    batch = "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2"
    data = f"--data-path {corpus} --split 80,10,10 --num-workers 0"
    rest = "--tokenizer-type NullTokenizer --vocab-size 60 --device cpu --eval-iters 0"
    words = f"{model} {batch} {data} {rest} --log-interval 1 --metrics-file metrics.jsonl"
    return [*words.split(), *map(str, more)]


def rows(path: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def status(folder: str = "save") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "run_status.json").read_text())
    return content


def tensors(folder: str) -> dict[str, torch.Tensor]:
    with Checkpoint(Path(folder)) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.index.tensors}


def same(row: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on time or on restarts."""
    timed = ("elapsed_ms", "tokens_per_second", "memory_bytes", "attempt", "throughput")
    return {name: value for name, value in row.items() if name not in timed}


class Interfering:
    """A forward step that does something at one iteration."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, iteration: int, act: Callable[[], object]
    ) -> None:
        self.iteration, self.act = iteration, act
        self._original = pretrain_gpt.forward_step
        monkeypatch.setattr(pretrain_gpt, "forward_step", self)

    def __call__(self, model: Any, batch: Any, x: Any, dropout: DropoutKey | None) -> TokenLosses:
        losses, mask, *_ = self._original(model, batch, x, dropout)
        if dropout is not None and dropout.iteration == self.iteration:
            factor = self.act()
            losses = losses * (factor if isinstance(factor, float) else 1.0)
        return TokenLosses(losses, mask)
