"""Faults of parallel training that users of others have reported: none of them may happen here.

Each runs a small GPT in float64 on a layout and in one process, on the same samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import comm, rng, sharding
from megatron.core.context_parallel.config import ContextParallelConfig
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel, build_stages
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.config import TransformerConfig
from megatron.training.batches import Batch
from megatron.training.failing.failure import RunFailed
from megatron.training.health import Health
from megatron.training.log_config import HealthConfig
from megatron.training.objective import Objective
from megatron.training.passes import Activation, Passes
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from pretrain_gpt import forward_step
from tests.harness import Pool

VOCAB, LENGTH, SAMPLES = 32, 16, 4
CPU = torch.device("cpu")
Masks = Sequence[range]
"""Positions that count, of each sample."""
Change = Callable[[list[GPTModel], Mesh], None]
WHOLE = [range(LENGTH)] * SAMPLES


def samples(masks: Masks) -> Batch:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
    mask = torch.zeros(SAMPLES, LENGTH)
    for row, counted in zip(mask, masks, strict=True):
        row[counted.start : counted.stop] = 1.0
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}


def train(
    mesh: Mesh,
    masks: Masks = WHOLE,
    *,
    steps: int = 1,
    change: Change = lambda chunks, mesh: None,
    clip: float = 1.0,
    bf16: bool = False,
    **model: Any,
) -> dict[str, Any]:
    """Train on microbatches of one sample; return losses, norms, gradients by place, weights."""
    config = TransformerConfig.resolve(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        **model,
    )
    pipeline = PipelineConfig.resolve()
    placement = pipeline.placement(2, mesh.pp.size)
    stages = pipeline.stages(2, mesh.pp.size)
    dtype = torch.bfloat16 if bf16 else torch.float64
    mine = [stages[at] for at in placement.positions(mesh.pp.coordinate)]
    chunks = build_stages(
        config,
        mesh,
        mine,
        vocab_size=VOCAB,
        dtype=dtype,
        context_kinds=ContextParallelConfig.resolve().kinds(2),
    )
    for chunk in chunks:
        rng.initialize(chunk, 3)
    change(chunks, mesh)
    precision = PrecisionConfig.resolve(bf16=bf16, fp64=not bf16)
    optimizer = build_optimizer(OptimizerConfig.resolve(clip_grad=clip), chunks, mesh, precision)
    activation = Activation(width=16, dtype=dtype, shares=mesh.cp.size, samples=1, sequence=LENGTH)
    passes = Passes(
        chunks,
        forward_step,
        Objective(True, mesh),
        Timers(0),
        pipeline=pipeline,
        placement=placement,
        activation=activation,
    )
    step = TrainStep(passes, optimizer, Health(HealthConfig.resolve()), seed=1)
    batch, found = samples(masks), {"losses": [], "norms": []}
    numbers = range(mesh.dp.coordinate, SAMPLES, mesh.dp.size)
    for iteration in range(1, steps + 1):
        plan = Plan(iteration=iteration, samples=range(SAMPLES), learning_rate=0.02, weight_decay=0)
        microbatches = [{name: x[i : i + 1] for name, x in batch.items()} for i in numbers]
        nominal = float(SAMPLES * LENGTH)
        result = step.run(plan, microbatches, len(numbers), nominal, lambda: (False,) * 3)
        found["losses"].append(result.totals.loss)
        found["norms"].append(float(result.grad_norm))
    # Used up by the step, so they have its scale: the true one, and that of clipping.
    found["grads"] = by_place(chunks, "grad")
    found["weights"] = by_place(chunks, "data")
    return found


def by_place(chunks: list[GPTModel], attribute: str) -> dict[tuple[str, sharding.Box], Tensor]:
    """Return what this rank holds, by name and box of the logical tensor."""
    return {
        (sharding.of(p).name, region.logical): getattr(p, attribute)[
            sharding.box_slices(region.local)
        ].clone()
        for chunk in chunks
        for p in chunk.parameters()
        if p.grad is not None
        for region in sharding.of(p).regions
    }


def on_ranks(
    rank: int, sizes: dict[str, int], masks: Masks, settings: dict[str, Any]
) -> dict[str, Any]:
    return train(Mesh.create(ParallelConfig.resolve(**sizes), CPU), masks, **settings)


def check(found: dict[str, Any], expected: dict[str, Any], what: str = "grads") -> None:
    """Check that losses, norms and every box that a rank holds are the serial run's."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)
    whole = {name: x for (name, _), x in expected[what].items()}
    for (name, box), x in found[what].items():
        serial = whole[name][sharding.box_slices(box)]
        torch.testing.assert_close(x, serial, rtol=1e-9, atol=1e-13, msg=name)


def compare(
    pool: Pool, world: int, sizes: dict[str, int], masks: Masks = WHOLE, **settings: Any
) -> None:
    expected = train(Mesh.serial(), masks, **settings)
    for found in pool.run(world, on_ranks, sizes, masks, settings):
        check(found, expected)


PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}


def test_par_07_a_pipeline_divides_by_the_tokens_too(pool: Pool) -> None:
    compare(pool, 2, PP2, [range(9), range(3), range(16), range(1)], clip=0.0)


def _replicated(rank: int) -> set[tuple[str, sharding.Box]]:
    mesh = Mesh.create(ParallelConfig.resolve(**TP2), CPU)
    found = train(mesh, steps=20, bf16=True, clip=0.1)
    assert all(norm > 0.1 for norm in found["norms"]), "clipping is at work"
    mine, other = comm.gather_objects(found["weights"], mesh.tp)
    shared = set(mine.keys() & other.keys())
    for name, box in shared:
        assert torch.equal(mine[name, box], other[name, box]), name
    return shared


VECTOR = ((0, 16),)
# Every matrix but the positions is cut, and so are the biases of what is cut by output features.
SHARED_BY_TP = {
    ("embedding.position_embeddings.weight", ((0, LENGTH), (0, 16))),
    ("decoder.final_layernorm.weight", VECTOR),
    ("decoder.final_layernorm.bias", VECTOR),
    *(
        (f"decoder.layers.{layer}.{name}", VECTOR)
        for layer in range(2)
        for name in (
            "input_layernorm.weight",
            "input_layernorm.bias",
            "self_attention.linear_proj.bias",
            "pre_mlp_layernorm.weight",
            "pre_mlp_layernorm.bias",
            "mlp.linear_fc2.bias",
        )
    ),
}


def test_par_09_weights_that_ranks_share_stay_equal_when_clipped(pool: Pool) -> None:
    assert pool.run(2, _replicated) == [SHARED_BY_TP] * 2


def add_linear(chunks: list[GPTModel], mesh: Mesh) -> None:
    """Put a linear layer that every tensor-parallel rank holds whole behind the last layer."""
    record = sharding.whole((16, 16), Init(), replicated=("tp",))
    weight = make_parameter(record, (16, 16), mesh, torch.float64)
    chunks[-1].register_parameter("extra", weight)
    sharding.name_parameters(chunks[-1])
    with torch.no_grad():
        weight.copy_(torch.eye(16, dtype=torch.float64) * 3.0)
    norm = chunks[-1].decoder.final_layernorm
    assert norm is not None
    norm.register_forward_hook(lambda module, inputs, output: output @ weight)


def test_par_11_a_layer_that_is_whole_on_every_rank_counts_once(pool: Pool) -> None:
    compare(pool, 2, TP2, change=add_linear)


def large_sinks(chunks: list[GPTModel], mesh: Mesh) -> None:
    """Make the attention sinks draw most of the attention, so that their gradients are large."""
    for module in chunks[0].modules():
        if isinstance(getattr(module, "softmax_offset", None), nn.Parameter):
            module.softmax_offset.data.fill_(3.0)


def test_par_13_sinks_of_all_ranks_are_in_the_norm(pool: Pool) -> None:
    compare(pool, 2, TP2, change=large_sinks, softmax_type="learnable")


@pytest.mark.parametrize("cp", [2, 4])
def test_par_14_one_valid_token_weighs_the_same_on_any_layout(pool: Pool, cp: int) -> None:
    one = [range(5, 6), *[range(0)] * (SAMPLES - 1)]
    compare(pool, cp, {"context_parallel_size": cp}, one, clip=0.0)


def test_par_15_a_rank_with_nothing_but_padding_adds_zero(pool: Pool) -> None:
    """The second of two ranks holds the middle of a sample, of which only the start counts."""
    compare(pool, 2, {"context_parallel_size": 2}, [range(4)] * SAMPLES)


def test_par_16_replicas_and_shares_of_a_sequence_are_weighted_alike(pool: Pool) -> None:
    masks = [range(16), range(2), range(7), range(12)]
    compare(pool, 4, {"context_parallel_size": 2}, masks, clip=0.0)
    compare(pool, 4, {}, masks, clip=0.0)


def freeze(chunks: list[GPTModel], mesh: Mesh) -> None:
    """Freeze the second layer and what follows: all that the second of two stages holds."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            late = "layers.1." in name or "final_layernorm" in name or "output_layer" in name
            parameter.requires_grad_(not late)


def test_par_24_a_stage_without_trainable_weights_holds_nobody_up(pool: Pool) -> None:
    compare(pool, 2, PP2, steps=3, change=freeze, untie_embeddings_and_output_weights=True)


def _poison_last_stage(chunks: list[GPTModel], mesh: Mesh) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            if sharding.of(parameter).name == "decoder.final_layernorm.weight":
                parameter.register_hook(lambda grad: grad * float("inf"))


def _failure(rank: int) -> str:
    mesh = Mesh.create(ParallelConfig.resolve(**PP2), CPU)
    with pytest.raises(RunFailed) as failed:
        train(mesh, change=_poison_last_stage)
    return str(failed.value)


def test_opt_06_every_rank_names_a_gradient_of_another_stage(pool: Pool) -> None:
    """The message that is printed is that of the first rank, which has no such parameter."""
    messages = pool.run(2, _failure)
    assert messages[0] == messages[1]
    assert "(not finite: decoder.final_layernorm.weight)" in messages[0]
