"""Moments in short formats over thousands of steps, against float64 sums written out here."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.adam import Adam
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import Settings
from megatron.core.optimizer.mixed_precision import update
from megatron.core.optimizer.scaled import Scaled
from megatron.core.optimizer.update import Ranges, Step
from megatron.core.precision import moments
from megatron.core.utils import UserError
from megatron.training.arguments import parse

SIZE, STEPS = 70, 2500
LOUD, QUIET = 3e-3, 3e-5
"""Sizes of gradients in the first half of the steps and in the second."""
FORMATS = {
    "fp32": (0.9, 0.999),
    "bf16": (0.9, 0.95),
    "bf16 at its bound": (0.992, 0.992),
    "fp16": (0.9, 0.95),
    "fp16 at its bound": (0.999, 0.999),
}
KINDS = ("exp_avg", "exp_avg_sq")


class Moments:
    """Both moments of 70 weights in one format, updated by Adam."""

    def __init__(self, kind: str, betas: tuple[float, float]) -> None:
        beta1, beta2 = betas
        self.rule = Adam(OptimizerConfig(adam_beta1=beta1, adam_beta2=beta2))
        states: dict[str, list[Tensor]] = {}
        scaled: dict[str, list[Scaled]] = {}
        for name in KINDS:
            if kind == "fp16":
                device, divides = torch.device("cpu"), name == "exp_avg_sq"
                scaled[name] = Scaled.zeros([SIZE], device, divides=divides)
            else:
                dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
                states[name] = [torch.zeros(SIZE, dtype=dtype)]
        self.weights, self.grads = torch.zeros(SIZE), torch.zeros(SIZE)
        self.ranges = Ranges([self.weights], [self.grads], states, (), scaled)
        self.number = torch.zeros(())

    def step(self, gradient: Tensor) -> None:
        self.number += 1
        self.grads.copy_(gradient)
        step = Step(self.number, None, torch.zeros(()), Settings(1e-3, 0.0))
        update(self.rule, self.ranges, step, torch.float32)

    def values(self, name: str) -> Tensor:
        """Return a moment in float64."""
        (kept,) = {**self.ranges.states, **self.ranges.scaled}[name]
        return kept.to(torch.float32).double()


def gradients() -> Tensor:
    """Return [steps, weights]: loud ones, then quiet ones; half steady, half normal numbers."""
    normal = torch.randn(2 * STEPS, SIZE // 2, generator=torch.Generator().manual_seed(1))
    steady = torch.linspace(1, 2, SIZE // 2).expand(2 * STEPS, -1)
    sizes = torch.tensor([LOUD, QUIET]).repeat_interleave(STEPS)[:, None]
    return torch.cat([steady, normal], 1) * sizes


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "fp16" else name for name in FORMATS],
)
def test_moments_follow_their_gradients(name: str) -> None:
    """Up and, when gradients become smaller, down again.

    A step adds at most half a last bit to what rounding has left of the steps before, which decays
    as the moment does.
    """
    kind, betas = name.split()[0], FORMATS[name]
    kept, exact, bounds = Moments(kind, betas), np.zeros((2, SIZE)), np.zeros((2, SIZE))
    bits = moments.BITS.get(kind, 24)
    for number, gradient in enumerate(gradients(), 1):
        kept.step(gradient)
        g = gradient.double().numpy()
        for row, (beta, x) in enumerate(zip(betas, (g, g * g), strict=True)):
            found = kept.values(KINDS[row]).numpy()
            exact[row] = beta * exact[row] + (1 - beta) * x
            # A moment of 11 bits loses what is below 2^-29 of its block's largest.
            rounded = 2.0**-bits * np.abs(found) + 2.0**-29 * np.abs(found).max()
            bounds[row] = beta * bounds[row] + rounded + 2.0**-22 * (np.abs(x) + np.abs(found))
            apart = np.abs(found - exact[row])
            assert (apart <= bounds[row]).all(), (number, KINDS[row], (apart / bounds[row]).max())
        if number == STEPS:
            loud = exact[1].copy()
    assert (exact[1] < 0.3 * loud).all()  # the test is about something
    shares = kept.values("exp_avg_sq").numpy() / exact[1]
    assert ((shares > 1 / (1 + moments.MOST)) & (shares < 1 / (1 - moments.MOST))).all()


def test_where_rounding_gives_back_what_a_step_takes() -> None:
    """A bf16 second moment stays where it is at 0.999, and in part at 0.997; at 0.996 none does."""
    frozen = {}
    for beta in (0.999, 0.997, 0.996):
        kept = Moments("bf16", (0.9, beta))
        start = 2.0 ** torch.linspace(-20, -18, SIZE)
        kept.ranges.states["exp_avg_sq"][0].copy_(start)
        before = kept.values("exp_avg_sq")
        for _ in range(500):
            kept.step(torch.zeros(SIZE))
        after = kept.values("exp_avg_sq")
        frozen[beta] = float((after > before * beta**500 * 1.1).double().mean())
        assert (after <= before).all()
        assert torch.equal(after, before) == (beta == 0.999)
    assert frozen[0.997] > 0 and frozen[0.999] == 1
    assert moments.error("bf16", 1 - 2**-8) == 1


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_from_where_on_numbers_stand_still(kind: str) -> None:
    """Every number moves at 1 - 2^-p, one does not from a little below on, and none at half."""
    bits = moments.BITS[kind]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    all_of_one_power = (1 + torch.arange(2 ** (bits - 1)).double() / 2 ** (bits - 1)).to(dtype)

    def stay(rest: float) -> int:
        fallen = (all_of_one_power.double() * (1 - rest)).to(dtype)
        return int((fallen == all_of_one_power).sum())

    least = 2.0**-bits
    assert stay(least) == 0
    assert stay(least / (1 + 2 * least) * 1.0005) == 0
    assert stay(least / (1 + 2 * least) * 0.9995) == 1
    assert 1 < stay(least / 2 * 1.1) < len(all_of_one_power)
    assert stay(least / 2 * 0.999) == len(all_of_one_power)


BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --dry-run "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --bf16 "
    "--use-precision-aware-optimizer"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--exp-avg-sq-dtype bf16",
            r"--exp-avg-sq-dtype bf16 with --adam-beta2 0.999: a step takes 0.001 .* 8 bits of "
            r"bf16 .* 0.0039 .*use --exp-avg-sq-dtype fp16 \(11 bits\) or --exp-avg-sq-dtype "
            "fp32, or --adam-beta2 of at most 0.992",
        ),
        (
            "--exp-avg-sq-dtype bf16 --adam-beta2 0.9999",
            "use --exp-avg-sq-dtype fp32, or --adam-beta2 of at most 0.992",
        ),
        (
            "--exp-avg-sq-dtype fp16 --adam-beta2 0.9995",
            "use --exp-avg-sq-dtype fp32, or --adam-beta2 of at most 0.999",
        ),
        (
            "--exp-avg-dtype bf16 --adam-beta1 0.997",
            r"--exp-avg-dtype bf16 with --adam-beta1 0.997: .*use --exp-avg-dtype fp16 \(11 bits\)",
        ),
    ],
)
def test_moments_that_would_not_decay_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(f"{BASE} {words}".split())


def test_moments_that_decay_are_taken() -> None:
    for kind, beta in moments.LARGEST.items():
        assert 0.45 < moments.error(kind, beta) <= moments.MOST
        parse(f"{BASE} --exp-avg-sq-dtype {kind} --adam-beta2 {beta}".split())
    parse(f"{BASE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16".split())


def test_what_is_recommended() -> None:
    found = [moments.shortest(beta) for beta in (0.9, 0.99, 0.995, 0.999, 0.9995)]
    assert found == ["bf16", "bf16", "fp16", "fp16", "fp32"]
