"""BERT with Megatron-core's weights gives its logits, losses and gradients; its heads are BERT's.

``tests/data/mcore_bert/model.npz`` was made with Megatron-core 0.16.1 (``BertModel`` of local
layers, in fp32), with both heads and with that of words alone. Padding is compared nowhere: its
rows are what a mask makes of nothing, and nobody reads them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLMPredictionHead, BertPooler

from megatron.core import rng
from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Mesh
from megatron.core.models.bert import BertHead, BertModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from megatron.training.objective import Objective
from pretrain_bert import forward_step

FILE = Path(__file__).resolve().parent.parent / "data" / "mcore_bert" / "model.npz"
CASES = {"both": True, "words": False}
RENAMED = (
    ("encoder.", "decoder."),
    ("tokentype_embeddings", "token_type_embeddings"),
    ("lm_head.dense", "output_layer.dense"),
    ("lm_head.layer_norm", "output_layer.layernorm"),
    ("pooler.dense", "output_layer.pooler"),
    ("binary_head", "output_layer.order"),
)


def ours(name: str) -> str:
    for old, new in RENAMED:
        name = name.replace(old, new)
    return name


def build(has_order: bool, dtype: torch.dtype = torch.float32, **more: Any) -> BertModel:
    config = TransformerConfig.resolve(
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 40},
        **{"max_position_embeddings": 12, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        **{"encoder_alone": True, "sentence_order_head": has_order, "bias_gelu_fusion": False},
        **more,
    )
    return BertModel(config, Mesh.serial(), vocab_size=48, dtype=dtype)


def load_case(name: str) -> tuple[BertModel, dict[str, Tensor], dict[str, Tensor]]:
    """Return the model with Megatron-core's weights, its gradients, and the rest of the case."""
    with np.load(FILE) as stored:
        arrays = {
            key.removeprefix(f"{name}/"): torch.from_numpy(stored[key])
            for key in stored
            if key.startswith(f"{name}/")
        }
    model = build(CASES[name])
    parameters = dict(model.named_parameters())
    kinds: dict[str, dict[str, Tensor]] = {"init": {}, "grad": {}}
    for key in [key for key in arrays if "/" in key]:
        kind, path = key.split("/")
        kinds[kind][ours(path)] = arrays.pop(key)
    assert kinds["init"].keys() == parameters.keys()
    with torch.no_grad():
        for path, values in kinds["init"].items():
            parameters[path].copy_(values)
    return model, kinds["grad"], arrays


def batch_of(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a case's microbatch as the data sets give it."""
    count, length = case["tokens"].shape
    bounds = [0]
    for number, valid in enumerate(case["lengths"].tolist()):
        bounds += [number * length + valid, (number + 1) * length]
    batch = {name: case[name] for name in ("tokens", "labels", "loss_mask")}
    batch["token_types"], batch["cu_seqlens"] = case["types"], torch.tensor(bounds)
    if "sop_logits" in case:
        batch["sentence_order"] = case["is_random"]
    assert count == len(case["lengths"])
    return batch


@pytest.mark.parametrize("name", CASES)
def test_logits_are_megatrons(name: str) -> None:
    model, _, case = load_case(name)
    batch = batch_of(case)
    with torch.no_grad():
        said = model(
            batch["tokens"],
            token_types_BS=batch["token_types"],
            packing=Packing(batch["cu_seqlens"]),
        )
    valid_BS = torch.arange(12) < case["lengths"][:, None]
    # Both in fp32, whose steps are 1e-7: sums of a few layers in another order.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(said.words[valid_BS], case["logits"][valid_BS], **close)
    assert (said.order is None) == (name == "words")
    if said.order is not None:
        torch.testing.assert_close(said.order, case["sop_logits"], **close)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_megatrons(name: str) -> None:
    """Its losses are means over a microbatch, and so are ours under that objective."""
    model, gradients, case = load_case(name)
    losses = forward_step(model, batch_of(case), None, None)
    weights = model.config.bert.loss_weights
    objective = Objective(False, model.mesh, weights)
    terms = objective.terms(losses)
    torch.testing.assert_close(terms.numerator, case["lm_loss"], rtol=1e-5, atol=0)
    if weights:
        torch.testing.assert_close(terms.auxiliary[0], case["sop_loss"], rtol=1e-5, atol=0)
    objective.minimised(terms).backward()
    for path, parameter in model.named_parameters():
        expected = gradients[path]
        assert parameter.grad is not None, path
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * max(scale, 0.1))


def test_heads_are_those_of_the_transformers_library() -> None:
    """Dense, GELU, norm, the embedding's matrix and a bias; pooled first token and two logits."""
    theirs = BertConfig(hidden_size=16, vocab_size=48, layer_norm_eps=1e-5, hidden_act="gelu")
    words, pooler = BertLMPredictionHead(theirs).double(), BertPooler(theirs).double()
    order = torch.nn.Linear(16, 2).double()
    model = build(True, torch.float64, untie_embeddings_and_output_weights=True)
    head = model.output_layer
    assert isinstance(head, BertHead) and head.pooler is not None
    random = torch.Generator().manual_seed(2)
    pairs = {
        head.weight: words.decoder.weight,
        head.bias: words.bias,
        head.dense.weight: words.transform.dense.weight,
        head.dense.bias: words.transform.dense.bias,
        head.layernorm.weight: words.transform.LayerNorm.weight,
        head.layernorm.bias: words.transform.LayerNorm.bias,
        head.pooler.weight: pooler.dense.weight,
        head.pooler.bias: pooler.dense.bias,
        head.order.weight: order.weight,
        head.order.bias: order.bias,
    }
    with torch.no_grad():
        words.decoder.bias = words.bias
        for own, other in pairs.items():
            other.copy_(torch.randn(other.shape, generator=random, dtype=torch.float64))
            own.copy_(other)
        x_BSH = torch.randn(3, 12, 16, generator=random, dtype=torch.float64)
        found_words, found_order = head(x_BSH.transpose(0, 1))
        torch.testing.assert_close(found_words, words(x_BSH), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_order, order(pooler(x_BSH)), rtol=1e-12, atol=1e-12)


def test_padding_is_seen_by_nothing() -> None:
    """Whatever stands there, words and order are the same, and their losses and gradients."""
    model, _, case = load_case("both")
    model = model.double()
    found = []
    for fill in (0, 7):
        batch = batch_of(case)
        padding = torch.arange(12) >= case["lengths"][:, None]
        batch["tokens"] = torch.where(padding, fill, batch["tokens"])
        batch["token_types"] = torch.where(padding, fill % 2, batch["token_types"])
        model.zero_grad()
        losses = forward_step(model, batch, None, None)
        words = (losses.losses_BS * losses.mask_BS).sum()
        (words + losses.auxiliary["sop loss"][0].sum()).backward()
        gradients = [p.grad for p in model.parameters()]
        found.append((words.detach(), *gradients))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_sample_sees_both_ways_and_no_other_sample() -> None:
    model = build(True, torch.float64)
    rng.initialize(model, 3)
    tokens = torch.arange(24).view(2, 12)
    bounds = Packing(torch.tensor([0, 12, 12, 24, 24]))
    types = torch.zeros_like(tokens)

    def logits(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            words: Tensor = model(tokens, token_types_BS=types, packing=bounds).words
        return words

    changed = tokens.clone()
    changed[0, 11] = 40
    before, after = logits(tokens), logits(changed)
    assert (before[0] != after[0]).any(-1).all() and torch.equal(before[1], after[1])


def test_an_unknown_order_counts_for_nothing() -> None:
    model, _, case = load_case("both")
    batch = batch_of(case)
    batch["sentence_order"] = torch.tensor([1, -1, 1])
    losses, mask = forward_step(model, batch, None, None).auxiliary["sop loss"]
    assert mask[:, 0].tolist() == [True, False, True]
    expected = F.cross_entropy(case["sop_logits"], case["is_random"], reduction="none")
    torch.testing.assert_close(losses[[0, 2], 0], expected[[0, 2]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "given", [{"num_experts": 4}, {"mtp_num_layers": 1, "position_embedding_type": "rope"}]
)
def test_what_is_for_a_decoder_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="encoder alone; drop one"):
        build(False, **given)
