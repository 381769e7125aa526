"""Real iterations move exactly the calls and bytes of the closed forms, on every rank."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import pretrain_gpt
from megatron.core import comm, rng
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.tokenizers.vocabulary import Vocabulary, resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.batches import Batch
from megatron.training.build import build_passes
from megatron.training.config import RunConfig
from megatron.training.health import Health
from megatron.training.objective import Totals
from megatron.training.plan import buffer_plans, traffic
from megatron.training.plan.traffic_passes import Cost, Costs
from megatron.training.processes.setup import connected_mesh
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from tests.harness import Pool

IDS = 101
BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    "--micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size {IDS - 1} --make-vocab-size-divisible-by 8 --max-position-embeddings 20 "
    "--attention-dropout 0 --hidden-dropout 0 --device cpu"
)
LLAMA = (
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 6 --qk-head-dim 4 --qk-pos-emb-head-dim 2 "
    "--v-head-dim 3 --position-embedding-type rope --qk-layernorm"
)
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
SCHEDULES = {
    "gpipe": "--pipeline-schedule gpipe",
    "1f1b": "--pipeline-schedule 1f1b",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "zb-h1": "--pipeline-schedule zb-h1",
    "zb-v": "--pipeline-schedule zb-v",
}
# World size and flags; the replicas follow.
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
RECOMPUTED: list[tuple[int, str]] = [
    (2, f"{TP} 2 {FULL} uniform --distribute-saved-activations --mtp-num-layers 1 {LLAMA}"),
    (2, f"{TP} 2 --sequence-parallel --tp-comm-overlap {SELECTIVE} mlp layernorm"),
    (4, f"{TP} 2 --sequence-parallel {CP} 2 {LATENT} {SELECTIVE} mla_up_proj core_attn mlp"),
]
LAYOUTS: list[tuple[int, str]] = [
    *RECOMPUTED,
    (1, ""),
    (2, f"{TP} 2"),
    (2, f"{TP} 2 --fp64 --qk-layernorm --no-calculate-per-token-loss"),
    (2, f"{TP} 2 --sequence-parallel"),
    (2, f"{TP} 2 --sequence-parallel {LLAMA} --bf16"),
    (2, f"{TP} 2 --fp16 --loss-scale 16 --fp16-lm-cross-entropy --fp32-residual-connection"),
    (2, f"{PP} 2 --bf16 --fp32-residual-connection"),
    (2, f"{TP} 2 {LATENT} --q-lora-rank 10"),
    (2, f"{TP} 2 --sequence-parallel {LATENT}"),
    (2, f"{TP} 2 --sequence-parallel --tp-comm-overlap"),
    (4, f"{TP} 4 --sequence-parallel --tp-comm-overlap {LATENT} --q-lora-rank 10 --bf16"),
    (4, f"{TP} 4 {LLAMA}"),
    (4, f"{TP} 4 --sequence-parallel --group-query-attention --num-query-groups 1 --qk-layernorm"),
    *((2, f"{PP} 2 {words}") for words in SCHEDULES.values()),
    *(
        (4, f"{PP} 4 {SCHEDULES[name]} --num-layers 8 {LLAMA} --bf16")
        for name in ("1f1b", "interleaved", "zb-v")
    ),
    (2, f"{PP} 2 --pipeline-model-parallel-layout Ett|t|t|L"),
    *((2, f"{CP} 2 --cp-comm-type {kind}") for kind in ("p2p", "all_gather", "a2a")),
    *((2, f"{CP} 2 --cp-comm-type {kind} --bf16 {LLAMA}") for kind in ("p2p", "all_gather")),
    (2, f"{CP} 2 --cp-comm-type p2p a2a all_gather a2a --no-calculate-per-token-loss"),
    (4, f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    (4, f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4"),
    (4, f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1 {LLAMA}"),
    (4, f"{CP} 4 --cp-comm-type a2a {LLAMA} --bf16"),
    (2, "--ddp-bucket-size 2000"),
    (2, "--ddp-num-buckets 5 --overlap-grad-reduce --bf16 --qk-layernorm"),
    (
        3,
        "--ddp-num-buckets 4 --softmax-type learnable --log-params-norm "
        "--log-grad-norms-by-group --decoupled-lr 1e-2",
    ),
    (
        2,
        "--ddp-bucket-size 900 --qk-layernorm --apply-wd-to-qk-layernorm --softmax-type learnable",
    ),
    (4, f"{PP} 2 {SCHEDULES['zb-v']} --ddp-num-buckets 3 --overlap-grad-reduce"),
    (3, "--use-torch-fsdp2 --bf16 --qk-layernorm --decoupled-lr 1e-2 --apply-wd-to-qk-layernorm"),
    (2, "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --bf16 --grad-reduce-in-bf16"),
    (4, f"--use-torch-fsdp2 {TP} 2 --sequence-parallel {LLAMA} --num-query-groups 1 --bf16"),
    (4, f"--use-torch-fsdp2 --num-distributed-optimizer-instances 2 {CP} 2"),
    (
        4,
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer --bf16 "
        "--grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
    ),
    *(
        (2, f"--use-torch-fsdp2 {words} --position-embedding-type rope --mtp-num-layers {depths}")
        for words in ("", "--untie-embeddings-and-output-weights")
        for depths in (1, 2)
    ),
    *(
        (2, f"--use-torch-fsdp2 {words} --position-embedding-type rope --mtp-num-layers 3")
        for words in (
            "--torch-fsdp2-no-reshard-after-forward",
            "--torch-fsdp2-no-reshard-after-forward --untie-embeddings-and-output-weights",
        )
    ),
    (4, f"{TP} 2 --sequence-parallel {CP} 2 --cp-comm-type a2a {LLAMA}"),
    (4, f"{TP} 2 --sequence-parallel {CP} 2 --cp-comm-type a2a p2p all_gather a2a {LATENT}"),
    (4, f"{TP} 2 {PP} 2 {SCHEDULES['interleaved']} --ddp-bucket-size 1500"),
    (8, f"{TP} 2 {PP} 2 --overlap-grad-reduce --ddp-num-buckets 3 --use-tp-pp-dp-mapping"),
    (8, f"{TP} 4 --sequence-parallel {CP} 2 {LLAMA} --no-calculate-per-token-loss"),
    (8, f"{PP} 2 {CP} 2 {SCHEDULES['zb-v']} --no-calculate-per-token-loss"),
    (16, f"{TP} 2 --sequence-parallel {PP} 2 {CP} 2 {SCHEDULES['interleaved']} {LLAMA}"),
]


class Seen(NamedTuple):
    """What one rank did."""

    coordinates: dict[str, int]
    training: list[Costs]
    """Of each iteration."""
    evaluation: Costs
    buckets: list[list[tuple[int, int]]]


def config_of(world: int, words: str) -> RunConfig:
    batch = f"--global-batch-size {12 if world == 3 else 16}"
    return parse(f"{BASE} {batch} {words}".split(), world_size=world).config


def vocabulary_of(config: RunConfig) -> Vocabulary:
    return resolve_vocabulary(config.tokenizer, IDS, config.parallel.tensor_model_parallel_size)


def step_of(config: RunConfig, mesh: Mesh) -> TrainStep:
    """Return what runs an iteration, of the program's own model."""
    stages = [config.stages[at] for at in config.placement.positions(mesh.pp.coordinate)]
    chunks = pretrain_gpt.build_model(config, mesh, vocabulary_of(config), stages)
    for chunk in chunks:
        rng.initialize(chunk, 1)
    passes = build_passes(config, mesh, chunks, pretrain_gpt.forward_step, Timers(0))
    optimizer = build_optimizer(config.optimizer, chunks, mesh, config.precision, config.replicas)
    norms = config.logging.log_grad_norms_by_group
    return TrainStep(passes, optimizer, Health(config.health), seed=1, group_norms=norms)


def microbatches(config: RunConfig, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(2)
    shape = (config.training.micro_batch_size, config.data.seq_length)
    for _ in range(count):
        tokens, labels = (torch.randint(IDS, shape, generator=generator) for _ in range(2))
        yield {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(shape)}


def counted(found: comm.Traffic) -> Costs:
    return {key: Cost(calls, found.bytes[key]) for key, calls in found.calls.items()}


def work(rank: int, world: int, words: str, evaluated: int) -> Seen:
    """Train two iterations, of which the second gathers shared-out weights ahead, and evaluate."""
    config = config_of(world, words)
    mesh = connected_mesh(config, torch.device("cpu"))
    step = step_of(config, mesh)
    count = config.batch_sizes.final // config.samples_per_pass
    training = []
    for number in (1, 2):
        plan = Plan(
            iteration=number,
            samples=range(config.batch_sizes.final),
            learning_rate=1e-3,
            weight_decay=0.1,
        )
        with comm.counting() as found:
            data = microbatches(config, count)
            step.run(plan, data, count, 1.0, lambda: (False, False, False))
            if config.logging.log_params_norm:  # the loop's own
                step.optimizer.norms.weights()
        training.append(counted(found))
    with comm.counting() as found:
        sums = step.passes.accumulator()
        step.passes.evaluate(microbatches(config, evaluated), evaluated, sums)
        sums.reduce()
    buckets = [list(buffer.plan.buckets) for buffer in step.optimizer.data_parallel.buffers]
    coordinates = {name: axis.coordinate for name, axis in mesh.axes.items()}
    return Seen(coordinates, training, counted(found), buckets)


LARGE = next(case for case in LAYOUTS if case[0] == 8)


@pytest.mark.parametrize(
    ("world", "words"),
    # Of the many processes of large worlds one case is enough by default.
    [
        pytest.param(*case, marks=pytest.mark.slow) if case[0] >= 8 and case != LARGE else case
        for case in LAYOUTS
    ],
    ids=lambda value: str(value) or "plain",
)
def test_an_iteration_moves_what_the_closed_form_says(pool: Pool, world: int, words: str) -> None:
    config = config_of(world, words)
    rows = vocabulary_of(config).padded_rows
    count, evaluated = config.batch_sizes.final // config.samples_per_pass, 3
    for rank, seen in enumerate(pool.run(world, work, world, words, evaluated, timeout=180)):
        chunks = buffer_plans.chunk_buffers(config, rows, seen.coordinates["pp"])
        planned = [list(plan.buckets) for chunk in chunks for plan in chunk]
        assert seen.buckets == planned, f"buckets of rank {rank}"
        expected = traffic.expected(config, rows, count, seen.coordinates)
        for number, found in enumerate(seen.training, 1):
            assert found == expected, f"rank {rank}, iteration {number}"
        assert seen.evaluation == traffic.expected_evaluation(
            config, rows, evaluated, seen.coordinates
        )


def test_totals_are_as_many_as_the_objective_sums() -> None:
    assert [*Totals._fields][traffic.TOTALS :] == ["auxiliary", "loads"]
