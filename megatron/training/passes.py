"""Forward and backward of a global batch through this rank's part of the model.

    microbatches -> executor: forward step of a chunk, terms of the objective, backward -> sums

One path for every layout: a model in one piece is a pipeline of one stage. The forward step is the
program's: it gets a chunk of the model, the microbatch, what the stage before gave (None on the
first stage), and the key of the dropout masks. A stage that is not the last returns its hidden
states, the last one its tokens' losses.

Each rank has the whole samples of its replica and cuts its own positions out of them. One that
holds neither end of the model needs no samples, unless they say what attention may see; it then
knows the shape of an activation from the run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.context_parallel.partition import cut_microbatch
from megatron.core.mesh import Mesh
from megatron.core.pipeline_parallel.actions import Pair, Step
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.executor import GradientCallback, PipelineExecutor
from megatron.core.pipeline_parallel.p2p import Shape
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.schedules import Schedule
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.layers import postponing
from megatron.core.transformer.moe.balance import Balance
from megatron.core.utils import divide
from megatron.training.batches import Batch
from megatron.training.expert_loads import Counted, layer_numbers
from megatron.training.objective import Accumulator, Objective, TokenLosses
from megatron.training.timers import Timers

ForwardStep = Callable[[nn.Module, Batch, Tensor | None, DropoutKey | None], TokenLosses | Tensor]
"""(chunk, microbatch, the stage before's output, key of the dropout masks or None in evaluation) ->
the stage's output, or the losses of its tokens on the last stage."""

KeyOf = Callable[[int], DropoutKey]
"""Gives the dropout key of a microbatch of this rank, by number from 0."""

EVALUATED_AT_ONCE = 32
"""Microbatches that an evaluation schedules together: a pipeline fills and drains once for each
such lot, and its lists of actions stay short however large the set."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What travels between stages: ``[sequence / shares, samples, width]``."""

    width: int
    dtype: torch.dtype
    shares: int = 1
    """Ranks that split the sequence of an activation."""
    samples: int = 0
    sequence: int = 0
    """Of a whole microbatch, for ranks that are given none."""


class Passes:
    """This rank's chunks of a model, and the order in which microbatches go through them.

    Args:
        chunks: parts of the model, one for each stage of this rank.
        forward_step: see above.
        objective: how losses are counted; carries the mesh.
        timers: measure each kind of action.
        pipeline: the schedule and its transfers.
        placement: of the stages; one stage when absent.
        activation: what travels between stages, if there are several.
        observe: told of each step before it begins.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        forward_step: ForwardStep,
        objective: Objective,
        timers: Timers,
        *,
        pipeline: PipelineConfig | None = None,
        placement: Placement | None = None,
        activation: Activation | None = None,
        observe: Callable[[Step], None] | None = None,
    ) -> None:
        self.chunks, self.forward_step, self.objective = chunks, forward_step, objective
        self.mesh: Mesh = objective.mesh
        self.pipeline = pipeline or PipelineConfig.resolve()
        self.placement = placement or Placement(1)
        self.activation = activation or Activation(width=0, dtype=torch.float32)
        self.timers, self._observe = timers, observe
        self._numbers = layer_numbers(chunks)
        assert len(chunks) == self.placement.num_chunks, f"{len(chunks)} chunks"
        last, self._last_chunk = self.placement.owner(self.placement.num_stages - 1)
        self.holds_last = last == self.mesh.pp.coordinate
        delaying = partial(postponing, fills_waits=True)
        self._executor = PipelineExecutor(
            self.mesh.pp,
            self.mesh.device,
            self.activation.dtype,
            overlap=self.pipeline.overlap_p2p_comm,
            free_outputs=self.pipeline.deallocate_pipeline_outputs,
            postponing=postponing,
            delaying=delaying if self.pipeline.delay_wgrad_compute else None,
            around=self._around,
        )

    def accumulator(self, *, trains: bool = True) -> Accumulator:
        """Return sums that count this rank's losses, if it is one whose losses count.

        Routers have losses, and their loads are counted, where the model ``trains``.
        """
        # Losses exist on the last stage, equal on all tensor-parallel ranks: one of them counts.
        counts = self.holds_last and self.mesh.tp.coordinate == 0
        balanced = tuple(self.objective.balanced) if trains else ()
        counted = Counted()
        if trains:
            objective = self.objective
            counted = Counted(
                objective.routers,
                objective.num_experts,
                balanced,
                objective.expert_ranks,
                objective.judged_routers,
            )
        names = tuple(self.objective.auxiliary)
        return Accumulator(self.mesh, names, balanced, counts=counts, counted=counted)

    def train(
        self,
        microbatches: Iterable[Batch],
        count: int,
        sums: Accumulator,
        *,
        divisor: float,
        key_of: KeyOf,
        before_gradients: GradientCallback | None = None,
        after_gradients: GradientCallback | None = None,
    ) -> None:
        """Add the gradients of ``count`` microbatches to the parameters'.

        Args:
            microbatches: this rank's, in order.
            count: how many.
            sums: takes the terms of the objective.
            divisor: what the loss is divided by before backward; a loss scale is in it.
            key_of: gives the key of the dropout masks.
            before_gradients: told of each action of a backward before it begins.
            after_gradients: told of it afterwards.
        """
        for chunk in self.chunks:
            chunk.train()
        feed = self._feed(iter(microbatches))

        def forward(chunk: int, number: int, x: Tensor | None) -> Tensor:
            batch, share = feed.use(number), feed.share_of(number)
            balance = self._balance(chunk, batch, None if share is None else share / divisor)
            out = self.forward_step(self.chunks[chunk], batch, x, key_of(number))
            if balance is not None:
                sums.add_balanced(balance, self._numbers, share)
            if isinstance(out, Tensor):
                return out
            terms = self.objective.terms(out)
            sums.add(*terms)
            return self.objective.minimised(terms) / divisor

        self._executor.run(
            self._schedule(count),
            forward,
            feed.shape_of,
            before_gradients=before_gradients,
            after_gradients=after_gradients,
        )

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Batch], count: int, sums: Accumulator) -> None:
        """Add the terms of ``count`` microbatches to ``sums``, without dropout."""
        for chunk in self.chunks:
            chunk.eval()
        source = iter(microbatches)
        for start in range(0, count, EVALUATED_AT_ONCE):
            size = min(EVALUATED_AT_ONCE, count - start)
            feed = self._feed(source)

            def forward(chunk: int, number: int, x: Tensor | None, feed: _Feed = feed) -> Tensor:
                batch = feed.use(number)
                self._balance(chunk, batch, None)
                out = self.forward_step(self.chunks[chunk], batch, x, None)
                if isinstance(out, Tensor):
                    return out
                terms = self.objective.terms(out, empty_counts=False)
                sums.add(*terms)
                return terms.numerator

            self._executor.run(self._schedule(size).evaluation, forward, feed.shape_of)

    def _balance(self, chunk: int, batch: Batch, start: Tensor | None) -> Balance | None:
        """Tell the routers of a chunk which microbatch comes next, if there are routers."""
        if not self.objective.routers:
            return None
        balance = Balance(batch.get("loss_mask"), self.objective.balanced, start)
        self.chunks[chunk].balance = balance  # type: ignore[assignment]
        return balance

    def _schedule(self, count: int) -> Schedule:
        return self.pipeline.schedule(self.placement, count)

    def _around(self, step: Step) -> AbstractContextManager[None]:
        if self._observe is not None:
            self._observe(step)
        if isinstance(step, Pair):
            name = "combined-forward-backward-compute"
        else:
            name = "forward-compute" if step.kind == "forward" else "backward-compute"
        return self.timers.measure(name, level=2)

    def _feed(self, source: Iterator[Batch]) -> "_Feed":
        if self.holds_last:
            source = map(self.objective.prepare, source)
        return _Feed(source, len(self.chunks), self.activation, self.objective)


class _Feed:
    """Microbatches as they are asked for, each kept until every chunk has used it."""

    def __init__(
        self, source: Iterator[Batch], uses: int, activation: Activation, objective: Objective
    ) -> None:
        self._source, self._uses = source, uses
        self._activation, self._objective, self._mesh = activation, objective, objective.mesh
        self._shapes: list[Shape] = []
        self._shares: list[Tensor | None] = []
        self._kept: dict[int, tuple[Batch, int]] = {}

    def shape_of(self, number: int) -> Shape:
        """Return the shape of a microbatch's activation, which may have to be read for that."""
        self._read(number)
        return self._shapes[number]

    def share_of(self, number: int) -> Tensor | None:
        """Return the denominator of a whole microbatch, where routers have losses."""
        self._read(number)
        return self._shares[number]

    def use(self, number: int) -> Batch:
        """Return this rank's share of a microbatch."""
        self._read(number)
        batch, left = self._kept.pop(number)
        if left > 1:
            self._kept[number] = (batch, left - 1)
        return batch

    def _read(self, number: int) -> None:
        while len(self._shapes) <= number:
            batch, shape = next(self._source), self._activation
            samples, sequence = shape.samples, shape.sequence
            if "tokens" in batch:
                samples, sequence = batch["tokens"].shape
            share = None
            if self._objective.balanced:
                share = self._objective.share_of(batch["loss_mask"].sum())
            self._shares.append(share)
            local = divide(sequence, shape.shares) if shape.width else sequence
            self._kept[len(self._shapes)] = (
                cut_microbatch(batch, self._mesh.cp.coordinate, self._mesh.cp.size),
                self._uses,
            )
            self._shapes.append((local, samples, shape.width))
