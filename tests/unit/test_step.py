"""One iteration: the objective over microbatches, what the optimizer is given, what is skipped."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core import rng, sharding
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.precision.loss_scaler import LossScaler
from megatron.core.rng import DropoutKey
from megatron.core.sharding import Init, whole
from megatron.training.batches import PADDING, Batch, whole_count, whole_numbers
from megatron.training.evaluation import EvaluationSet, Evaluator
from megatron.training.failing.failure import RunFailed
from megatron.training.health import Health
from megatron.training.log_config import HealthConfig
from megatron.training.objective import Accumulator, Objective, TokenLosses
from megatron.training.passes import Passes
from megatron.training.step import Plan, StepResult, TrainStep
from megatron.training.timers import Timers

VOCABULARY, WIDTH, LENGTH, SAMPLES = 11, 5, 100, 4


class Tiny(nn.Module):
    """An embedding and a head in float64: enough for losses that differ by token."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embedding": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH)}
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=torch.float64))
            setattr(self, name, sharding.attach(weight, whole(shape, Init("normal", 0.5))))
        sharding.name_parameters(self)
        rng.initialize(self, 7)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        logits = (self.embedding[tokens_BS] @ self.head.t()).flatten(0, 1)
        flat = nn.functional.cross_entropy(logits, labels_BS.flatten(), reduction="none")
        return flat.view_as(labels_BS)


def forward_step(
    model: nn.Module, batch: Batch, x: Tensor | None, dropout: DropoutKey | None
) -> TokenLosses:
    return TokenLosses(model(batch["tokens"], batch["labels"]), batch["loss_mask"])


def global_batch(valid: list[int]) -> Batch:
    """Return samples of which ``valid`` leading tokens count."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(valid), LENGTH)
    mask = torch.zeros(shape)
    for sample, count in enumerate(valid):
        mask[sample, :count] = 1.0
    return {
        "tokens": torch.randint(VOCABULARY, shape, generator=generator),
        "labels": torch.randint(VOCABULARY, shape, generator=generator),
        "loss_mask": mask,
    }


def cut(batch: Batch, micro_batch_size: int) -> Iterator[Batch]:
    for start in range(0, len(batch["tokens"]), micro_batch_size):
        yield {name: value[start : start + micro_batch_size] for name, value in batch.items()}


def run(
    batch: Batch,
    micro_batch_size: int,
    *,
    per_token: bool = True,
    health: HealthConfig | None = None,
    model: Tiny | None = None,
    step: TrainStep | None = None,
) -> tuple[StepResult, dict[str, Tensor], TrainStep]:
    """Return the result of one step, the true gradients, and what ran it."""
    if step is None:
        step = make_step(per_token, health, model)
    objective = step.objective
    samples = len(batch["tokens"])
    nominal = objective.nominal(samples, micro_batch_size, LENGTH)
    grads: dict[str, Tensor] = {}
    original = step.optimizer.step

    def spy(scale, **rest):  # type: ignore[no-untyped-def]
        for name, parameter in model_of(step).named_parameters():
            grads[name] = parameter.grad.clone() * scale
        return original(scale, **rest)

    step.optimizer.step = spy  # type: ignore[method-assign]
    plan = Plan(iteration=3, samples=range(8, 8 + samples), learning_rate=0.1, weight_decay=0.0)
    try:
        microbatches = cut(batch, micro_batch_size)
        count = samples // micro_batch_size
        result = step.run(plan, microbatches, count, nominal, lambda: (False,) * 3)
    finally:
        step.optimizer.step = original  # type: ignore[method-assign]
    return result, grads, step


def model_of(step: TrainStep) -> Tiny:
    (model,) = step.passes.chunks
    assert isinstance(model, Tiny)
    return model


def make_step(
    per_token: bool = True, health: HealthConfig | None = None, model: Tiny | None = None
) -> TrainStep:
    model, mesh = model or Tiny(), Mesh.serial()
    optimizer = build_optimizer(
        OptimizerConfig(clip_grad=0.0), [model], mesh, PrecisionConfig.resolve(fp64=True)
    )
    passes = Passes([model], forward_step, Objective(per_token, mesh), Timers(0))
    return TrainStep(passes, optimizer, Health(health or HealthConfig()), seed=1)


def expected(
    batch: Batch, per_token: bool, micro_batch_size: int
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients by the definition, with plain autograd."""
    model = Tiny()
    losses, mask = model(batch["tokens"], batch["labels"]), batch["loss_mask"].double()
    if per_token:
        loss = (losses * mask).sum() / mask.sum()
    else:
        pairs = zip(losses.split(micro_batch_size), mask.split(micro_batch_size), strict=True)
        loss = torch.stack([(loss * kept).sum() / kept.sum() for loss, kept in pairs]).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_par_22_gradients_do_not_depend_on_the_micro_batch_size(micro_batch_size: int) -> None:
    batch = global_batch([1, 100, 100, 1])
    loss, grads = expected(batch, True, 4)
    result, found, _ = run(batch, micro_batch_size)
    assert result.totals.loss == pytest.approx(loss, rel=1e-13)
    assert result.totals.tokens == 202
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-15)
    norm = torch.sqrt(sum(g.square().sum() for g in grads.values()))
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-12)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_without_per_token_loss_microbatches_weigh_the_same(micro_batch_size: int) -> None:
    batch = global_batch([1, 100, 40, 7])
    loss, grads = expected(batch, False, micro_batch_size)
    assert loss != pytest.approx(expected(batch, True, micro_batch_size)[0], rel=1e-3)
    result, found, _ = run(batch, micro_batch_size, per_token=False)
    assert result.totals.loss == pytest.approx(loss, rel=1e-13)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-15)


def test_opt_03_a_batch_without_valid_tokens_is_skipped_and_counted() -> None:
    step = make_step()
    before = [p.detach().clone() for p in model_of(step).parameters()]
    result, _, _ = run(global_batch([0, 0, 0, 0]), 2, step=step)
    assert result.skipped and not result.nan
    assert all(torch.equal(a, b) for a, b in zip(before, model_of(step).parameters(), strict=True))
    result, _, _ = run(global_batch([5, 0, 0, 0]), 2, step=step)
    assert not result.skipped
    assert not torch.equal(before[0], next(model_of(step).parameters()))


def poisoned() -> Tiny:
    """Return a model whose loss is NaN wherever token 0 stands."""
    model = Tiny()
    with torch.no_grad():
        model.embedding[0, 0] = float("nan")
    return model


def test_opt_06_a_loss_that_is_not_finite_stops_the_run_and_names_its_samples() -> None:
    step = make_step(model=poisoned())
    before = [p.detach().clone() for p in model_of(step).parameters()]
    with pytest.raises(RunFailed) as failure:
        run(global_batch([100] * 4), 2, step=step)
    for part in ("iteration 3", "loss is nan on rank 0", "samples 8 to 11"):
        assert part in str(failure.value)
    for a, b in zip(before, model_of(step).parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_opt_06_skipping_has_a_limit_and_leaves_the_weights() -> None:
    step = make_step(health=HealthConfig(skip_non_finite_iterations=2), model=poisoned())
    before = model_of(step).head.detach().clone()
    for _ in range(2):
        result, _, _ = run(global_batch([100] * 4), 2, step=step)
        assert result.skipped and result.nan
    assert torch.equal(before, model_of(step).head)
    with pytest.raises(RunFailed, match="used up by 3 in a row"):
        run(global_batch([100] * 4), 2, step=step)


def test_opt_06_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    step = make_step()
    hook = model_of(step).head.register_hook(lambda grad: grad * float("inf"))
    before = model_of(step).embedding.detach().clone()
    with pytest.raises(RunFailed, match="gradient norm.*head.*samples 8 to 11"):
        run(global_batch([100] * 4), 2, step=step)
    assert torch.equal(before, model_of(step).embedding)
    hook.remove()


def test_without_checks_a_bad_iteration_is_counted_and_the_run_goes_on() -> None:
    health = HealthConfig(check_for_nan_in_loss_and_grad=False)
    result, _, _ = run(global_batch([100] * 4), 2, health=health, model=poisoned())
    assert result.skipped and result.nan


def test_without_checks_a_gradient_that_the_optimizer_refuses_is_counted_too() -> None:
    step = make_step(health=HealthConfig(check_for_nan_in_loss_and_grad=False))
    before = model_of(step).embedding.detach().clone()
    hook = model_of(step).head.register_hook(lambda grad: grad * float("inf"))
    result, _, _ = run(global_batch([100] * 4), 2, step=step)
    assert result.skipped and result.nan
    assert torch.equal(before, model_of(step).embedding)
    hook.remove()
    result, _, _ = run(global_batch([100] * 4), 2, step=step)
    assert not result.skipped and not result.nan


def scaled(step: TrainStep, **settings: object) -> TrainStep:
    """Give a step the loss scaler of ``settings``."""
    step.optimizer.scaler = LossScaler(PrecisionConfig.resolve(**settings))
    return step


def overflowing(step: TrainStep) -> RemovableHandle:
    """Let the gradient of the head overflow until the handle is removed."""
    return model_of(step).head.register_hook(lambda grad: grad * float("inf"))


@pytest.mark.parametrize("settings", [{"loss_scale": 2.0**20}, {"fp16": True}])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(settings: dict[str, object]) -> None:
    plain, other = make_step(), scaled(make_step(), **settings)
    batch = global_batch([100, 3, 50, 0])
    for _ in range(3):
        expected_result, _, _ = run(batch, 2, step=plain)
        result, _, _ = run(batch, 2, step=other)
        assert result.totals.loss == expected_result.totals.loss
        assert float(result.grad_norm) == float(expected_result.grad_norm)
    for a, b in zip(model_of(plain).parameters(), model_of(other).parameters(), strict=True):
        assert torch.equal(a, b)


def test_backward_sees_the_loss_times_the_scale() -> None:
    batch, seen = global_batch([100] * 4), []
    for scale in (1.0, 3.0):
        step = scaled(make_step(), loss_scale=scale)
        handle = model_of(step).head.register_hook(lambda grad: seen.append(grad.clone()))
        run(batch, 4, step=step)
        handle.remove()
    torch.testing.assert_close(seen[1], 3 * seen[0], rtol=1e-12, atol=1e-15)


def test_an_overflow_is_no_failure_and_leaves_weights_states_and_steps() -> None:
    step = scaled(make_step(), fp16=True, initial_loss_scale=16, hysteresis=2)
    batch = global_batch([100] * 4)
    run(batch, 2, step=step)
    before = [p.detach().clone() for p in model_of(step).parameters()]
    states = [state.tensor.clone() for state in step.optimizer.tensors()]
    handle, scales = overflowing(step), []
    for _ in range(3):
        result, _, _ = run(batch, 2, step=step)
        assert result.skipped and result.overflow and not result.nan
        assert result.grad_norm is None and result.num_zeros is None
        scales.append(step.optimizer.scaler.scale)
    assert scales == [16, 8, 4]
    assert step.health.consecutive == 0
    assert step.optimizer.scalars()["step"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model_of(step).parameters(), strict=True))
    for old, state in zip(states, step.optimizer.tensors(), strict=True):
        assert torch.equal(old, state.tensor)
    handle.remove()
    result, _, _ = run(batch, 2, step=step)
    assert not result.skipped and step.optimizer.scalars()["step"] == 2
    assert not torch.equal(before[0], model_of(step).embedding)


def test_an_overflow_at_the_smallest_scale_is_one_of_the_run() -> None:
    step = scaled(make_step(), fp16=True, initial_loss_scale=4, min_loss_scale=2, hysteresis=1)
    overflowing(step)
    assert run(global_batch([100] * 4), 2, step=step)[0].overflow
    with pytest.raises(RunFailed, match=r"not finite: head\); the loss scale \(2\) is at --min-l"):
        run(global_batch([100] * 4), 2, step=step)


def test_an_overflow_under_a_constant_scale_names_it() -> None:
    step = scaled(make_step(), loss_scale=4096)
    overflowing(step)
    with pytest.raises(RunFailed, match="multiplied by --loss-scale 4096: try less, or --fp16"):
        run(global_batch([100] * 4), 2, step=step)


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    step = scaled(make_step(model=poisoned()), fp16=True)
    with pytest.raises(RunFailed, match=r"loss is nan on rank 0 \(fp16 ends at 65504.*--bf16"):
        run(global_batch([100] * 4), 2, step=step)
    # Where the run goes on all the same, the scale falls as in Megatron-LM.
    health = HealthConfig(check_for_nan_in_loss_and_grad=False)
    step = scaled(make_step(model=poisoned(), health=health), fp16=True, hysteresis=1)
    result, _, _ = run(global_batch([100] * 4), 2, step=step)
    assert result.nan and not result.overflow
    assert step.optimizer.scaler.scale == 2.0**31


def test_a_reason_to_stop_travels_with_the_totals() -> None:
    step = make_step()
    plan = Plan(iteration=1, samples=range(4), learning_rate=0.0, weight_decay=0.0)
    batch = global_batch([100] * 4)
    result = step.run(plan, cut(batch, 4), 1, 400.0, lambda: (False, True, False))
    assert result.totals.stop == (False, True, False)


def test_microbatches_get_keys_of_their_own() -> None:
    step = make_step()
    keys: list[DropoutKey | None] = []

    def recording(
        model: nn.Module, batch: Batch, x: Tensor | None, dropout: DropoutKey | None
    ) -> TokenLosses:
        keys.append(dropout)
        return forward_step(model, batch, x, dropout)

    step.passes.forward_step = recording
    run(global_batch([100] * 4), 1, step=step)
    numbers = [(key.seed, key.iteration, key.microbatch) for key in keys if key is not None]
    assert numbers == [(1, 3, 0), (1, 3, 1), (1, 3, 2), (1, 3, 3)]


@pytest.mark.parametrize("per_token", [True, False])
def test_a_whole_set_has_one_loss_however_many_replicas_pad_it(per_token: bool) -> None:
    """Five samples in microbatches of one: two replicas read six, the last of which is empty."""
    batch, model = global_batch([90, 40, 70, 10, 100]), Tiny()
    serial = Mesh.serial()
    losses = []
    for replicas in (1, 2):
        objective, sums = Objective(per_token, serial), Accumulator(serial)
        for coordinate in range(replicas):
            dp = Axis("dp", tuple(range(replicas)), coordinate, None)
            mesh = Mesh({**serial.axes, "dp": dp}, coordinate, serial.device)
            numbers = whole_numbers(mesh, 1, 5)
            for _ in range(whole_count(mesh, 1, 5)):
                (number,) = next(numbers)
                empty = number == PADDING
                one = {name: value[[0 if empty else number]] for name, value in batch.items()}
                if empty:
                    one["loss_mask"] = torch.zeros_like(one["loss_mask"])
                sums.add(*objective.terms(forward_step(model, one, None, None), empty_counts=False))
        losses.append(sums.reduce().loss)
    assert losses[0] == pytest.approx(expected(batch, per_token, 1)[0], rel=1e-12)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_in_training_a_microbatch_without_valid_tokens_counts_as_a_loss_of_zero() -> None:
    batch = global_batch([90, 0])
    result, _, _ = run(batch, 1, per_token=False)
    losses = Tiny()(batch["tokens"], batch["labels"])[0, :90]
    assert result.totals.loss == pytest.approx(losses.mean().item() / 2, rel=1e-12)


def test_a_spike_ends_the_run_before_it_reaches_the_weights() -> None:
    step = make_step(health=HealthConfig(check_for_spiky_loss=True))
    batch = global_batch([100] * 4)
    for _ in range(10):
        step.health.finite(0.01)
    before = [parameter.detach().clone() for parameter in model_of(step).parameters()]
    with pytest.raises(RunFailed, match="iteration 3: loss"):
        run(batch, 2, step=step)
    for old, parameter in zip(before, model_of(step).parameters(), strict=True):
        assert torch.equal(old, parameter)


def test_before_an_update_copies_of_the_weights_may_be_waited_for() -> None:
    """Gradients are there then, and weights and states as they were."""
    step, seen = make_step(), list[list[Tensor]]()

    def look() -> None:
        assert all(parameter.grad.any() for parameter in model_of(step).parameters())
        seen.append([parameter.detach().clone() for parameter in model_of(step).parameters()])

    step.before_update = look
    before = [parameter.detach().clone() for parameter in model_of(step).parameters()]
    run(global_batch([100] * 4), 2, step=step)
    ((*there,),) = seen
    for old, then, now in zip(before, there, model_of(step).parameters(), strict=True):
        assert torch.equal(old, then) and not torch.equal(old, now)


class Given:
    """Microbatches that are there already."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def take(self, count: int) -> Iterator[Batch]:
        yield from self.batches[:count]


@pytest.mark.parametrize("per_token", [True, False])
def test_an_evaluation_leaves_out_microbatches_that_only_pad(per_token: bool) -> None:
    batch = global_batch([90, 40, 0])
    held_out = EvaluationSet("", Given(list(cut(batch, 1))), 3, 0, 0)  # type: ignore[arg-type]
    objective = Objective(per_token, Mesh.serial())
    evaluator = Evaluator(Passes([Tiny()], forward_step, objective, Timers(0)))
    some = {name: value[:2] for name, value in batch.items()}
    loss = evaluator.run(held_out)["lm loss"]
    assert loss == pytest.approx(expected(some, per_token, 1)[0], rel=1e-12)


def test_unused_memory_is_given_back_at_its_moments() -> None:
    """After all backwards and before the update, after it, and after an evaluation."""
    step, levels, seen = make_step(), list[int](), list[str]()
    weight = next(model_of(step).parameters())
    before = weight.detach().clone()

    def empty(level: int) -> None:
        levels.append(level)
        seen.append("updated" if not torch.equal(weight, before) else "not updated")

    step.empty_unused = empty
    run(global_batch([3, 5]), 1, step=step)
    assert (levels, seen) == ([1, 2], ["not updated", "updated"])
    held_out = EvaluationSet("", Given(list(cut(global_batch([9]), 1))), 1, 0, 0)  # type: ignore[arg-type]
    Evaluator(step.passes, empty).run(held_out)
    assert levels == [1, 2, 1]
