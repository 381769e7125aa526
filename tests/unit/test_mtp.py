"""Multi-token prediction: what each depth sees, what it computes, how its loss counts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.kernels import dropout as masks
from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import Ahead, look_ahead
from megatron.core.rng import DropoutKey
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.objective import Accumulator, Objective, TokenLosses

IDS, LENGTH = 29, 8
ALWAYS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "position_embedding_type": "rope",
    "init_method_std": 0.3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
RUN = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 1 "
    "--lr 1 --mock-data --vocab-size 99 --dry-run --num-layers 2"
)


def model_of(depths: int, **settings: object) -> GPTModel:
    config = TransformerConfig.resolve(**{**ALWAYS, "mtp_num_layers": depths, **settings})
    model = GPTModel(config, Mesh.serial(), vocab_size=IDS, dtype=torch.float64)
    rng.initialize(model, 3)
    return model


def batch_of(samples: int, depths: int) -> dict[str, Tensor]:
    text = torch.randint(0, IDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(samples, LENGTH)
    mask[:, :2] = 0.0
    plain = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    return look_ahead(plain, depths)


def test_what_the_depths_see() -> None:
    tokens = torch.tensor([[10, 11, 12, 13]])
    mask = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    seen = look_ahead({"tokens": tokens, "labels": tokens + 1, "loss_mask": mask}, 2)
    assert seen["ahead_tokens"][0].t().tolist() == [[11, 12, 13, 0], [12, 13, 0, 0]]
    assert seen["ahead_labels"][0].t().tolist() == [[12, 13, 14, 0], [13, 14, 0, 0]]
    assert seen["ahead_loss_mask"][0].t().tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert torch.equal(seen["tokens"], tokens) and torch.equal(seen["loss_mask"], mask)


def test_documents_that_attend_within_themselves_are_shifted_within_themselves() -> None:
    """Two samples, the first of documents of 1, 3 and 2 tokens; bounds count over both."""
    tokens = torch.arange(10, 22).view(2, 6)
    seen = look_ahead(
        {
            "tokens": tokens,
            "labels": tokens + 1,
            "loss_mask": torch.ones(2, 6),
            "cu_seqlens": torch.tensor([0, 1, 4, 6, 6, 12], dtype=torch.int32),
        },
        2,
    )
    assert seen["ahead_tokens"][0].t().tolist() == [[0, 12, 13, 0, 15, 0], [0, 13, 0, 0, 0, 0]]
    assert seen["ahead_tokens"][1, :, 0].tolist() == [17, 18, 19, 20, 21, 0]
    assert seen["ahead_loss_mask"][0].t().tolist() == [[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]


def test_a_rank_without_samples_has_nothing_to_shift() -> None:
    assert look_ahead({}, 2) == {} and Ahead.of({}) is None


def test_the_depths_by_the_formula() -> None:
    model, batch = model_of(2, untie_embeddings_and_output_weights=True), batch_of(3, 2)
    ahead = Ahead.of(batch)
    found = model(batch["tokens"], batch["labels"], ahead=ahead)
    assert model.mtp is not None and model.output_layer is not None and model.rotary is not None
    context = Context(rotary=model.rotary(LENGTH, None))
    table = dict(model.named_parameters())["embedding.word_embeddings.weight"]
    state = model.decoder(table[batch["tokens"].t()], context)
    tokens, labels = batch["tokens"], batch["labels"]
    for depth in (1, 2):
        layer = model.mtp.layers[str(depth - 1)]
        tokens = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), 1)
        labels = torch.cat((labels[:, 1:], torch.zeros_like(labels[:, :1])), 1)
        joined = torch.cat((layer.enorm(table[tokens.t()]), layer.hnorm(state)), -1)
        state = layer.transformer_layer(joined @ layer.eh_proj.weight.t(), context)
        state = layer.final_layernorm(state)
        log_probabilities = (state @ model.output_layer.weight.t()).log_softmax(-1).transpose(0, 1)
        expected = -log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found[depth], expected, rtol=1e-12, atol=1e-12)


def test_a_depth_is_told_no_token_that_it_predicts() -> None:
    """Depth k at position i knows tokens up to i + k, and the last of these matters."""
    model, batch = model_of(2), batch_of(1, 2)

    def losses(changed: int | None) -> Tensor:
        tokens = batch["tokens"].clone()
        if changed is not None:
            tokens[0, changed] = (tokens[0, changed] + 1) % IDS
        seen = look_ahead({**batch, "tokens": tokens}, 2)
        return model(tokens, batch["labels"], ahead=Ahead.of(seen)).detach()[:, 0]

    before, after = losses(None), losses(5)
    for depth in range(3):
        moved = (before[depth] - after[depth]).abs() > 1e-12
        assert moved.tolist() == [position + depth >= 5 for position in range(LENGTH)]


def test_logits_do_not_need_the_depths() -> None:
    model, batch = model_of(1), batch_of(2, 1)
    plain = GPTModel(
        replace(model.config, mtp=replace(model.config.mtp, mtp_num_layers=None)),
        Mesh.serial(),
        vocab_size=IDS,
        dtype=torch.float64,
    )
    rng.initialize(plain, 3)
    assert torch.equal(model(batch["tokens"]), plain(batch["tokens"]))
    with pytest.raises(AssertionError, match="look_ahead"):
        model(batch["tokens"], batch["labels"])


def test_layers_take_after_the_decoders_layer_of_their_number() -> None:
    model = model_of(2, window_size=(3, 0), window_attn_skip_freq=(0, 1))
    assert model.mtp is not None
    for stack in (model.decoder.layers, model.mtp.layers):
        windows = [
            getattr(layer, "transformer_layer", layer).self_attention.rule.window
            for layer in stack.values()
        ]
        assert windows == [None, (3, 0)]


def test_documents_do_not_see_each_other() -> None:
    model, batch = model_of(1), batch_of(1, 1)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)

    def losses(tokens: Tensor) -> Tensor:
        seen = look_ahead({**batch, "tokens": tokens, "cu_seqlens": bounds}, 1)
        packing, ahead = Packing(bounds), Ahead.of(seen)
        return model(tokens, batch["labels"], packing=packing, ahead=ahead).detach()[1, 0]

    changed = batch["tokens"].clone()
    changed[0, 3:] = (changed[0, 3:] + 1) % IDS
    same = losses(batch["tokens"]) == losses(changed)
    assert same[:3].all() and not same[3:].any()


def test_every_depth_has_dropout_masks_of_its_own() -> None:
    """And other ones than the decoder's layer of the same number has."""
    model, batch = model_of(2, hidden_dropout=0.5), batch_of(1, 2)
    original, seeds = masks.dropout, []

    def spy(x: Tensor, p: float, seed: int) -> Tensor:
        seeds.append(seed)
        return original(x, p, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "dropout", spy)
        model(batch["tokens"], batch["labels"], dropout=DropoutKey(1, 1, 0), ahead=Ahead.of(batch))
    # The embedding and two residuals in each of two layers; the same in each depth of one layer.
    assert len(seeds) == (1 + 4) + 2 * (1 + 2) and len(set(seeds)) == len(seeds)


MASKS = torch.tensor([[[1.0, 1, 1, 1], [0, 0, 1, 1]], [[0, 1, 1, 0], [0, 0, 0, 1]]])
FURTHER = torch.tensor([[[1.0, 1, 1, 0], [0, 1, 1, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]])


@pytest.mark.parametrize("per_token", [True, False])
def test_auxiliary_losses_count_as_means_of_microbatches(per_token: bool) -> None:
    """Two microbatches: what is minimised is the loss and a weighted auxiliary one."""
    generator = torch.Generator().manual_seed(1)
    main, more = (torch.rand(2, 2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mesh = Mesh.serial()
    objective = Objective(per_token, mesh, {"more": 0.3})
    sums, minimised = Accumulator(mesh, ("more",)), []
    for m in range(2):
        terms = objective.terms(TokenLosses(main[m], MASKS[m], {"more": (more[m], FURTHER[m])}))
        sums.add(*terms)
        minimised.append(objective.minimised(terms))
    means = [float((x * f).sum() / f.sum()) for x, f in zip(more, FURTHER, strict=True)]
    counts = [6.0, 3.0] if per_token else [1.0, 1.0]
    own = [(main[m] * MASKS[m]).sum() / (1 if per_token else MASKS[m].sum()) for m in range(2)]
    for m in range(2):
        expected = float(own[m]) + 0.3 * counts[m] * means[m]
        assert float(minimised[m]) == pytest.approx(expected, rel=1e-14)
    totals = sums.reduce()
    assert totals.loss == pytest.approx(float(sum(own)) / sum(counts), rel=1e-14)
    weighted = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    assert totals.auxiliary_losses == pytest.approx({"more": weighted}, rel=1e-14)


def test_an_auxiliary_loss_that_no_token_counts_for_is_nothing() -> None:
    objective = Objective(True, Mesh.serial(), {"more": 0.3})
    losses, none = torch.full((1, 4), 2.0), torch.zeros(1, 4)
    terms = objective.terms(TokenLosses(losses, torch.ones(1, 4), {"more": (losses, none)}))
    assert float(objective.minimised(terms)) == 8.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_auxiliary_loss_that_is_not_finite_is_noticed(value: float) -> None:
    sums = Accumulator(Mesh.serial(), ("more",))
    one = torch.tensor(1.0)
    sums.add(one, one, one, (torch.tensor(value),))
    totals = sums.reduce()
    assert totals.loss == 1.0 and totals.bad_ranks == 1 and not totals.is_finite


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mtp-num-layers 1", "does not go with learned positions"),
        ("--mtp-num-layers 3 --position-embedding-type rope", r"not exceed --num-layers \(2\)"),
        ("--mtp-num-layers -1 --position-embedding-type rope", "must not be negative"),
        (
            "--mtp-num-layers 2 --position-embedding-type rope --pipeline-model-parallel-size 4 "
            "--dry-run-world-size 4 --pipeline-model-parallel-layout Et|t|mm|L",
            "stage 2 holds m without the head, .*; put mmL at the end",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(f"{RUN} {words}".split())
