"""Half precision on layouts: overflows are everyone's, and losses those of the serial run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import pretrain_gpt
from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import build_run
from megatron.training.batches import Batch
from megatron.training.build import build_chunks, build_passes, build_run_optimizer
from megatron.training.health import Health
from megatron.training.processes import setup
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from tests.harness import Pool

VOCABULARY, LENGTH, SAMPLES = 32, 16, 4
OVERFLOWS = 2
"""The iteration in which a gradient overflows."""
FP16 = {"fp16": True, "initial_loss_scale": 256.0, "hysteresis": 1, "loss_scale_window": 2}


def batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": torch.ones(SAMPLES, LENGTH),
    }


def build(sizes: dict[str, Any], **settings: Any) -> TrainStep:
    """Return what trains a small GPT."""
    values = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "seq_length": LENGTH,
        "micro_batch_size": 1,
        "global_batch_size": SAMPLES,
        "train_iters": 4,
        "lr": 1e-2,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
        "device": "cpu",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **sizes,
        **settings,
    }
    config = build_run(values, dict.fromkeys(values, "flag"))
    alone = config.process.world_size == 1
    cpu = torch.device("cpu")
    mesh = Mesh.serial(cpu) if alone else setup.connected_mesh(config, cpu)
    vocabulary = resolve_vocabulary(config.tokenizer, VOCABULARY, mesh.tp.size)
    chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    optimizer = build_run_optimizer(config, chunks, mesh)
    passes = build_passes(config, mesh, chunks, pretrain_gpt.forward_step, Timers(0))
    return TrainStep(passes, optimizer, Health(config.health), seed=1)


def train(
    rank: int, sizes: dict[str, Any], steps: int, culprit: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Train a small GPT; on the rank ``culprit`` one element of one gradient overflows."""
    step = build(sizes, **settings)
    optimizer, mesh = step.optimizer, step.mesh
    numbers = range(mesh.dp.coordinate, SAMPLES, mesh.dp.size)
    microbatches = [{name: x[i : i + 1] for name, x in batch().items()} for i in numbers]
    iteration = 0

    def overflow(parameter: torch.nn.Parameter) -> None:
        if iteration == OVERFLOWS and parameter.grad is not None:
            grad = parameter.grad
            mine = grad.to_local() if isinstance(grad, DTensor) else grad
            mine.view(-1)[0] = torch.inf

    if rank == culprit:  # a matrix that tensor-parallel ranks hold parts of
        named = step.passes.chunks[0].named_parameters()
        matrix = next(p for name, p in named if name.endswith("linear_fc1.weight"))
        matrix.register_post_accumulate_grad_hook(overflow)
    found: dict[str, Any] = {"skipped": [], "scales": [], "losses": [], "moved": []}
    for iteration in range(1, steps + 1):
        before = [masters.clone() for shard in optimizer.shards for masters in shard.mains]
        plan = Plan(iteration=iteration, samples=range(SAMPLES), learning_rate=1e-2, weight_decay=0)
        nominal = float(SAMPLES * LENGTH)
        result = step.run(plan, microbatches, len(numbers), nominal, lambda: (False,) * 3)
        assert result.overflow == result.skipped and not result.nan
        now = [masters for shard in optimizer.shards for masters in shard.mains]
        found["skipped"].append(result.skipped)
        found["scales"].append(optimizer.scaler.scale)
        found["losses"].append(result.totals.loss)
        found["moved"].append(not all(map(torch.equal, before, now)))
    return found | {"steps": optimizer.scalars()["step"]}


def on_rank(
    rank: int, sizes: dict[str, Any], steps: int, culprit: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    return train(rank, sizes, steps, culprit, **settings)


LAYOUTS = [
    {"world_size": 2},
    {"world_size": 2, "tensor_model_parallel_size": 2},
    {"world_size": 2, "pipeline_model_parallel_size": 2},
]
SHARED = [
    {"world_size": 2, "data_parallel_sharding_strategy": strategy}
    for strategy in ("optim", "optim_grads", "optim_grads_params")
]
SHARED.append({"world_size": 2, "use_torch_fsdp2": True})
"""An element is in the share of one rank, which alone sees that it overflowed."""


@pytest.mark.parametrize("sizes", [*LAYOUTS, *SHARED])
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_ranks_overflow_is_everyones(pool: Pool, sizes: dict[str, Any], culprit: int) -> None:
    expected = train(0, {"world_size": 1}, 4, culprit=0, **FP16)
    assert expected["skipped"] == [False, True, False, False]
    assert expected["scales"] == [256, 128, 128, 256]
    for found in pool.run(2, on_rank, sizes, 4, culprit, FP16):
        for name in ("skipped", "scales", "steps"):
            assert found[name] == expected[name], name
        assert found["moved"] == [True, False, True, True]
        # fp16 has 11 bits: layouts round sums at other places.
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)


BF16 = {"bf16": True}
STREAM = {"fp32_residual_connection": True}
RESULTS = [
    (LAYOUTS[2], FP16, 2e-5),
    (LAYOUTS[2], BF16 | STREAM, 2e-5),
    (LAYOUTS[1], FP16 | STREAM | {"fp16_lm_cross_entropy": True}, 2e-3),
    (LAYOUTS[1] | {"sequence_parallel": True}, BF16 | STREAM, 2e-2),
    ({"world_size": 2, "context_parallel_size": 2}, FP16, 2e-3),
]


@pytest.mark.parametrize(("sizes", "settings", "within"), RESULTS)
def test_layouts_in_half_train_as_one_process_does(
    pool: Pool, sizes: dict[str, Any], settings: dict[str, Any], within: float
) -> None:
    """A pipeline adds up only tied gradients in another order; other layouts round elsewhere."""
    expected = train(0, {"world_size": 1}, 3, **settings)["losses"]
    assert expected[0] - expected[-1] > 0.05
    for found in pool.run(2, on_rank, sizes, 3, None, settings):
        assert found["losses"] == pytest.approx(expected, rel=within)


def one_sample(
    rank: int, sizes: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """Train one iteration in which every replica has the same sample.

    Returns:
        gradients of activations of the last layer, weights afterwards, the gradient's norm.
    """
    step = build(sizes, **settings)
    mesh, replicas = step.mesh, step.optimizer.data_parallel
    seen: list[Tensor] = []
    (model,) = step.passes.chunks
    norm = model.get_submodule("decoder.final_layernorm")
    norm.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    plan = Plan(iteration=1, samples=range(mesh.dp.size), learning_rate=1e-2, weight_decay=0)
    microbatches = [{name: x[:1] for name, x in batch().items()}]
    result = step.run(plan, microbatches, 1, float(mesh.dp.size * LENGTH), lambda: (False,) * 3)
    assert not result.skipped, result
    weights = {sharding.of(p).name: p.detach().clone() for p in replicas.whole_parameters()}
    assert result.grad_norm is not None
    return seen, weights, float(result.grad_norm)


def largest(values: dict[str, Any]) -> float:
    """Return the largest element of a gradient of `one_sample` in one process."""
    step = build({"world_size": 1}, **values)
    microbatches = [{name: x[:1] for name, x in batch().items()}]
    found: list[float] = []

    def seen() -> tuple[bool, bool, bool]:
        found.extend(float(g.abs().max()) for _, g in step.optimizer.data_parallel.gradients())
        return False, False, False

    plan = Plan(iteration=1, samples=range(1), learning_rate=1e-2, weight_decay=0)
    step.run(plan, microbatches, 1, float(LENGTH), seen)
    return max(found)


IN_HALF = {"accumulate_allreduce_grads_in_fp32": False}
REPLICAS = [(sizes, IN_HALF) for sizes in (LAYOUTS[0], *SHARED)]


@pytest.mark.parametrize(("sizes", "sums"), [(LAYOUTS[0], {}), (SHARED[-1], {}), *REPLICAS])
def test_a_loss_scale_means_the_same_on_any_number_of_replicas(
    pool: Pool, sizes: dict[str, Any], sums: dict[str, bool]
) -> None:
    """So large that a sum of two fp16 gradients overflows, and none of either replica."""
    # Clipping would read norms, which layouts add up in other orders.
    settings: dict[str, Any] = {"fp16": True, "clip_grad": 0.0, **sums}
    scale = 2.0 ** math.floor(math.log2(65504 / largest(settings | {"loss_scale": 1.0})))
    settings |= {"loss_scale": scale}
    assert 2 * largest(settings) > 65504 > largest(settings)
    gradients, weights, norm = one_sample(0, {"world_size": 1}, settings)
    assert gradients[0].abs().max() > 0
    # Torch rounds each microbatch's gradients of weights to fp16.
    rounded = 2**-10 if "use_torch_fsdp2" in sizes else 0.0
    for mine, theirs, its_norm in pool.run(2, one_sample, sizes, settings):
        assert all(map(torch.equal, mine, gradients)) and len(mine) == len(gradients)
        assert its_norm == pytest.approx(norm, rel=max(rounded, 1e-6))
        assert theirs.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=rounded, atol=rounded * 1e-2)
