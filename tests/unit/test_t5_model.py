"""Our T5 with others' weights gives their logits, losses, gradients and training.

The case under ``tests/data/mcore_t5_model`` was made with Megatron-core 0.19.2 in fp32, as those of
`test_gpt_trajectories`. T5 of the transformers package is in `test_bridge_t5`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.mesh import Mesh
from megatron.core.models.t5 import T5Model
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.relative import RelativePositions, bucket
from megatron.training.health import Health
from megatron.training.log_config import HealthConfig
from megatron.training.objective import Objective, TokenLosses
from megatron.training.passes import Passes
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from pretrain_t5 import forward_step
from tests.unit.test_gpt_trajectories import config_of

DATA = Path(__file__).parent.parent / "data" / "mcore_t5_model"
NAMES = {
    "text_enc": "encoder_tokens",
    "text_dec": "decoder_tokens",
    "labels": "labels",
    "enc_mask": "encoder_valid",
    "loss_mask": "loss_mask",
}
CASE = json.loads((DATA / "case.json").read_text())


def ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under our names; Megatron-core's have two for two of them."""
    named = {name.removeprefix("lm_head."): value for name, value in theirs.items()}
    return {name: x for name, x in named.items() if name != "position_embeddings.weight"}


def stored(name: str) -> dict[str, Tensor]:
    with np.load(DATA / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def load_case() -> T5Model:
    model = T5Model(config_of(CASE["flags"]), Mesh.serial(), vocab_size=128)
    copy_weights(model, ours(stored("init")))
    return model


def copy_weights(model: T5Model, weights: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert set(weights) == set(parameters)
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)


def microbatch(iteration: int, number: int) -> dict[str, Tensor]:
    batches = {key: value[iteration, number] for key, value in stored("batches").items()}
    batch = {ours: batches[theirs] for theirs, ours in NAMES.items()}
    batch["encoder_valid"] = batch["encoder_valid"] > 0
    return batch


def test_logits_of_megatron_core() -> None:
    model, batch = load_case(), microbatch(0, 0)
    with torch.no_grad():
        logits = model(
            batch["encoder_tokens"],
            batch["decoder_tokens"],
            encoder_valid_BS=batch["encoder_valid"],
        )
    # Its queries at padding see all keys alike, ours what is no padding; neither counts.
    counts = batch["loss_mask"] > 0
    expected = stored("logits")["logits"]
    torch.testing.assert_close(logits[counts], expected[counts], rtol=1e-5, atol=1e-5)


def test_attention_is_given_a_mask_only_where_padding_could_be_seen() -> None:
    """A decoder's own attention is causal and has none, so that fused causal kernels can run."""
    model, batch, told = load_case(), microbatch(0, 0), dict[str, tuple[bool, bool]]()
    assert not batch["loss_mask"].all()
    for name, module in model.named_modules():
        if isinstance(module, Attention):

            def attend(*given: Any, name: str = name, real: Any = module.attend) -> Tensor:
                rule, extras = given[3:]
                told[name.split(".layers.")[0] + "." + name.rsplit(".", 1)[1]] = (
                    rule.causal,
                    extras.valid_BT is not None,
                )
                return real(*given)  # type: ignore[no-any-return]

            module.attend = attend
    forward_step(model, batch, None, None)
    assert told == {
        "encoder.self_attention": (False, True),
        "decoder.self_attention": (True, False),
        "decoder.cross_attention": (False, True),
    }


def test_first_gradients_of_megatron_core() -> None:
    model = load_case()
    for number in range(2):
        losses = forward_step(model, microbatch(0, number), None, None)
        assert isinstance(losses, TokenLosses)
        loss = (losses.losses_BS * losses.mask_BS).sum() / losses.mask_BS.sum()
        expected = CASE["iterations"][0]["microbatch_loss_sum_or_mean"][number]
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        (loss / 2).backward()
    expected_grads = ours(stored("grads_iter1"))
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert set(expected_grads) == set(grads)
    for name, want in expected_grads.items():
        torch.testing.assert_close(grads[name], want, rtol=2e-5, atol=2e-6, msg=name)


def test_iterations_of_megatron_core() -> None:
    model = load_case()
    settings = OptimizerConfig.resolve(
        adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, weight_decay=0.1, clip_grad=1.0
    )
    optimizer = build_optimizer(settings, [model], model.mesh, PrecisionConfig.resolve())
    objective = Objective(False, model.mesh)
    passes = Passes([model], forward_step, objective, Timers(0))
    step = TrainStep(passes, optimizer, Health(HealthConfig.resolve()), seed=0)
    for record in [*CASE["iterations"], *CASE["after_checkpoint"]]:
        number = record["iteration"]
        plan = Plan(iteration=number, samples=range(4), learning_rate=5e-3, weight_decay=0.1)
        batches = [microbatch(number - 1, m) for m in range(2)]
        nominal = objective.nominal(4, 2, 16)
        result = step.run(plan, batches, 2, nominal, lambda: (False, False, False))
        assert result.totals.loss == pytest.approx(record["lm_loss"], rel=1e-5)
        assert float(result.grad_norm) == pytest.approx(record["grad_norm"], rel=2e-5)
        if number == 5:
            for name, norm in ours(CASE["final_weight_l2"]).items():
                weight = dict(model.named_parameters())[name].detach()
                assert float(weight.norm()) == pytest.approx(norm, rel=1e-5), name


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_the_transformers_package(bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-300, 301)
    for buckets, longest in ((32, 128), (8, 20), (4, 3)):
        expected = t5.T5Attention._relative_position_bucket(
            distances, bidirectional, buckets, longest
        )
        assert torch.equal(bucket(distances, buckets, longest, bidirectional), expected)


def test_biases_sum_their_gradients_in_a_wide_dtype() -> None:
    """Of as many ones as a bucket has pairs, in bf16, where 256 + 1 is 256."""
    config = TransformerConfig.resolve(num_layers=1, hidden_size=4, num_attention_heads=1)
    length = 400
    biases = RelativePositions(
        config.position, 1, Init(), Mesh.serial(), torch.bfloat16, bidirectional=True
    )
    biases(length).backward(torch.ones(1, 1, length, length, dtype=torch.bfloat16))
    at = torch.arange(length)
    pairs = bucket(at - at[:, None], 32, 128, True).flatten().bincount(minlength=32)
    assert pairs.max() > 20_000 and biases.weight.grad is not None
    assert torch.equal(biases.weight.grad.flatten(), pairs.to(torch.bfloat16))


def changed(model: T5Model, batch: dict[str, Tensor]) -> Tensor:
    losses = forward_step(model, batch, None, None)
    assert isinstance(losses, TokenLosses)
    return losses.losses_BS[losses.mask_BS > 0]


@pytest.mark.parametrize("positions", ["learned_absolute", "relative", "rope", "none"])
def test_padding_changes_nothing(positions: str) -> None:
    """Losses and gradients do not depend on what stands at padding, nor on how much there is."""
    config = TransformerConfig.resolve(
        num_layers=2,
        decoder_num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        position_embedding_type=positions,
        max_position_embeddings=24,
    )
    torch.manual_seed(0)
    text, said = torch.randint(50, (2, 9)), torch.randint(50, (2, 6))
    reads, writes = (torch.arange(n) < torch.tensor([[n], [n - 2]]) for n in (9, 6))  # unevenly
    found = []
    for more, filling in ((0, 0), (5, 0), (5, 7)):
        model = T5Model(config, Mesh.serial(), vocab_size=50, dtype=torch.float64)
        rng.initialize(model, 1)

        def padded(x: Tensor, value: int, more: int = more) -> Tensor:
            return torch.nn.functional.pad(x, (0, more), value=value)

        batch = {
            "encoder_tokens": padded(text.where(reads, filling), filling),
            "decoder_tokens": padded(said.where(writes, filling), filling),
            "labels": padded(said.roll(1, 1).where(writes, filling), filling),
            "encoder_valid": padded(reads, 0),
            "loss_mask": padded(writes.double(), 0),
        }
        losses = changed(model, batch)
        losses.sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append((losses.detach(), grads))
    for losses, grads in found[1:]:
        torch.testing.assert_close(losses, found[0][0], rtol=1e-12, atol=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], rtol=1e-10, atol=1e-12, msg=name)
