"""Evaluation: the objective over held-out samples, without dropout and without gradients.

Each set has its own position, which checkpoints store, so that a resumed run evaluates on the same
samples as one that was not interrupted. A set that is evaluated whole has no position.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.mesh import Mesh
from megatron.training import batches
from megatron.training.batches import Batches, NoBatches, Samples
from megatron.training.external import ExternalBatches, Loader, open_loader
from megatron.training.garbage import Garbage
from megatron.training.passes import Passes
from megatron.training.records.metrics import Metrics
from megatron.training.state import TrainState

LOSS = "lm loss"
Split = Literal["valid", "test"]
Reader = Callable[[Samples, Iterable[Sequence[int]]], Batches | NoBatches]
"""(data set, sample numbers of each microbatch) -> batches."""


@dataclass
class EvaluationSet:
    """Held-out samples and how far they have been read."""

    name: str
    """Of the set among several; empty when it is the only one."""
    batches: Batches | ExternalBatches | NoBatches
    count: int
    """Microbatches of this rank in one evaluation."""
    samples: int
    """Samples of one evaluation, over all ranks; 0 when the position does not move."""
    consumed_samples: int


def open_set(
    dataset: Samples | Loader,
    mesh: Mesh,
    *,
    name: str,
    eval_iters: int,
    global_batch_size: int,
    micro_batch_size: int,
    consumed_samples: int,
    read: Reader,
) -> EvaluationSet:
    """Start reading a set at its position; ``eval_iters`` -1 takes all of it each time."""
    # A batch that replicas do not divide is rounded down, as in training.
    stride = micro_batch_size * mesh.dp.size
    size = max(stride, global_batch_size // stride * stride)
    count, samples = eval_iters * (size // stride), eval_iters * size
    if callable(dataset):
        taken = open_loader(dataset, mesh, micro_batch_size, consumed_samples)
        return EvaluationSet(name, taken, count, samples, consumed_samples)
    length = len(dataset)
    if eval_iters == -1:
        numbers = batches.whole_numbers(mesh, micro_batch_size, length)
        count, samples = batches.whole_count(mesh, micro_batch_size, length), 0
    else:
        numbers = batches.evaluation_numbers(
            mesh, size, micro_batch_size, consumed_samples=consumed_samples, length=length
        )
    return EvaluationSet(name, read(dataset, numbers), count, samples, consumed_samples)


class Evaluator:
    """Evaluates one model on sets of samples."""

    def __init__(
        self, passes: Passes, empty_unused: Callable[[int], None] = lambda level: None
    ) -> None:
        self._passes, self._empty_unused = passes, empty_unused

    def run(self, held_out: EvaluationSet) -> dict[str, float]:
        """Return the losses by name, and move the set's position on; a collective."""
        sums = self._passes.accumulator(trains=False)
        self._passes.evaluate(held_out.batches.take(held_out.count), held_out.count, sums)
        held_out.consumed_samples += held_out.samples
        totals = sums.reduce()
        self._empty_unused(1)
        return {LOSS: totals.loss, **totals.auxiliary_losses}


class HeldOut:
    """All that a run evaluates on: its validation sets, and the test set at the end."""

    def __init__(
        self,
        evaluator: Evaluator,
        validation: Sequence[EvaluationSet],
        test: Sequence[EvaluationSet],
        metrics: Metrics,
        garbage: Garbage,
    ) -> None:
        self._evaluator, self._metrics, self._garbage = evaluator, metrics, garbage
        self._sets: dict[Split, Sequence[EvaluationSet]] = {"valid": validation, "test": test}

    @property
    def validates(self) -> bool:
        """Return whether there is anything to evaluate on during training."""
        return bool(self._sets["valid"])

    def validate(self, state: TrainState) -> None:
        """Evaluate on the validation sets, during training; a collective."""
        self._evaluate("valid", f"iteration {state.iteration}", state)

    def finish(self, state: TrainState) -> None:
        """Evaluate on the validation sets and on the test set, at the end; a collective."""
        self._evaluate("valid", f"iteration {state.iteration} on validation set", state)
        self._evaluate("test", f"iteration {state.iteration} on test set", state)

    def _evaluate(self, split: Split, where: str, state: TrainState) -> None:
        sets = self._sets[split]
        if not sets:
            return
        self._garbage.evaluation()
        for held_out in sets:
            self._metrics.validation(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                losses=self._evaluator.run(held_out),
                where=where,
                split=split,
                dataset=held_out.name,
            )
        self._garbage.evaluation()
        state.evaluated |= {f"{split} {one.name}".strip(): one.consumed_samples for one in sets}
