"""Planned bytes of every rank of a layout, against the model and optimizer that such a rank builds.

Nothing communicates while a model is built, so a rank's mesh is made up: axes without groups.
"""

import pytest
import torch

import pretrain_gpt
from megatron.core import rng
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer import groups
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import divisors
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import buffer_plans
from megatron.training.plan.memory import MemoryPlan
from tests.live_bytes import Live

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --dry-run"
)
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
IDS, PADDED = 100, 128


def config(text: str) -> RunConfig:
    return parse(f"{SMALL} {text}".split()).config


def made_up(run: RunConfig, tp: int, pp: int) -> Mesh:
    """Return the mesh of a rank at coordinates of two axes, and at the first of all others."""
    parallel, queries = run.parallel, run.model.attention.num_query_groups
    ways, data = parallel.tensor_model_parallel_size, run.data_parallel_size
    sharers = ways // min(ways, queries)
    cp = parallel.context_parallel_size
    sizes = {"tp": ways, "cp": cp, "dp": data, "pp": parallel.pipeline_model_parallel_size}
    sizes |= {"dp_cp": data * cp, "kv_replica": sharers}
    instances = run.replicas.num_distributed_optimizer_instances
    sizes |= {"dp_inner": data * cp // instances, "dp_outer": instances}
    at = {"tp": tp, "pp": pp, "kv_replica": tp % sharers}
    serial = Mesh.serial()
    axes = {
        name: Axis(name, tuple(range(size)), at.get(name, 0), None) for name, size in sizes.items()
    }
    return Mesh({**serial.axes, **axes}, 0, serial.device)


def built(run: RunConfig, tp: int, pp: int) -> Optimizer:
    """Return the optimizer of a rank, with the rank's chunks in its buffers."""
    mesh = made_up(run, tp, pp)
    vocabulary = resolve_vocabulary(run.tokenizer, IDS, run.parallel.tensor_model_parallel_size)
    stages = [run.stages[position] for position in run.placement.positions(pp)]
    chunks = pretrain_gpt.build_model(run, mesh, vocabulary, stages)
    for chunk in chunks:
        rng.initialize(chunk, 1)
    return build_optimizer(run.optimizer, chunks, mesh, run.precision, run.replicas)


TP4, PP2, PP4 = (
    f"--dry-run-world-size {n} --{kind}-model-parallel-size {n}"
    for kind, n in (("tensor", 4), ("pipeline", 2), ("pipeline", 4))
)
LATENTS = "--multi-latent-attention --q-lora-rank 24 --position-embedding-type rope --qk-layernorm"
DP4 = "--dry-run-world-size 4"
GRADS, ALL = (
    f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params")
)
SCALED = "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"
LAYOUTS = {
    "serial": "",
    "bf16": "--bf16 --qk-layernorm",
    "fp64 sgd": "--fp64 --optimizer sgd --sgd-momentum 0.9",
    "sgd without momentum": "--optimizer sgd --sgd-momentum 0",
    "muon": "--optimizer muon --bf16",
    "muon tp4": f"{TP4} --optimizer muon --muon-tp-mode distributed {LLAMA} --decoupled-lr 1e-2",
    "muon and lion, latents": f"{LATENTS} --optimizer muon --muon-scalar-optimizer lion --fp64",
    "muon dp3, some matrices left to adam": "--dry-run-world-size 3 --optimizer muon "
    "--ddp-bucket-size 9000 --param-group-overrides *.linear_fc2.weight:optimizer=adam",
    "muon dp3 optim": "--dry-run-world-size 3 --optimizer dist_muon --bf16",
    "muon dp3 optim, small buckets": "--dry-run-world-size 3 --optimizer dist_muon "
    "--overlap-grad-reduce --ddp-bucket-size 9000 --swiglu",
    "muon dp5 optim_grads": "--dry-run-world-size 5 --optimizer muon --bf16 "
    "--data-parallel-sharding-strategy optim_grads",
    "muon cp2 dp2 optim_grads_params": "--dry-run-world-size 4 --context-parallel-size 2 --bf16 "
    f"--optimizer muon --use-megatron-fsdp {LLAMA}",
    "lion": "--optimizer lion --qk-layernorm",
    "lion dp3 optim": "--dry-run-world-size 3 --optimizer lion --use-distributed-optimizer",
    "tp4": f"{TP4} --bf16",
    "tp4 sp": f"{TP4} --sequence-parallel --qk-layernorm",
    "tp4, shared key heads": f"{TP4} {LLAMA} --add-qkv-bias --qk-layernorm --bf16",
    "tp4 sp, one key head": f"{TP4} --sequence-parallel {LLAMA} --num-query-groups 1",
    "tp4 sp, learned sinks": f"{TP4} --sequence-parallel --softmax-type learnable",
    "pp2": PP2,
    "pp2 untied": f"{PP2} {LLAMA}",
    "pp4, given ends": f"{PP4} --num-layers 9 --decoder-first-pipeline-num-layers 1 "
    "--decoder-last-pipeline-num-layers 2",
    "pp4, ends that count": f"{PP4} --num-layers 6 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
    "pp2 vpp2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --bf16",
    "pp2 vpp3, laid out": f"{PP2} --pipeline-model-parallel-layout E|t|tt||t|L",
    "zb-v": f"{PP2} --pipeline-schedule zb-v --bf16",
    "zb-v untied": f"{PP2} --pipeline-schedule zb-v {LLAMA}",
    "zb-h1": f"{PP4} --pipeline-schedule zb-h1",
    "cp2 dp3": "--dry-run-world-size 6 --context-parallel-size 2 --bf16",
    "dp3, small buckets": "--dry-run-world-size 3 --overlap-grad-reduce --ddp-bucket-size 5000 "
    "--qk-layernorm",
    "dp3, five buckets": "--dry-run-world-size 3 --ddp-num-buckets 5 --qk-layernorm "
    "--apply-wd-to-qk-layernorm",
    "all": "--dry-run-world-size 48 --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    f"--context-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 7000 {LLAMA} --bf16",
    "all in a V, tied": "--dry-run-world-size 24 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --context-parallel-size 2 "
    "--ddp-num-buckets 3 --bf16",
    "latents": f"{TP4} --sequence-parallel {LATENTS} --bf16",
    "dp4, states": f"{DP4} --use-distributed-optimizer --ddp-bucket-size 9000",
    "dp3, gradients": f"--dry-run-world-size 3 {GRADS} --bf16 --grad-reduce-in-bf16",
    "dp4, all": f"{DP4} {ALL} {LLAMA}",
    "dp4 in two groups": f"{DP4} {ALL} --num-distributed-optimizer-instances 2 --bf16",
    "short formats": f"{DP4} {GRADS} --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16 --main-grads-dtype bf16 --main-params-dtype fp16 --adam-beta2 0.95",
    "moments with scales": f"{DP4} --use-distributed-optimizer --bf16 {SCALED}",
    "moments with scales, in part on the host": f"{DP4} {ALL} --bf16 {SCALED} "
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.3",
    "tp2 sp dp2, all": "--dry-run-world-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
    f"{ALL} --optimizer sgd",
    "zb-v dp2, all": "--dry-run-world-size 4 --pipeline-model-parallel-size 2 "
    f"--pipeline-schedule zb-v {ALL} --bf16",
    "lion, states": f"{DP4} --use-distributed-optimizer --optimizer lion --bf16",
    "muon, all": f"{DP4} {ALL} --optimizer muon",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_bytes_are_those_of_built_ranks(name: str) -> None:
    run = config(LAYOUTS[name])
    padded = resolve_vocabulary(run.tokenizer, IDS, run.parallel.tensor_model_parallel_size)
    ranks = MemoryPlan(run, padded.padded_rows).ranks()
    assert len(ranks) == run.parallel.pipeline_model_parallel_size
    for pp, planned in enumerate(ranks):
        for tp in {0, run.parallel.tensor_model_parallel_size - 1}:
            optimizer = built(run, tp, pp)
            buffers = optimizer.data_parallel.buffers
            assert planned.fixed == optimizer.memory(), (pp, tp)
            assert planned.parameters == sum(p.numel() for b in buffers for p in b.parameters)
            chunks = buffer_plans.chunk_buffers(run, padded.padded_rows, pp)
            plans = [plan for chunk in chunks for plan in chunk]
            assert sorted((p.size, p.buckets) for p in plans) == sorted(
                (b.plan.size, b.plan.buckets) for b in buffers
            )


def test_a_matrix_at_both_ends_of_a_v_is_held_once() -> None:
    run = config(f"{PP2} --pipeline-schedule zb-v")
    first, second = MemoryPlan(run, PADDED).ranks()
    whole = MemoryPlan(config(""), PADDED).ranks()[0]
    assert first.parameters + second.parameters == whole.parameters
    loop = MemoryPlan(config(PP2), PADDED).ranks()
    assert sum(rank.parameters for rank in loop) == whole.parameters + PADDED * 64


def test_evaluation_alone_holds_weights() -> None:
    (rank,) = MemoryPlan(config("--bf16 --skip-train"), PADDED).ranks()
    assert rank.fixed == {"weights": 2 * rank.parameters}
    # Nothing is kept but, at the end, a second copy of the logits.
    assert rank.activations == 2 * 32 * PADDED * 2


@pytest.mark.parametrize(
    ("schedule", "alive"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        # As many as the first stage of 1F1B holds, of which `rank` lack only weight gradients.
        ("zb-h1", None),
    ],
)
def test_activations_are_those_of_the_microbatches_alive(
    schedule: str, alive: list[int] | None
) -> None:
    text = f"{PP4} --num-layers 8 --pipeline-schedule {schedule} --global-batch-size 16"
    ranks = MemoryPlan(config(text), PADDED).ranks()
    one = MemoryPlan(config(text.replace("size 16", "size 2")), PADDED).ranks()
    held = [rank.activations for rank in ranks]
    if alive is not None:
        assert held == [n * rank.activations for n, rank in zip(alive, one, strict=True)]
    else:
        assert 4 * one[1].activations > held[1] > 3 * one[1].activations


@pytest.mark.parametrize(
    "text", ["", f"{PP2} --global-batch-size 16", f"{PP2} --pipeline-schedule zb-v"]
)
def test_the_largest_micro_batch_just_fits(text: str) -> None:
    run, memory = config(text), 20e6

    def need(size: int) -> int:
        count = run.training.global_batch_size // 2
        more = config(f"{text} --micro-batch-size {size} --global-batch-size {size * count}")
        return max(rank.total for rank in MemoryPlan(more, PADDED).ranks())

    largest = MemoryPlan(run, PADDED).largest_micro_batch(memory)
    assert largest > 1 and need(largest) <= memory < need(largest + 1)
    assert MemoryPlan(run, PADDED).largest_micro_batch(1000) == 0


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 360])
def test_divisors(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_the_largest_divisor_of_a_global_batch() -> None:
    """Under GPipe all samples are alive whatever their number in a microbatch."""
    base = f"{PP2} --pipeline-schedule gpipe --hidden-dropout 0 --attention-dropout 0"
    run = config(f"{base} --global-batch-size 24")
    plan = MemoryPlan(run, PADDED)
    total = max(rank.total for rank in plan.ranks())
    assert plan.largest_divisor(total) == 24
    assert plan.largest_divisor(total - 1) == 0
    # Under 1F1B two microbatches are alive on the first rank.
    base = f"{PP2} --global-batch-size 24"
    for size in (1, 2, 3, 4, 6, 8):
        ranks = MemoryPlan(config(f"{base} --micro-batch-size {size}"), PADDED).ranks()
        need = max(rank.total for rank in ranks)
        assert MemoryPlan(config(base), PADDED).largest_divisor(need) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--bf16",
        "--optimizer sgd --sgd-momentum 0 --untie-embeddings-and-output-weights",
        f"{DP4} --use-distributed-optimizer",
        f"{PP2} --pipeline-schedule zb-v",
    ],
)
def test_building_takes_what_is_planned(text: str) -> None:
    """Counted are all tensors that are made."""
    run = config(text)
    for pp, planned in enumerate(MemoryPlan(run, PADDED).ranks()):
        mesh, vocabulary = made_up(run, 0, pp), resolve_vocabulary(run.tokenizer, IDS, 1)
        stages = [run.stages[position] for position in run.placement.positions(pp)]
        with Live() as live:
            chunks = pretrain_gpt.build_model(run, mesh, vocabulary, stages)
            replicas = DataParallel(
                chunks,
                mesh,
                getattr(torch, run.precision.grad_dtype),
                group_of=groups.grouping(run.optimizer),
                config=run.replicas,
            )
        assert replicas.buffers
        assert live.most == pytest.approx(planned.building, rel=0.01)


def test_a_model_that_is_built_and_shared_out() -> None:
    """In fp32, unit by unit: its weights move, its gradients come, a fourth of both stays."""
    text = f"{DP4} {ALL} --num-layers 2 --position-embedding-type rope"
    run = config(text)
    (plans,) = buffer_plans.chunk_buffers(run, PADDED, 0)
    (rank,) = MemoryPlan(run, PADDED).ranks()
    waiting, most = 4 * rank.parameters, 0
    for plan in plans:
        moved = 4 * sum(slot.stop - slot.start for slot in plan.slots)
        most = max(most, waiting + 8 * plan.size, waiting - moved + 10 * plan.size)
        waiting += 2 * plan.size - moved
    assert rank.building == most
    # Weights without memory before their buffers have it are there once.
    (late,) = MemoryPlan(config(f"{text} --init-model-with-meta-device"), PADDED).ranks()
    shares = late.fixed["weights"] + late.fixed["gradients"]
    assert late.building < shares + 8 * max(plan.size for plan in plans)
