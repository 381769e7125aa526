"""Experts and weights by a backward of the chosen alone, against the reference and its autograd."""

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import routing, routing_of_chosen
from megatron.core.kernels.routing import Rule

F64 = torch.float64
TOKENS, EXPERTS = 7, 12
SCORES = ("logits", "softmax", "sigmoid", "sqrtsoftplus")
RULES = [
    *(Rule(3, scores, factor=2.5) for scores in SCORES),
    *(Rule(1, scores) for scores in SCORES[1:]),
    *(Rule(4, scores, groups=4, groups_taken=2) for scores in SCORES),
    Rule(EXPERTS, "sigmoid"),
]


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(*shape, dtype=F64, generator=generator)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_function_equals_the_reference(rule: Rule, given: bool, dtype: torch.dtype) -> None:
    """Experts and weights bit for bit, gradients in rounding."""
    logits_TE, grad_TK = drawn(1, TOKENS, EXPERTS), drawn(2, TOKENS, rule.topk).to(dtype)
    bias_E = drawn(3, EXPERTS).to(dtype) if rule.scores in SCORES[2:] else None
    known_TK = drawn(4, TOKENS, EXPERTS).argsort(1)[:, : rule.topk]
    results = []
    for routes in (routing_of_chosen.FUNCTION, routing.REFERENCE):
        here = logits_TE.to(dtype).requires_grad_()
        if given:
            experts_TK, weights_TK = known_TK, routes.weigh(here, known_TK, rule)
        else:
            experts_TK, weights_TK = routes.route(here, bias_E, rule)
        assert not experts_TK.requires_grad
        results.append((experts_TK, weights_TK, *torch.autograd.grad(weights_TK, here, grad_TK)))
    (experts_TK, weights_TK, ours), (wanted_TK, wanted, gradient) = results
    assert torch.equal(experts_TK, wanted_TK) and torch.equal(weights_TK, wanted)
    bounds = {"rtol": 1e-12, "atol": 1e-13} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, gradient, **bounds)


@pytest.mark.parametrize("rule", RULES[:7], ids=str)
def test_what_is_kept_is_of_the_chosen(rule: Rule) -> None:
    saved = list[torch.Size]()

    def note(x: Tensor) -> Tensor:
        saved.append(x.shape)
        return x

    logits_TE = drawn(1, TOKENS, EXPERTS).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        routing_of_chosen.route(logits_TE, None, rule)
    width = EXPERTS if rule.scores == "softmax" else rule.topk
    assert saved == [(TOKENS, width), (TOKENS, rule.topk)]


@pytest.mark.parametrize("scores", SCORES)
def test_far_from_zero(scores: str) -> None:
    """Where scores vanish or saturate the gradient is that of the reference, and finite."""
    logits_TE = torch.tensor(
        [[-300.0, -200.0, -250.0], [80.0, 5.0, -80.0], [-9e2, -8e2, -9e2]], dtype=F64
    )
    results = []
    for routes in (routing_of_chosen.FUNCTION, routing.REFERENCE):
        here = logits_TE.clone().requires_grad_()
        weights_TK = routes.route(here, None, Rule(2, scores))[1]
        results.append(torch.autograd.grad(weights_TK[:, 0].sum(), here)[0])
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-30)
