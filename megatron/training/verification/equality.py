"""A few iterations of a run on its layout, to be compared with those of another layout.

`train` does what a training run does (passes, sums over replicas, optimizer, schedule) on made-up
samples, and returns this rank's share of what came out; `run` has all ranks of a worker pool do
it, and puts their shares together. `outcomes` compares.

A comparison to 1e-10 is honest only where rounding stays rounding. Adam divides a gradient by its
own size, so one that is nothing but rounding (that of a key's bias, which no softmax sees) becomes
a step as large as any other: a run that is compared needs SGD, or an epsilon far above rounding,
such as `small_run.ADAM_EPS`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import comm, sharding
from megatron.core.datasets.gpt import SampleOptions, make_sample
from megatron.core.dist_checkpointing.plan import of_flat
from megatron.core.distributed.pieces import Member
from megatron.core.distributed.replicas import Replicas
from megatron.core.mesh import Mesh
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training import data as run_data
from megatron.training.batches import (
    UNKNOWN,
    Batches,
    NoBatches,
    Samples,
    training_numbers,
)
from megatron.training.build import build_chunks, build_passes, build_run_optimizer
from megatron.training.config import RunConfig
from megatron.training.health import Health
from megatron.training.planner import Planner
from megatron.training.processes import setup
from megatron.training.program import Program
from megatron.training.state import TrainState
from megatron.training.step import TrainStep
from megatron.training.timers import Timers
from megatron.training.verification.outcomes import (
    Array,
    Outcome,
    Piece,
    Share,
    Traffic,
    join,
)
from megatron.training.verification.worker_pool import Pool


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run to check; it can be pickled, so that workers get it as an argument."""

    config: RunConfig
    program: Program
    vocabulary: int
    """Ids in use; the last one ends documents."""

    @property
    def samples(self) -> Samples:
        """Return the samples to train on."""
        data = self.config.data
        seed, count = self.config.training.seed, self.config.total_samples
        if data.bert.masked_words:
            return MaskedUp(
                data.seq_length,
                self.vocabulary,
                seed,
                count,
                in_order=data.bert.bert_binary_head,
            )
        if data.t5.decoder_seq_length is not None:
            lengths = data.seq_length, data.t5.decoder_seq_length
            return MadeUpPairs(lengths, self.vocabulary, seed, count)
        options = SampleOptions(
            seq_length=data.seq_length,
            vocab_size=self.vocabulary,
            eod=self.vocabulary - 1,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
        return MadeUp(options, self.config.training.seed, self.config.total_samples)


class MadeUp:
    """Samples that are pure functions of their number: random tokens with short documents.

    Every sample masks another number of its first tokens, so that microbatches weigh differently.
    """

    def __init__(self, options: SampleOptions, seed: int, count: int) -> None:
        self._options, self._seed, self._count = options, seed, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        generator, length = np.random.default_rng((self._seed, number)), self._options.seq_length
        text = generator.integers(0, self._options.vocab_size, length + 1)
        text[generator.random(length + 1) < 1 / 6] = self._options.vocab_size - 1
        sample = make_sample(text, self._options)
        sample["loss_mask"][: generator.integers(0, length // 2 + 1)] = 0
        return sample


class MaskedUp:
    """The same for an encoder alone: random tokens of which some are to be predicted, and padding.

    Of every fifth sample the order of its parts is unknown, and nothing of it masked.
    """

    def __init__(
        self, seq_length: int, vocab_size: int, seed: int, count: int, *, in_order: bool
    ) -> None:
        self._length, self._vocab_size = seq_length, vocab_size
        self._seed, self._count, self._in_order = seed, count, in_order

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        generator, length = np.random.default_rng((self._seed, number)), self._length
        count = int(generator.integers(length // 2, length + 1))
        is_token, counts = np.arange(length) < count, number % 5 != 4
        sample: dict[str, Any] = {
            "tokens": generator.integers(0, self._vocab_size, length) * is_token,
            "token_types": np.where(np.arange(length) < count // 2, 0, 1) * is_token,
            "labels": generator.integers(0, self._vocab_size, length),
            "loss_mask": ((generator.random(length) < 0.3) & is_token & counts).astype(np.float32),
            "cu_seqlens": np.array([0, count, length], dtype=np.int32),
        }
        if self._in_order:
            sample["sentence_order"] = generator.integers(0, 2) if counts else np.array(UNKNOWN)
        return {name: np.asarray(array) for name, array in sample.items()}


class MadeUpPairs:
    """The same for an encoder and a decoder; every sample has another number of padded places."""

    def __init__(self, lengths: tuple[int, int], vocabulary: int, seed: int, count: int) -> None:
        self._lengths, self._vocabulary = lengths, vocabulary
        self._seed, self._count = seed, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        generator, sample = np.random.default_rng((self._seed, number)), dict[str, Any]()
        for name, length in zip(("encoder", "decoder"), self._lengths, strict=True):
            sample[f"{name}_tokens"] = generator.integers(0, self._vocabulary, length)
            used = generator.integers(1, length + 1)
            sample[f"{name}_valid"] = np.arange(length) < used
        sample["labels"] = generator.integers(0, self._vocabulary, self._lengths[1])
        sample["loss_mask"] = sample.pop("decoder_valid").astype(np.float32)
        return sample


def train(case: Case, mesh: Mesh) -> Share:
    """Run the iterations of ``case`` on one rank; a collective of the world."""
    config, seed = case.config, case.config.training.seed
    tp = config.parallel.tensor_model_parallel_size
    vocabulary = resolve_vocabulary(config.tokenizer, case.vocabulary, tp)
    chunks = build_chunks(config, mesh, vocabulary, case.program.build_model)
    optimizer = build_run_optimizer(config, chunks, mesh)
    passes = build_passes(config, mesh, chunks, case.program.forward_step, Timers(0))
    step = TrainStep(passes, optimizer, Health(config.health), seed=seed)
    batches = _batches(config, mesh, case.samples)
    planner, state = Planner(config, mesh), TrainState()
    losses: list[float] = []
    norms: list[float] = []
    gradients: list[Piece] = []
    traffic: Traffic = {}

    def seen() -> tuple[bool, bool, bool]:
        # Asked when all sums are done and before the optimizer, which scales the gradients.
        if not losses:
            replicas = optimizer.data_parallel
            scale = step.divisor(nominal) * replicas.divisor / nominal
            gradients.extend(_pieces(replicas.gradients(), scale))
            # What is not trained, such as biases of experts, has none.
            gradients.extend(
                Piece(piece.name, piece.box, np.zeros_like(piece.values))
                for piece in _weights(replicas, frozen=True)
            )
        return False, False, False

    for iteration in range(1, config.total_iterations + 1):
        plan, count, nominal = planner.after(state)
        with comm.counting() as counted:
            result = step.run(plan, batches.take(count), count, nominal, seen)
        traffic = {key: (counted.calls[key], counted.bytes[key]) for key in counted.calls}
        assert result.grad_norm is not None, f"iteration {iteration} was skipped"
        losses += [result.totals.loss, *result.totals.auxiliary_losses.values()]
        norms.append(float(result.grad_norm))
        state.iteration, state.consumed_samples = iteration, plan.samples.stop
    return Share(
        losses=losses,
        norms=norms,
        shapes={p.name: p.shape for p in map(sharding.of, optimizer.data_parallel.parameters)},
        gradients=gradients,
        weights=_weights(optimizer.data_parallel),
        traffic=traffic,
    )


def train_on_rank(rank: int, case: Case) -> Share:
    """Run `train` as a job of a worker pool."""
    assert dist.get_world_size() == case.config.process.world_size
    return train(case, setup.connected_mesh(case.config, torch.device("cpu")))


def run(pool: Pool, case: Case, timeout: float = 120.0) -> Outcome:
    """Train ``case`` on its layout in a worker pool.

    Raises:
        RankFailed: a rank raised.
        TimeoutError: it did not end in time.
    """
    world = case.config.process.world_size
    return join(pool.run(world, train_on_rank, case, timeout=timeout))


def _batches(config: RunConfig, mesh: Mesh, samples: Samples) -> Batches | NoBatches:
    """Return this rank's microbatches."""
    if not run_data.is_read(config, mesh.pp.coordinate):
        return NoBatches()
    numbers = training_numbers(
        mesh,
        config.batch_sizes,
        config.training.micro_batch_size,
        iteration=0,
        consumed_samples=0,
        train_iters=config.total_iterations,
        skipped=frozenset(),
        order=lambda position: position,
    )
    without = run_data.unneeded(config.data)
    return Batches(samples, numbers, mesh.device, num_workers=0, without=without)


def _pieces(parts: Iterable[tuple[Member, Tensor]], scale: float) -> list[Piece]:
    """Return ``scale`` times flat parts of parameters, in float64, as boxes of logical tensors."""
    pieces = []
    for member, flat in parts:
        record = member.record
        item = of_flat(record.name, record, member.shape, member.start, flat)
        pieces += [
            Piece(record.name, piece.box, scale * _copy(piece.tensor)) for piece in item.pieces
        ]
    return pieces


def _weights(replicas: Replicas, *, frozen: bool = False) -> list[Piece]:
    """Return copies, in float64, of the weights that this rank computes with.

    All of them, or with ``frozen`` only those that are not trained.
    """
    return [
        Piece(record.name, region.logical, _copy(p[sharding.box_slices(region.local)]))
        for p in replicas.whole_parameters()
        if not (frozen and p.requires_grad)
        for record in [sharding.of(p)]
        for region in record.regions
    ]


def _copy(values: Tensor) -> Array:
    return values.detach().to("cpu", torch.float64, copy=True).numpy()
