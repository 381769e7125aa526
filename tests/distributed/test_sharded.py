"""What replicas share out comes when it is needed and goes when it is not: seen in every call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import comm, rng, sharding
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.layout import unit_of
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import WholeLinear, without_memory
from megatron.core.transformer.config import TransformerConfig
from tests.harness import Pool

WIDTH, LAYERS = 16, 4
SIZE = WIDTH * WIDTH * 8
"""Bytes of a matrix."""


class Layer(nn.Module):
    """One matrix, which tells of its forward and of its backward."""

    def __init__(self, number: int, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.number, self.tell = number, tell
        init = Init("normal", 0.1)
        self.linear = WholeLinear((WIDTH, WIDTH), init, Mesh.serial(), torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.tell(f"forward {self.number}")
        # Among the hooks of x, this one comes after those that prepare the unit before.
        x.register_hook(lambda grad: self.tell("between"))
        y: Tensor = self.linear(x)
        y.register_hook(lambda grad: self.tell(f"backward {self.number}"))
        return y


class Model(nn.Module):
    """Four layers, each a unit; ``events`` holds what they told between the calls of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.layers = nn.ModuleDict(
            {
                str(number): Layer(number, lambda text: self.events.append(text))
                for number in range(4)
            }
        )
        sharding.name_parameters(self)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def optimizer_of(model: Model, **settings: Any) -> Optimizer:
    return build_optimizer(
        OptimizerConfig.resolve(optimizer="sgd", clip_grad=0.0),
        [model],
        Mesh.create(ParallelConfig.resolve(), torch.device("cpu")),
        PrecisionConfig.resolve(fp64=True),
        DataParallelConfig.resolve(**settings),
    )


def iterate(model: Model, optimizer: Optimizer, rank: int) -> list[str]:
    """Run one iteration; return what ranks called and what layers told, in order."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 1, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    replicas = optimizer.data_parallel
    with comm.recording() as calls:
        model.events = calls  # type: ignore[assignment]  # one list of both
        optimizer.zero_grad()
        loss = model(x).square().sum()
        replicas.begin(0, "backward", True)
        loss.backward()
        calls.append("end of backward")  # type: ignore[arg-type]
        replicas.finish(0, "backward", True)
        replicas.reduce_gradients()
        optimizer.step(1.0, lr=0.01, weight_decay=0.0)
    return [one if isinstance(one, str) else one.name for one in calls]


def two_iterations(rank: int, settings: dict[str, Any]) -> list[str]:
    model = Model()
    optimizer = optimizer_of(model, **settings)
    iterate(model, optimizer, rank)
    return iterate(model, optimizer, rank)


def positions(events: list[str], name: str) -> list[int]:
    return [at for at, event in enumerate(events) if event == name]


def test_sums_start_before_the_backward_ends(pool: Pool) -> None:
    """One bucket for each layer: the last layer's gradients leave while others are computed."""
    settings = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "ddp_bucket_size": WIDTH * WIDTH,
    }
    for events in pool.run(2, two_iterations, settings):
        sums = positions(events, "reduce_scatter")
        assert len(sums) == LAYERS
        for number, start in enumerate(sums):
            assert start > events.index(f"backward {LAYERS - 1 - number}")
            # The next layer's backward begins after the sum has begun.
            if number < LAYERS - 1:
                assert start < events.index(f"backward {LAYERS - 2 - number}") + 2
        assert sums[0] < events.index("backward 1") < events.index("end of backward")
        assert sums[-1] < events.index("end of backward")


def test_without_overlap_sums_come_after_the_backward(pool: Pool) -> None:
    for events in pool.run(2, two_iterations, {"use_distributed_optimizer": True}):
        assert positions(events, "reduce_scatter")[0] > events.index("end of backward")


def gathers_ahead(rank: int) -> list[int]:
    """Return how many buckets are on their way as each layer's forward begins."""
    model, seen = Model(), []
    optimizer = optimizer_of(
        model,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        ddp_bucket_size=WIDTH * WIDTH,
    )
    iterate(model, optimizer, rank)
    gather = optimizer.data_parallel._gather
    assert gather is not None
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.tell = lambda text: seen.append(len(gather._pending)) if "forward" in text else None
    model(torch.ones(1, 1, WIDTH, dtype=torch.float64, requires_grad=True))
    return seen


def test_new_weights_are_gathered_beside_the_forward(pool: Pool) -> None:
    """All gathers have started, and each layer has waited for its own alone."""
    assert pool.run(2, gathers_ahead) == [[3, 2, 1, 0]] * 2


def test_a_unit_is_gathered_before_the_one_ahead_of_it_ends(pool: Pool) -> None:
    """Forward: the gather of layer n + 1 starts before layer n; backward: of n - 1 before n."""
    settings = {"use_megatron_fsdp": True, "overlap_grad_reduce": True}
    for events in pool.run(2, two_iterations, settings):
        gathers = positions(events, "all_gather")
        forwards = [events.index(f"forward {number}") for number in range(LAYERS)]
        assert len(gathers) == 2 * LAYERS
        assert gathers[0] < gathers[1] < forwards[0]
        for number in range(1, LAYERS - 1):
            assert forwards[number - 1] < gathers[number + 1] < forwards[number]
        backwards = [events.index(f"backward {number}") for number in reversed(range(LAYERS))]
        assert backwards[0] < gathers[4] < gathers[5] < backwards[1] < gathers[6] < backwards[2]
        sums = positions(events, "reduce_scatter")
        assert len(sums) == LAYERS
        assert sums[-1] < events.index("end of backward")


def memory(rank: int, strategy: str) -> list[int]:
    """Return the most bytes of whole weights and gradients that existed at once."""
    model = Model()
    optimizer = optimizer_of(
        model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True
    )
    buffers = optimizer.data_parallel.buffers
    most = [0, 0]

    def look(text: str) -> None:
        for at, kind in enumerate(("data", "grad")):
            held = sum(getattr(b, kind).untyped_storage().size() for b in buffers)
            most[at] = max(most[at], held)

    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.tell = look
    for _ in range(2):
        iterate(model, optimizer, rank)
    return most


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"),
    [
        ("no_shard", LAYERS, LAYERS),
        ("optim", LAYERS, LAYERS),
        ("optim_grads", LAYERS, 2),
        ("optim_grads_params", 2, 2),
    ],
)
def test_two_units_at_most_are_whole(
    pool: Pool, strategy: str, weights: int, gradients: int
) -> None:
    assert pool.run(2, memory, strategy) == [[weights * SIZE, gradients * SIZE]] * 2


def unused(rank: int, strategy: str) -> list[Tensor]:
    """Leave the last layers out in one microbatch of two; return the weights."""
    model = Model()
    optimizer = optimizer_of(model, data_parallel_sharding_strategy=strategy)
    replicas = optimizer.data_parallel
    optimizer.zero_grad()
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(3, 1, WIDTH, generator=generator, dtype=torch.float64)
        x.requires_grad_()
        layers = list(model.layers.values())[: LAYERS if number else 2]
        for layer in layers:
            x = layer(x)
        replicas.begin(0, "backward", number == 1)
        x.square().sum().backward()
        replicas.finish(0, "backward", number == 1)
    replicas.reduce_gradients()
    optimizer.step(1.0, lr=0.01, weight_decay=0.0)
    return [parameter.detach().clone() for parameter in replicas.whole_parameters()]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_a_unit_without_a_gradient_does_not_block(pool: Pool, strategy: str) -> None:
    expected = pool.run(2, unused, "no_shard")[0]
    for found in pool.run(2, unused, strategy):
        for one, other in zip(sorted_by_sum(found), sorted_by_sum(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


def sorted_by_sum(tensors: list[Tensor]) -> list[Tensor]:
    """Return the matrices in one order: strategies have buffers of their own."""
    return sorted(tensors, key=lambda tensor: round(float(tensor.sum()), 6))


def weights_that_are_gone(rank: int) -> str:
    """Use a unit's weight without calling the unit."""
    model = Model()
    optimizer_of(model, use_megatron_fsdp=True)
    layer = model.layers["0"]
    assert isinstance(layer, Layer)
    with pytest.raises(AssertionError) as caught:
        layer.linear(torch.ones(1, 1, WIDTH, dtype=torch.float64))
    return str(caught.value)


def test_a_weight_that_is_not_there_is_not_read(pool: Pool) -> None:
    assert (
        pool.run(2, weights_that_are_gone) == ["a unit of the model was not called as a module"] * 2
    )


def late_values(rank: int) -> tuple[bool, bool]:
    """Build a model without memory: had one unit at a time some, and is it the same model?"""
    config = TransformerConfig.resolve(
        num_layers=4, hidden_size=16, num_attention_heads=2, max_position_embeddings=8
    )
    mesh = Mesh.create(ParallelConfig.resolve(), torch.device("cpu"))
    alive: list[set[str]] = []

    def built(model: GPTModel) -> DataParallel:
        def fill(parameter: nn.Parameter) -> None:
            there = [p for p in model.parameters() if p.numel() and sharding.is_there(p)]
            alive.append({unit_of(sharding.of(p).name) for p in there})
            rng.fill(parameter, 1)

        config = DataParallelConfig.resolve(use_megatron_fsdp=True)
        precision = PrecisionConfig.resolve(fp64=True)
        optimizer = build_optimizer(
            OptimizerConfig.resolve(), [model], mesh, precision, config, fill=fill
        )
        return optimizer.data_parallel

    early = GPTModel(config, mesh, vocab_size=6, dtype=torch.float64)
    rng.initialize(early, 1)
    pairs = [early]
    with without_memory():
        pairs.append(GPTModel(config, mesh, vocab_size=6, dtype=torch.float64))
    first, second = (list(map(torch.clone, built(m).whole_parameters())) for m in pairs)
    equal = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return max(map(len, alive)) == 1 and len(set.union(*alive)) == 6, equal


def test_weights_may_have_no_memory_until_their_values_are_drawn(pool: Pool) -> None:
    """Four layers, an embedding and the last norm."""
    assert pool.run(2, late_values) == [(True, True)] * 2
