"""An encoder-decoder moves exactly the calls and bytes of the closed forms, on every rank."""

import pytest
import torch

import pretrain_t5
from megatron.core import comm, rng
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.batches import Batch
from megatron.training.build import build_passes
from megatron.training.config import RunConfig
from megatron.training.health import Health
from megatron.training.plan import buffer_plans, traffic
from megatron.training.plan.traffic_passes import Cost, Costs
from megatron.training.processes.setup import connected_mesh
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from tests.harness import Pool

IDS = 101
BASE = (
    "--encoder-num-layers 3 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--kv-channels 6 --ffn-hidden-size 48 --encoder-seq-length 16 --decoder-seq-length 8 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 2 --lr 1e-3 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {IDS - 1} --make-vocab-size-divisible-by 8 "
    "--attention-dropout 0 --hidden-dropout 0 --device cpu"
)
ONE_ONE = (
    "--position-embedding-type relative --normalization RMSNorm --geglu-tanh "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
PARTS = "--recompute-granularity selective --recompute-modules"
SHARED = "--data-parallel-sharding-strategy"
LAYOUTS = [
    (2, f"{TP} 2"),
    (2, f"{TP} 2 --sequence-parallel --bf16"),
    (2, f"{TP} 2 --sequence-parallel --tp-comm-overlap {ONE_ONE}"),
    (2, f"{TP} 2 {FULL} 2 --distribute-saved-activations --fp64 --logits-at-once 300"),
    (2, f"{TP} 2 --sequence-parallel {PARTS} core_attn layernorm mlp"),
    (2, f"{PP} 2"),
    (2, f"{PP} 2 {ONE_ONE} --bf16"),
    (
        2,
        f"{PP} 2 --pipeline-model-parallel-split-rank 1 {FULL} 2 --bf16 --fp32-residual-connection",
    ),
    (2, f"{PP} 2 --pipeline-schedule zb-v --encoder-num-layers 2 {ONE_ONE}"),
    (2, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 --encoder-num-layers 2 {ONE_ONE}"),
    (2, f"{CP} 2 {ONE_ONE} --no-calculate-per-token-loss"),
    (2, f"{CP} 2 --cp-comm-type all_gather --bf16 {PARTS} core_attn"),
    (2, f"{CP} 2 --cp-comm-type a2a"),
    (2, f"{CP} 2 --cp-comm-type a2a p2p all_gather p2p a2a --decoder-seq-length 16"),
    (
        4,
        f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--decoder-seq-length 24",
    ),
    (4, f"{TP} 2 --sequence-parallel {PP} 2 {SHARED} optim_grads_params {ONE_ONE}"),
    (4, f"{PP} 2 {SHARED} optim_grads_params {ONE_ONE}"),
    (
        4,
        f"{PP} 2 {SHARED} optim_grads_params --num-virtual-stages-per-pipeline-rank 2 "
        f"--encoder-num-layers 2 {ONE_ONE}",
    ),
    pytest.param(8, f"{TP} 2 --sequence-parallel {PP} 2 {CP} 2 {ONE_ONE}", marks=pytest.mark.slow),
    (2, f"--ddp-bucket-size 2000 {ONE_ONE} --bf16"),
    (2, f"{SHARED} optim_grads_params"),
    (2, f"{SHARED} optim_grads_params {ONE_ONE} {FULL} 2 --bf16"),
    (4, f"{TP} 2 --sequence-parallel {SHARED} optim_grads --position-embedding-type rope"),
    (2, "--use-torch-fsdp2"),
    (2, f"--use-torch-fsdp2 {ONE_ONE} --bf16"),
    (2, f"--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward {ONE_ONE}"),
    (2, "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"),
]


def config_of(world: int, words: str) -> RunConfig:
    return parse(f"{BASE} {words}".split(), "pretrain_t5", world_size=world).config


def microbatches(config: RunConfig, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    samples, found = config.training.micro_batch_size, []
    for _ in range(count):
        batch: Batch = {}
        lengths = {"encoder": config.data.seq_length, "decoder": 0}
        lengths["decoder"] = config.data.t5.decoder_seq_length or 0
        for text, length in lengths.items():
            shape = (samples, length)
            batch[f"{text}_tokens"] = torch.randint(IDS, shape, generator=generator)
            batch[f"{text}_valid"] = torch.ones(samples, length, dtype=torch.bool)
        batch["labels"] = torch.randint(IDS, shape, generator=generator)
        batch["loss_mask"] = torch.ones(shape)
        found.append(batch)
    return found


def counted(found: comm.Traffic) -> Costs:
    return {key: Cost(calls, found.bytes[key]) for key, calls in found.calls.items()}


def work(rank: int, world: int, words: str) -> tuple[dict[str, int], list[Costs], Costs]:
    """Train two iterations and evaluate; return the rank's coordinates and what it moved."""
    config = config_of(world, words)
    mesh = connected_mesh(config, torch.device("cpu"))
    stages = [config.stages[at] for at in config.placement.positions(mesh.pp.coordinate)]
    tp = config.parallel.tensor_model_parallel_size
    vocabulary = resolve_vocabulary(config.tokenizer, IDS, tp)
    chunks = pretrain_t5.build_model(config, mesh, vocabulary, stages)
    for chunk in chunks:
        rng.initialize(chunk, 1)
    passes = build_passes(config, mesh, chunks, pretrain_t5.forward_step, Timers(0))
    optimizer = build_optimizer(config.optimizer, chunks, mesh, config.precision, config.replicas)
    planned = buffer_plans.chunk_buffers(config, vocabulary.padded_rows, mesh.pp.coordinate)
    buckets = [list(plan.buckets) for chunk in planned for plan in chunk]
    assert buckets == [list(b.plan.buckets) for b in optimizer.data_parallel.buffers]
    step = TrainStep(passes, optimizer, Health(config.health), seed=1)
    count, training = config.batch_sizes.final // config.samples_per_pass, []
    for number in (1, 2):
        samples = range(config.batch_sizes.final)
        plan = Plan(iteration=number, samples=samples, learning_rate=1e-3, weight_decay=0.1)
        with comm.counting() as found:
            data = iter(microbatches(config, count))
            step.run(plan, data, count, 1.0, lambda: (False, False, False))
        training.append(counted(found))
    with comm.counting() as found:
        sums = step.passes.accumulator()
        step.passes.evaluate(iter(microbatches(config, 3)), 3, sums)
        sums.reduce()
    coordinates = {name: axis.coordinate for name, axis in mesh.axes.items()}
    return coordinates, training, counted(found)


@pytest.mark.parametrize(("world", "words"), LAYOUTS)
def test_an_iteration_moves_what_the_closed_form_says(pool: Pool, world: int, words: str) -> None:
    config = config_of(world, words)
    tp = config.parallel.tensor_model_parallel_size
    rows = resolve_vocabulary(config.tokenizer, IDS, tp).padded_rows
    count = config.batch_sizes.final // config.samples_per_pass
    for coordinates, training, evaluation in pool.run(world, work, world, words):
        expected = traffic.expected(config, rows, count, coordinates)
        assert training == [expected] * 2
        assert evaluation == traffic.expected_evaluation(config, rows, 3, coordinates)
