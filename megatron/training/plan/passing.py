"""Bytes that are on a rank for the sake of communication alone, and when; from configs alone.

What replicas share out comes and goes with the units of a model (`core/distributed/fully_sharded`).
With W the bytes of a unit's weights, G those of its gradients, n shares, and g and r the bytes of a
gradient as it is kept and as it travels, a backward of equal units has at most

    optim_grads             G + S      the unit's gradients, while they are summed
    optim_grads_params      G + 2 W    its gradients and weights, the next unit's weights under way
    --overlap-grad-reduce   G + S      besides: the sum of the unit before
    S = G r / (g n)         this rank's share, which comes out; where r is not g also a copy of all
                            that is sent, G r / g

and more where a unit's weights are needed twice, as a tied embedding's are: they stay from its
first use to its last. A backward in two parts sums after the second, so that the gradients of all
units of a chunk are there in between. `_Backward` goes through one unit by unit.

What there is after the last backward is in `sums`, what is gathered of activations in `gathered`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.distributed.layout import IN_FLIGHT, BufferPlan
from megatron.core.optimizer.memory import BYTES
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import divide
from megatron.training.config import RunConfig
from megatron.training.plan import stacks
from megatron.training.plan.buffer_plans import BufferKey, shares_of
from megatron.training.plan.parameter_shapes import BIASES

_END = ""
"""What follows the last unit."""


@dataclass(frozen=True)
class Passing:
    """What the backward of one chunk has besides activations, in bytes."""

    before: Mapping[str, int] = field(default_factory=dict)
    """By unit: at most between the backward of the one before and its own."""
    during: Mapping[str, int] = field(default_factory=dict)
    """By unit: at most while its backward goes on."""
    later: Mapping[str, int] = field(default_factory=dict)
    """The same of a backward that finds all gradients there, left by one of which the second part
    is to come."""
    end: int = 0
    """When all units are done."""
    gradients: int = 0
    """All gradients of the chunk, if they are there between the two parts of a backward."""
    most: int = 0
    """At any time of a backward that does not find gradients there."""

    def plus(self, more: Mapping[str, int]) -> "Passing":
        """Return this with so many bytes more in units."""
        during, later = (
            {**of, **{unit: of.get(unit, 0) + size for unit, size in more.items()}}
            for of in (self.during, self.later)
        )
        most = max([self.most, *during.values()])
        return replace(self, during=during, later=later, most=most)


def of_stage(config: RunConfig, stage: Stage, plans: Sequence[BufferPlan]) -> Passing:
    """Return what a backward of a stage has, once the order of its units is known.

    Args:
        config: the run.
        stage: what the chunk owns.
        plans: of the rank's buffers; those that the stage does not use do not count.
    """
    if config.shares == 1 or not config.replicas.shards_gradients:
        return Passing()
    return _Backward(config, stage, plans).run()


def splits(config: RunConfig) -> bool:
    """Return whether backwards are in two parts: gradients of inputs, then of weights."""
    return config.pipeline.schedule_name(config.placement).startswith("zb")


def units(model: TransformerConfig, stage: Stage) -> list[str]:
    """Return the units of a stage that activations belong to."""
    return [unit for unit in _model_order(model, stage) if unit not in ("encoder", "decoder")]


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one buffer."""

    weights: int
    gradients: int
    sum: int

    @classmethod
    def of(cls, config: RunConfig, plan: BufferPlan) -> "_Sizes":
        precision, shares = config.precision, shares_of(config, plan)
        if shares == 1:  # experts alone in their instance: whole all the time, summed at the end
            return cls(0, 0, 0)
        kept, travels = BYTES[precision.grad_dtype], BYTES[precision.reduce_dtype]
        copied = plan.size * travels if precision.reduce_dtype != precision.grad_dtype else 0
        return cls(
            plan.size * BYTES[precision.params_dtype] if config.replicas.shards_weights else 0,
            plan.size * kept,
            divide(plan.size, shares) * travels + copied,
        )


class _Backward:
    """The steps of `FullySharded` through one backward, in bytes; buffers go by number."""

    def __init__(self, config: RunConfig, stage: Stage, plans: Sequence[BufferPlan]) -> None:
        self._needs = _needs(config, stage, plans)
        self._order = [unit for unit in _backward_order(config.model, stage) if unit in self._needs]
        self._sizes = [_Sizes.of(config, plan) for plan in plans]
        self._splits = splits(config)
        self._in_flight = IN_FLIGHT if config.replicas.overlap_grad_reduce else 0
        self._recomputed = _recomputed(config, stage)
        self._uses = Counter(number for unit in self._order for number in self._needs[unit])
        # By the first unit that uses it, the last unit first; those of one unit likewise.
        self._queue = list(dict.fromkeys(n for unit in self._needs.values() for n in unit))[::-1]
        self._begun: set[int] = set()
        self._coming: set[int] = set()
        self._complete: set[int] = set()
        self._pending: list[int] = []
        self._now = self._most = self._gradients = 0
        self._before: Counter[str] = Counter()
        self._during: dict[str, int] = {}
        self._absent: dict[str, int] = {}
        """Gradients that are not there yet when a unit begins."""

    def run(self) -> Passing:
        """Go through all units."""
        everything = sum(self._sizes[number].gradients for number in self._uses)
        for unit, following in zip(self._order, [*self._order[1:], _END], strict=True):
            self._begin(unit, following)
            self._absent[unit] = everything - self._gradients
            self._end(unit, following)
        end = self._before[_END]
        for stack in {"encoder", "decoder"}.intersection(self._order):
            # Around the layers, for the norm at their end.
            after = [*self._order, _END][self._order.index(stack) + 1]
            around = max(self._before[stack], self._during[stack])
            self._before[after] = max(self._before[after], around)
        if not self._splits:
            return Passing(self._before, self._during, self._during, end, most=self._most)
        later = {unit: size + self._absent[unit] for unit, size in self._during.items()}
        end = everything + self._sizes[self._queue[0]].sum
        return Passing({}, self._during, later, end, everything, max(end, self._most))

    def _begin(self, unit: str, following: str) -> None:
        for number in self._needs[unit]:
            if number not in self._begun:
                self._begun.add(number)
                self._gradients += self._sizes[number].gradients
                self._now += self._sizes[number].gradients
                self._now += 0 if number in self._coming else self._sizes[number].weights
        for number in self._needs.get(following, ()):
            if number not in self._begun | self._coming:
                self._coming.add(number)
                self._now += self._sizes[number].weights
        if unit in self._recomputed:
            self._run_again(self._recomputed[unit])
        self._during[unit] = max(self._now, self._during.get(unit, 0))
        self._most = max(self._most, self._now)

    def _run_again(self, layers: Sequence[str]) -> None:
        """Run layers once more, each of which gives its weights up when it is done."""
        for layer in layers:
            absent = [n for n in self._needs[layer] if n not in self._coming]
            more = sum(self._sizes[number].weights for number in absent)
            self._most = max(self._most, self._now + more)
        for number in (number for layer in layers for number in self._needs[layer]):
            if number in self._coming:
                self._coming.remove(number)
                self._now -= self._sizes[number].weights

    def _end(self, unit: str, following: str) -> None:
        for number in [number for number in self._queue if number in self._needs[unit]]:
            self._uses[number] -= 1
            if not self._uses[number]:
                self._complete.add(number)
                self._now -= self._sizes[number].weights
                self._sum(following)

    def _sum(self, following: str) -> None:
        while not self._splits and self._queue and self._queue[0] in self._complete:
            number = self._queue.pop(0)
            self._now += self._sizes[number].sum
            self._before[following] = max(self._before[following], self._now)
            self._most = max(self._most, self._now)
            self._pending.append(number)
            while len(self._pending) > self._in_flight:
                done = self._sizes[self._pending.pop(0)]
                self._now -= done.gradients + done.sum


def _needs(config: RunConfig, stage: Stage, plans: Sequence[BufferPlan]) -> dict[str, list[int]]:
    """Return the numbers of the buffers that each unit of a stage uses, in the model's order."""
    tied = not config.model.untie_embeddings_and_output_weights
    needs: dict[str, list[int]] = {unit: [] for unit in _model_order(config.model, stage)}
    for number, plan in enumerate(plans):
        assert isinstance(plan.key, BufferKey)
        users = [plan.key.unit]
        if plan.key.unit == "embedding" and tied:
            vectors = any(slot.name.startswith("embedding.word") for slot in plan.slots)
            users += ["output_layer"] * vectors
        for unit in users:
            if unit in needs:
                needs[unit].append(number)
    return {unit: numbers for unit, numbers in needs.items() if numbers}


def _model_order(model: TransformerConfig, stage: Stage) -> Iterator[str]:
    """Yield the units of a stage as they stand in the model; those without parameters too."""
    if stage.is_first or stage.num_mtp_layers:
        yield "embedding"
    for stack in _stacks(model, stage):
        yield from stack
    if stage.is_last:
        yield "output_layer"
    yield from (f"mtp.layers.{depth}" for depth in range(stage.num_mtp_layers))


def _stacks(model: TransformerConfig, stage: Stage) -> list[list[str]]:
    """Return the units of each stack: biases, what is around its layers, then these.

    A stack is around its layers for the norm at their end, where a stage has that.
    """
    found: dict[str, list[str]] = {}
    parts = stacks.of(model, stage.layers)
    for layers in parts:
        name = "decoder" if stacks.is_decoders(model, layers[0]) else "encoder"
        found[name] = [stacks.name(model, number) for number in layers]
    if stage.is_last:
        found.setdefault("decoder", []).insert(0, "decoder")
    if model.has_two_stacks and model.num_layers - 1 in stage.layers:
        found["encoder"].insert(0, "encoder")
    if model.position.position_embedding_type == "relative":
        found = {name: [f"{name}{BIASES}", *units] for name, units in found.items()}
    return list(found.values())


def _backward_order(model: TransformerConfig, stage: Stage) -> Iterator[str]:
    """Yield the units of a stage as a backward comes to them, as often as it does."""
    yield from ("output_layer",) * stage.num_mtp_layers
    for depth in reversed(range(stage.num_mtp_layers)):
        yield from (f"mtp.layers.{depth}", "embedding")
    if stage.is_last:
        yield "output_layer"
    for stack in reversed(_stacks(model, stage)):
        yield from (unit for unit in stack if unit in ("encoder", "decoder"))
        yield from (unit for unit in reversed(stack) if unit not in ("encoder", "decoder"))
    if stage.is_first:
        yield from ("embedding",) * (1 + model.has_two_stacks)  # each text has its own


def _recomputed(config: RunConfig, stage: Stage) -> dict[str, list[str]]:
    """Return the layers that run once more when the backward of the last of their unit begins."""
    model = config.model
    return {
        stacks.name(model, unit[-1]): [stacks.name(model, number) for number in unit[:-1]]
        for unit in stacks.units_made_again(model, stage.layers)
    }
