"""Our GPT with Megatron-core's weights gives Megatron-core's logits, gradients and training.

The cases under ``tests/data/mcore_trajectories`` were made with Megatron-core 0.19.2 in fp32:
initial weights, batches, logits of the first microbatch, every gradient of the first iteration
before clipping, losses and gradient norms of five iterations and of two more after a checkpoint.
"""

import functools
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core import rng
from megatron.core.config import specs
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import look_ahead
from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fusion_config import FusionConfig
from megatron.core.transformer.moe.balance import Balance
from megatron.core.transformer.plan import routers_of
from megatron.training import expert_loads
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import load_checkpoint
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import save_checkpoint
from megatron.training.health import Health
from megatron.training.log_config import HealthConfig
from megatron.training.objective import Objective, TokenLosses
from megatron.training.passes import Passes
from megatron.training.state import TrainState
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from pretrain_gpt import forward_step

DATA = Path(__file__).parent.parent / "data" / "mcore_trajectories"
CASES = sorted(path.name for path in DATA.iterdir())
NAMES = ("tokens", "labels", "loss_mask")


def config_of(flags: str) -> TransformerConfig:
    """Return the architecture that a case's Megatron flags describe, on the kernels of our choice.

    Those flags were chosen for Megatron-core's run.
    """
    by_flag = {}
    kernels = ("transformer_impl", *specs(FusionConfig))
    for spec in specs(TransformerConfig).values():
        if spec.name in kernels:
            continue
        by_flag |= {flag: (spec, True) for flag in (spec.flag, *spec.aliases)}
        by_flag |= {flag: (spec, value) for flag, value in spec.constants.items()}
        by_flag |= {spec.negative: (spec, False)} if spec.negative else {}
    values: dict[str, object] = {}
    words = shlex.split(flags)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word in by_flag:
            spec, constant = by_flag[word]
            values[spec.name] = constant if following.startswith("--") else spec.convert(following)
    return TransformerConfig.resolve(**values)


def load_case(name: str, dtype: torch.dtype) -> tuple[GPTModel, dict[str, torch.Tensor], dict]:
    case = json.loads((DATA / name / "case.json").read_text())
    model = GPTModel(config_of(case["flags"]), Mesh.serial(), vocab_size=128, dtype=dtype)
    weights = np.load(DATA / name / "init.npz")
    parameters = dict(model.named_parameters())
    renamed = joined({key: torch.from_numpy(weights[key]) for key in weights})
    assert set(renamed) == set(parameters)
    with torch.no_grad():
        for key, value in renamed.items():
            parameters[key].copy_(value)
    batches = {k: torch.from_numpy(v) for k, v in np.load(DATA / name / "batches.npz").items()}
    return model, batches, case


def ours(key: str) -> str:
    """Return our name of one of Megatron-core's parameters."""
    key = key.replace("core_attention.softmax_offset", "softmax_offset")
    # Its checkpoints have the latter name.
    key = key.replace("mtp_model_layer", "transformer_layer")
    return re.sub(r"local_experts\.\d+\.", "", key)


def joined(theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under our names; those of a layer's experts, in order, are one."""
    found: dict[str, list[torch.Tensor]] = {}
    for key, value in theirs.items():
        found.setdefault(ours(key), []).append(value)
    return {
        name: torch.stack(values) if ".mlp.experts." in name else values[0]
        for name, values in found.items()
    }


def objective_of(model: GPTModel, case: dict) -> Objective:
    """Return what a case minimises."""
    mtp, routers = model.config.mtp, routers_of(model.config)
    prepare = functools.partial(look_ahead, depths=mtp.depths) if mtp.depths else dict
    per_token = "--calculate-per-token-loss" in case["flags"]
    balanced = model.config.router.loss_weights if routers else {}
    experts = model.config.moe.num_experts or 0
    return Objective(per_token, model.mesh, mtp.loss_weights, prepare, balanced, routers, experts)


def expected_loss(record: dict, per_token: bool) -> float:
    """Return an iteration's loss; the record's own is the mean over tokens in both modes."""
    if per_token:
        return record["lm_loss"]
    sums = zip(record["microbatch_loss_sum_or_mean"], record["microbatch_num_tokens"], strict=True)
    return float(np.mean([total / count for total, count in sums]))


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str) -> None:
    model, batches, _ = load_case(name, torch.float32)
    with torch.no_grad():
        logits = model(batches["tokens"][0, 0])
    expected = torch.from_numpy(np.load(DATA / name / "logits.npz")["logits"])
    # Both in fp32, whose steps are 1e-7: sums of a few layers in another order.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_first_gradients_and_losses(name: str) -> None:
    model, batches, case = load_case(name, torch.float32)
    objective = objective_of(model, case)
    for step in range(2):
        batch = objective.prepare({key: batches[key][0, step] for key in NAMES})
        start = torch.tensor(0.5)  # one of two microbatches
        model.balance = Balance(batch["loss_mask"], objective.balanced, start)
        losses = forward_step(model, batch, None, None)
        assert isinstance(losses, TokenLosses)
        total = (losses.losses_BS * losses.mask_BS).sum()
        expected = case["iterations"][0]["microbatch_loss_sum_or_mean"][step]
        assert total.item() == pytest.approx(expected, rel=1e-5)
        norm = batches["loss_mask"][0].sum() if objective.per_token else losses.mask_BS.sum() * 2
        further = 0.0
        for one, mask in losses.auxiliary.values():
            depths = len(losses.auxiliary)
            further += 0.1 / depths * (one * mask).sum() / mask.sum() / 2
        (total / norm + further).backward()
    stored = np.load(DATA / name / "grads_iter1.npz")
    expected_grads = joined({key: torch.from_numpy(stored[key]) for key in stored})
    grads = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert set(expected_grads) == set(grads)
    for key, want in expected_grads.items():
        # fp32 again, over twice as many products; gradients are smaller than logits.
        torch.testing.assert_close(grads[key], want, rtol=2e-5, atol=2e-6, msg=key)


class Training:
    """A case's model in training, through our objective and optimizer."""

    def __init__(self, name: str) -> None:
        self.model, self.batches, self.case = load_case(name, torch.float32)
        settings = OptimizerConfig.resolve(
            adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, weight_decay=0.1, clip_grad=1.0
        )
        mesh = self.model.mesh
        self.optimizer = build_optimizer(settings, [self.model], mesh, PrecisionConfig.resolve())
        self.objective = objective_of(self.model, self.case)
        passes = Passes([self.model], forward_step, self.objective, Timers(0))
        self.step = TrainStep(passes, self.optimizer, Health(HealthConfig.resolve()), seed=0)

    def iterate(self, record: dict) -> None:
        """Run the iteration of a record, and compare loss and gradient norm with it."""
        number = record["iteration"]
        plan = Plan(iteration=number, samples=range(4), learning_rate=5e-3, weight_decay=0.1)
        microbatches = [{key: self.batches[key][number - 1, m] for key in NAMES} for m in range(2)]
        nominal = self.objective.nominal(4, 2, 32)
        result = self.step.run(plan, microbatches, 2, nominal, lambda: (False, False, False))
        loss = expected_loss(record, self.objective.per_token)
        assert result.totals.loss == pytest.approx(loss, rel=1e-5)
        further = result.totals.auxiliary_losses
        balanced = {name: further.pop(name) for name in self.objective.balanced}
        assert balanced == pytest.approx(record.get("moe_reported", {}), rel=1e-5)
        for name, values in record.get("moe_per_layer_mean_over_microbatches", {}).items():
            assert result.totals.loads is not None
            (layers,) = expert_loads.rows([result.totals.loads])
            assert [layer[name] for layer in layers] == pytest.approx(values, rel=1e-5)
        assert list(further.values()) == pytest.approx(record.get("mtp_loss", []), rel=1e-5)
        parameters = dict(self.model.named_parameters())
        for key, values in record.get("expert_bias_after_step", {}).items():
            assert parameters[key].tolist() == pytest.approx(values, abs=1e-7)
        assert float(result.grad_norm) == pytest.approx(record["grad_norm"], rel=1e-5)


def test_refused_gradients_move_neither_weights_nor_biases_of_experts() -> None:
    """The next iteration is that of a run which never saw them; its tokens alone count."""
    one, other = Training("moe_sigmoid"), Training("moe_sigmoid")
    one.step.health = Health(HealthConfig.resolve(skip_non_finite_iterations=1))
    start = {key: p.detach().clone() for key, p in one.model.named_parameters()}
    reduce_gradients = one.optimizer.data_parallel.reduce_gradients

    def spoilt() -> None:
        reduce_gradients()
        next(p.grad for p in one.model.parameters() if p.grad is not None).view(-1)[0] = torch.nan

    def run(training: Training, number: int) -> bool:
        plan = Plan(iteration=number, samples=range(4), learning_rate=5e-3, weight_decay=0.1)
        batches = training.batches
        microbatches = [{key: batches[key][number - 1, m] for key in NAMES} for m in range(2)]
        nominal = training.objective.nominal(4, 2, 32)
        return training.step.run(plan, microbatches, 2, nominal, lambda: (False,) * 3).skipped

    one.optimizer.data_parallel.reduce_gradients = spoilt
    assert run(one, 1)
    assert all(torch.equal(p, start[key]) for key, p in one.model.named_parameters())
    one.optimizer.data_parallel.reduce_gradients = reduce_gradients
    assert not run(one, 2) and not run(other, 2)
    expected = dict(other.model.named_parameters())
    assert all(torch.equal(p, expected[key]) for key, p in one.model.named_parameters())
    biases = [key for key in start if key.endswith("expert_bias")]
    assert biases and not any(torch.equal(expected[key], start[key]) for key in biases)


@pytest.mark.parametrize("name", CASES)
def test_five_iterations_and_two_after_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Loss and gradient norm of every iteration, the last two by a model that starts from disk."""
    first = Training(name)
    for record in first.case["iterations"]:
        first.iterate(record)
    assert record["iteration"] == 5
    for key, norm in first.case["final_weight_l2"].items():
        weight = dict(first.model.named_parameters())[ours(key)].detach()
        expert = re.search(r"local_experts\.(\d+)\.", key)
        weight = weight if expert is None else weight[int(expert.group(1))]
        assert float(weight.norm()) == pytest.approx(norm, rel=1e-5), key
    config = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    facts = RunFacts(
        config={},
        schedule=None,
        tokenizer="",
        vocabulary=128,
        vocabulary_rows=128,
        objective="tokens" if first.objective.per_token else "microbatches",
    )
    mesh, state = first.model.mesh, TrainState(iteration=5, consumed_samples=20)
    save_checkpoint(
        CheckpointedRun(config, mesh, [first.model], first.optimizer, facts, print), state
    )

    fresh = Training(name)
    rng.initialize(fresh.model, 99)
    run = CheckpointedRun(config, mesh, [fresh.model], fresh.optimizer, facts, print)
    loaded = load_checkpoint(run, ScheduleConfig(lr=5e-3))
    assert loaded.state == state
    assert [record["iteration"] for record in fresh.case["after_checkpoint"]] == [6, 7]
    for record in fresh.case["after_checkpoint"]:
        fresh.iterate(record)
