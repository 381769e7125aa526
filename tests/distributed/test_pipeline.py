"""A toy model run by every schedule over 1, 2 and 4 ranks: the gradients of the serial run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Axis, Mesh
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.schedules import ScheduleName, make_schedule
from megatron.core.tensor_parallel import layers
from tests.harness import Pool

H, VOCAB, BATCH = 6, 11, 2
CPU = torch.device("cpu")
SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
]
Weights = dict[str, Tensor]


def make_weights(num_stages: int) -> Weights:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {"embedding": draw(VOCAB, H), "head": draw(VOCAB, H)}
    for stage in range(num_stages):
        weights |= {f"{stage}.scale": draw(H), f"{stage}.w": draw(H, H), f"{stage}.b": draw(H)}
    return weights


def make_microbatches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels ``[S, B]``: every microbatch has a sequence length of its own."""
    generator = torch.Generator().manual_seed(4)
    result = []
    for index in range(count):
        shape = (3 + index * 5 % 4, BATCH)
        tokens, labels = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2))
        result.append((tokens, labels))
    return result


def serial(num_stages: int, num_microbatches: int) -> Weights:
    """Return all gradients, by plain torch."""
    weights = {name: w.requires_grad_() for name, w in make_weights(num_stages).items()}
    for tokens, labels in make_microbatches(num_microbatches):
        x = F.embedding(tokens, weights["embedding"])
        for stage in range(num_stages):
            inner = x * weights[f"{stage}.scale"]
            x = x + torch.tanh(F.linear(inner, weights[f"{stage}.w"], weights[f"{stage}.b"]))
        logits = F.linear(x, weights["head"])
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {name: w.grad for name, w in weights.items() if w.grad is not None}


class Toy:
    """The chunks of one rank, over the project's own linear, which can postpone its gradient."""

    def __init__(self, positions: list[int], num_stages: int) -> None:
        self.positions, self.last = positions, num_stages - 1
        self.alone = Axis("none", (0,), 0, None)
        held = {str(position) for position in positions}
        held |= {name for name, at in (("embedding", 0), ("head", self.last)) if at in positions}
        self.weights = {
            name: w.requires_grad_()
            for name, w in make_weights(num_stages).items()
            if name.split(".")[0] in held
        }
        self.outputs: list[Tensor] = []

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)

    def step_over(self, data: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        self.outputs.clear()

        def step(chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
            tokens, labels = data[microbatch]
            position, w = self.positions[chunk], self.weights
            assert (x is None) == (position == 0)
            if x is None:
                x = F.embedding(tokens, w["embedding"])
            inner = x * w[f"{position}.scale"]
            inner = layers.linear(inner, w[f"{position}.w"], w[f"{position}.b"], self.alone, False)
            x = x + torch.tanh(inner)
            self.outputs.append(x)
            if position < self.last:
                return x
            logits = layers.linear(x, w["head"], None, self.alone, False)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

        return step


def mesh_of(size: int) -> Mesh:
    if size == 1:
        return Mesh.serial()
    return Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=size), CPU)


def shapes_of(data: list[tuple[Tensor, Tensor]]) -> Callable[[int], tuple[int, ...]]:
    return lambda number: (*data[number][0].shape, H)


def train(
    rank: int, size: int, name: ScheduleName, chunks: int, counts: list[int], overlap: bool
) -> list[Weights]:
    """Return the gradients of this rank's weights for each number of microbatches."""
    axis = mesh_of(size).pp
    executor = PipelineExecutor(
        axis, CPU, torch.float64, overlap=overlap, postponing=layers.postponing
    )
    result = []
    for count in counts:
        schedule, data = make_schedule(name, size, count, chunks), make_microbatches(count)
        placement = schedule.placement
        toy = Toy(placement.positions(rank), placement.num_stages)
        toy.zero_grad()
        events: list[tuple[Any, ...]] = []
        executor.run(
            schedule,
            toy.step_over(data),
            shapes_of(data),
            before_gradients=lambda *told, events=events: events.append(("before", *told)),
            after_gradients=lambda *told, events=events: events.append(("after", *told)),
        )
        # Around every action of a backward; each chunk has one last one.
        assert [event[1:] for event in events[::2]] == [event[1:] for event in events[1::2]]
        assert [word for word, *_ in events] == ["before", "after"] * (len(events) // 2)
        whole = [chunk for _, chunk, kind, _ in events[::2] if kind == "backward"]
        parts = [chunk for _, chunk, kind, _ in events[::2] if kind == "backward_weight"]
        assert sorted(whole + parts) == sorted([*range(chunks)] * count)
        final = [(chunk, kind) for _, chunk, kind, last in events[::2] if last]
        assert sorted(chunk for chunk, _ in final) == [*range(chunks)]
        assert all(kind != "backward_input" for _, kind in final)
        result.append({key: w.grad for key, w in toy.weights.items() if w.grad is not None})
    return result


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_gradients_equal_the_serial_runs(
    pool: Pool, size: int, name: ScheduleName, chunks: int
) -> None:
    """1 to 9 microbatches, each of its own length."""
    counts = list(range(1, 10))
    expected = [serial(size * chunks, count) for count in counts]
    ranks = pool.run(size, train, size, name, chunks, counts, True)
    for index in range(len(counts)):
        compare([result[index] for result in ranks], expected[index])


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_transfers_waited_for_at_once(pool: Pool, name: ScheduleName, chunks: int) -> None:
    expected = serial(2 * chunks, 5)
    ranks = pool.run(2, train, 2, name, chunks, [5], False)
    compare([result[0] for result in ranks], expected)


def compare(ranks: list[Weights], expected: Weights) -> None:
    seen: set[str] = set()
    for gradients in ranks:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)
        assert not seen & gradients.keys(), "two ranks hold the same weight"
        seen |= gradients.keys()
    assert seen == expected.keys()


def traffic(rank: int, size: int, name: ScheduleName, chunks: int, count: int) -> Any:
    """Return what a rank sent and received in training and in evaluation, and what it freed."""
    axis = mesh_of(size).pp
    executor = PipelineExecutor(axis, CPU, torch.float64)
    schedule, data = make_schedule(name, size, count, chunks), make_microbatches(count)
    toy = Toy(schedule.placement.positions(rank), schedule.placement.num_stages)
    toy.zero_grad()
    answers: list[Any] = []
    for each in (schedule, schedule.evaluation):
        with comm.counting() as counted:
            executor.run(each, toy.step_over(data), shapes_of(data))
        answers.append((counted.bytes["pp", "send"], counted.bytes["pp", "receive"]))
    executor.run(schedule, toy.step_over(data), shapes_of(data))
    freed = [output.untyped_storage().size() == 0 for output in toy.outputs]
    return (*answers, freed)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_bytes_and_freed_outputs(pool: Pool, name: ScheduleName, chunks: int) -> None:
    """Two ranks: each hop between them moves every activation once, and its gradient back."""
    count = 5
    values = sum(len(tokens) * BATCH * H for tokens, _ in make_microbatches(count))
    hops = {"1f1b": 1, "interleaved": 3, "zb-v": 2}[name]
    ranks = pool.run(2, traffic, 2, name, chunks, count)
    for direction in (0, 1):
        assert sum(training[direction] for training, _, _ in ranks) == 2 * hops * values * 8
        assert sum(evaluation[direction] for _, evaluation, _ in ranks) == hops * values * 8
    freed = sum(sum(flags) for _, _, flags in ranks)
    # The last stage keeps its own for the loss; the turn of a V hands it on where it is.
    assert freed == hops * count


def keeps(rank: int) -> list[int]:
    """Send what autograd saved, and what shares the input's memory; return sizes after the run."""
    axis = mesh_of(2).pp
    executor = PipelineExecutor(axis, CPU, torch.float64)
    weight = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    outputs: list[Tensor] = []

    def step(chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        y = torch.sigmoid(weight) if x is None else x.view(-1)
        outputs.append(y)
        return y if rank == 0 or chunk == 0 else y.square().sum()

    executor.run(make_schedule("interleaved", 2, 2, 2), step, lambda number: (3,))
    if rank == 0:
        s = torch.sigmoid(torch.tensor(0.5, dtype=torch.float64))
        # Of the sum of squares, for both microbatches.
        expected = (2 * 2 * s * s * (1 - s)).expand(3)
        torch.testing.assert_close(weight.grad, expected, rtol=1e-14, atol=0)
    return [output.untyped_storage().size() for output in outputs]


def test_what_autograd_needs_is_not_freed(pool: Pool) -> None:
    for sizes in pool.run(2, keeps):
        assert sizes == [24] * 4


def test_an_output_of_the_wrong_shape_is_named() -> None:
    executor = PipelineExecutor(Mesh.serial().pp, CPU, torch.float64)
    schedule = make_schedule("interleaved", 1, 1, 2)
    with pytest.raises(
        AssertionError, match=r"activation of microbatch 0 from stage 0 is .*\(3,\)"
    ):
        executor.run(
            schedule, lambda chunk, i, x: torch.zeros(3, dtype=torch.float64), lambda i: (4,)
        )


def test_weight_gradients_can_wait() -> None:
    """Nothing reaches the buffer before the closure runs; then it is the plain gradient."""
    alone = Axis("none", (0,), 0, None)
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with layers.postponing() as tasks:
        layers.linear(x, weight, None, alone, False).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[4.0] * 3] * 2
    assert not weight.grad.any() and len(tasks) == 1
    tasks[0]()
    assert weight.grad.tolist() == [[3.0, 5.0, 7.0]] * 4
    layers.linear(x, weight, None, alone, False).sum().backward()
    assert weight.grad.tolist() == [[6.0, 10.0, 14.0]] * 4


def test_postponed_work_is_done_in_its_own_action() -> None:
    """Two chunks on one rank: what a backward_input postpones runs in its backward_weight."""
    done: list[str] = []

    @contextmanager
    def postponing() -> Iterator[list[Callable[[], None]]]:
        number = len(done)
        done.append("input")
        yield [lambda: done.append(f"weight of {number}")]

    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def step(chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        return weight * 2 if x is None else x.sum()

    schedule = make_schedule("zb-v", 1, 2, 2)
    PipelineExecutor(Mesh.serial().pp, CPU, torch.float64, postponing=postponing).run(
        schedule, step, lambda number: (1,)
    )
    assert sorted(word for word in done if word != "input") == [
        f"weight of {index}" for index, word in enumerate(done) if word == "input"
    ]
    assert done[:2] == ["input", "weight of 0"]
    assert weight.grad is not None and weight.grad.item() == 4
