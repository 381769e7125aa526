"""Every Triton kernel, run by Triton's interpreter on the CPU, against its reference in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.kernels import (
    activation,
    cross_entropy,
    dropout,
    norm,
    permute,
    philox,
    rope,
    routing,
    table,
)
from megatron.core.kernels.adam import AdamStep, adam_reference
from megatron.core.kernels.masked_softmax import masked_softmax_reference
from megatron.core.kernels.routing import Rule
from tests.kernels import needs
from tests.kernels.needs import DTYPES, F64, close, compare, drawn

pytestmark = needs.INTERPRETED
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(5)


def triton_op(op: str) -> Any:
    return table.TABLE[op]["triton"].implementation


SHAPES = [(3, 2, 7), (11, 300), (2, 1), (1, 1025), (2, 8200)]
EPS = 0.25
"""Large enough that a row of one number has a gradient that is more than what cancels."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_layer_norm(shape: tuple[int, ...], zero_centred: bool, dtype: torch.dtype) -> None:
    inputs = [drawn(*shape, dtype=dtype), *drawn(2, shape[-1], dtype=dtype)]

    def call(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, gain, bias: f(x, gain, bias, EPS, zero_centred)

    compare(call(triton_op("layer_norm")), call(norm.layer_norm_reference), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gain", ["none", "plain", "zero-centred"])
def test_rms_norm(shape: tuple[int, ...], gain: str, dtype: torch.dtype) -> None:
    inputs = [drawn(*shape, dtype=dtype)]
    if gain != "none":
        inputs.append(drawn(shape[-1], dtype=dtype))

    def call(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight=None: f(x, weight, EPS, gain == "zero-centred")

    compare(call(triton_op("rms_norm")), call(norm.rms_norm_reference), inputs, dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_a_norm_may_stand_apart(bias: bool) -> None:
    """As the heads of one projection do; a gradient may come in any layout."""
    wide = drawn(4, 3, 2, 24, dtype=torch.float32)
    gain = drawn(8, dtype=torch.float32)

    def call(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(wide: Tensor, gain: Tensor) -> Tensor:
            x = wide[..., 8:16]
            y = f(x, gain, gain, EPS) if bias else f(x, gain, EPS)
            return y.transpose(1, 3)

        return run

    op = "layer_norm" if bias else "rms_norm"
    reference = norm.layer_norm_reference if bias else norm.rms_norm_reference
    compare(call(triton_op(op)), call(reference), [wide, gain], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "rotated", "per_sample"),
    [(3, 10, 6, True), (9, 8, 8, False), (1, 2, 2, True)],
)
def test_rope(
    heads: int, size: int, rotated: int, interleaved: bool, per_sample: bool, dtype: torch.dtype
) -> None:
    x = drawn(3, 2, heads, 3 * size, dtype=dtype)
    positions = torch.randint(0, 50, (3, 2)) if per_sample else torch.arange(3)
    # fp32 tables for both: they are inputs, and half precision has fp32 ones.
    tables = rope.rope_tables(rope.inverse_frequencies(rotated, 100.0), positions, torch.float32)

    def call(f: Callable[..., Tensor], kind: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x[..., size : 2 * size], *(t.to(kind) for t in tables), interleaved)

    ours, reference = triton_op("rope"), rope.apply_rope_reference
    compare(call(ours, torch.float32), call(reference, F64), [x], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", activation.PLAIN)
def test_plain_activation(name: str, bias: bool, dtype: torch.dtype) -> None:
    inputs = [2 * drawn(3, 5, 13, dtype=dtype)]
    if bias:
        inputs.append(drawn(13, dtype=dtype))
    compare(triton_op(name), activation.REFERENCES[name], inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("clamp", "offset"), [(None, 0.0), (0.75, 1.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", activation.GATED)
def test_gated_activation(
    name: str, bias: bool, clamp: float | None, offset: float, dtype: torch.dtype
) -> None:
    inputs = [drawn(3, 5, 26, dtype=dtype)]
    if bias:
        inputs.append(drawn(26, dtype=dtype))
    ours = partial(triton_op(name), clamp=clamp, offset=offset)
    reference = partial(activation.REFERENCES[name], clamp=clamp, offset=offset)
    if bias:  # not as a keyword: `compare` gives inputs by position
        compare(lambda x, b: ours(x, b), lambda x, b: reference(x, b), inputs, dtype)
    else:
        compare(ours, reference, inputs, dtype)


@pytest.mark.parametrize("shape", [(3, 2500), (600, 5)])
def test_activation_of_more_than_a_tile(shape: tuple[int, int]) -> None:
    """Several programs sum a bias's gradient."""
    inputs = [drawn(*shape, dtype=torch.float32), drawn(shape[1], dtype=torch.float32)]
    compare(triton_op("gelu_tanh"), activation.gelu_tanh, inputs, torch.float32, terms=shape[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 3, 5), (2, 1030), (3, 1)])
def test_bias_dropout_add(shape: tuple[int, ...], bias: bool, p: float, dtype: torch.dtype) -> None:
    inputs = [drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype)]
    if bias:
        inputs.append(drawn(shape[-1], dtype=dtype))

    def call(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda y, residual, bias=None: f(y, bias, residual, p, 2**62 + 2**31 + 7)

    ours = triton_op("bias_dropout_add")
    compare(call(ours), call(dropout.bias_dropout_add_reference), inputs, dtype)


def test_the_kernel_draws_the_masks_of_the_reference() -> None:
    """Bit for bit, for keys with any bits set, beyond a tile and where 4 does not divide a row."""
    ours, shape = triton_op("bias_dropout_add"), (37, 210)
    one, zero = torch.ones(shape), torch.zeros(shape)
    for key, p in ((0, 0.5), (2**64 - 1, 0.1), (2**63 + 12345678901, 0.9)):
        kept = ours(one, None, zero, p, key) != 0
        assert torch.equal(kept, philox.keep_mask(*shape, p, key, CPU))
        assert abs(1 - kept.double().mean().item() - p) < 0.02


def test_a_residual_may_be_wider_than_what_is_added() -> None:
    y = drawn(4, 6, dtype=torch.bfloat16).to(torch.bfloat16).requires_grad_()
    residual = drawn(4, 6, dtype=torch.float32).float().requires_grad_()
    out = triton_op("bias_dropout_add")(y, None, residual, 0.25, 3)
    want = dropout.bias_dropout_add_reference(y, None, residual, 0.25, 3)
    assert out.dtype == want.dtype == torch.float32
    torch.testing.assert_close(out, want)
    ours, theirs = (torch.autograd.grad(o.square().sum(), (y, residual)) for o in (out, want))
    assert [g.dtype for g in ours] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0.0)


def labels_with_foreign_ones(tokens: int, valid: int) -> Tensor:
    labels = torch.randint(0, max(valid, 1), (tokens,))
    labels[::3] = -1
    return labels if valid else torch.full_like(labels, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "valid"), [(37, 37), (37, 30), (2100, 2099), (8, 0)])
@pytest.mark.parametrize("summed", [False, True])
def test_cross_entropy(columns: int, valid: int, summed: bool, dtype: torch.dtype) -> None:
    """Statistics, and the gradient with what another rank's logits would change of it."""
    kernels, tokens = triton_op("cross_entropy"), 5
    logits, labels = 4 * drawn(tokens, columns, dtype=dtype), labels_with_foreign_ones(5, valid)
    ours = kernels.statistics(logits.to(dtype), labels, valid, summed)
    want = cross_entropy.statistics_reference(logits, labels, valid, summed)
    if valid:
        close(ours.largest_N, want.largest_N, torch.float32)
        close(ours.total_N, want.total_N, torch.float32)
    else:
        assert (ours.largest_N < -1e38).all() and (ours.total_N == 0).all()
    close(ours.target_N, want.target_N, torch.float32)
    assert (ours.summed_N is None) == (want.summed_N is None) == (not summed)
    if ours.summed_N is not None:
        close(ours.summed_N, want.summed_N, torch.float32)
    largest, divisor, grad = logits.amax(1), 1 + torch.rand(tokens), torch.randn(tokens)
    rest = (largest.float(), divisor, grad, 0.9 * grad)
    got = kernels.gradient(ours.kept_Nv, labels, valid, *rest, 0.125 / columns)
    reference = cross_entropy.gradient_reference(
        want.kept_Nv, labels, valid, *(t.to(F64) for t in rest), 0.125 / columns
    )
    assert got.data_ptr() == ours.kept_Nv.data_ptr() and got.dtype == dtype
    assert (got[:, valid:] == 0).all()
    close(got, reference, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_seen(bad: float) -> None:
    logits = torch.zeros(2, 10)
    logits[0, 3] = bad
    found = triton_op("cross_entropy").statistics(logits, torch.tensor([1, 1]), 10, False)
    assert not found.total_N[0].isfinite() and found.total_N[1] == 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "mask", "causal"),
    [
        (4, 4, "none", True),
        (4, 4, "own", True),
        (2, 1100, "none", False),
        (2, 1030, "shared", False),
    ],
)
@pytest.mark.parametrize("scale", [0.7, -0.5])
def test_masked_softmax(
    queries: int, keys: int, mask: str, causal: bool, scale: float, dtype: torch.dtype
) -> None:
    scores = 3 * drawn(2, 2, queries, keys, dtype=dtype)
    visible = None
    if mask != "none":
        visible = torch.rand(2 if mask == "own" else 1, 1, queries, keys) < 0.6
        visible[0, 0, 1] = False

    def call(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x, visible, causal, scale)

    compare(call(triton_op("masked_softmax")), call(masked_softmax_reference), [scores], dtype)


def adam_step(number: int, **changes: Any) -> AdamStep:
    values = {
        "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
        "decoupled": True, "number": torch.tensor(float(number)), "inverse_scale": None,
        "found_nonfinite": torch.zeros(()),
    }  # fmt: skip
    return AdamStep(**{**values, **changes})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize(("tokens", "choices", "width"), [(5, 2, 7), (3, 3, 1030), (4, 1, 64)])
def test_permute(tokens: int, choices: int, width: int, kept: str, dtype: torch.dtype) -> None:
    """Of rows and weights: where choices have no row, and where a row is longer than a piece."""
    experts_TK = torch.stack([torch.randperm(4)[:choices] for _ in range(tokens)])
    kept_TK = None if kept == "all" else (torch.rand(tokens, choices) < 0.6) & (kept == "some")
    count = tokens * choices if kept_TK is None else int(kept_TK.sum())
    by = permute.sort_choices(experts_TK, kept_TK, count)
    x_TH, y_NH = drawn(tokens, width, dtype=dtype), drawn(count, width, dtype=dtype)
    weights_TK = torch.rand(tokens, choices, dtype=F64)
    ours, reference = triton_op("permute"), permute.REFERENCE
    if count:
        compare(lambda x: ours.permute(x, by), lambda x: reference.permute(x, by), [x_TH], dtype)
    results = []
    for moves, kind, wide in ((ours, dtype, torch.float32), (reference, F64, F64)):
        y, w = y_NH.to(kind).requires_grad_(), weights_TK.to(wide).requires_grad_()
        out = moves.unpermute(y, w, by)
        results.append((out, *torch.autograd.grad((out * x_TH.to(kind)).sum(), (y, w))))
    for name, got, want in zip(("value", "rows", "weights"), *results, strict=True):
        if not want.numel():
            continue
        close(got, want, torch.float32 if name == "weights" else dtype, name, width**0.5)


RULES = [
    *((Rule(2, scores), 5) for scores in ("logits", "softmax", "sigmoid", "sqrtsoftplus")),
    *((Rule(1, scores), 4) for scores in ("softmax", "sigmoid", "sqrtsoftplus")),
    (Rule(4, "sigmoid", 3, 2, 2.5), 15),
    (Rule(6, "logits", 4, 3, 0.5), 24),
    (Rule(3, "softmax", 8, 3, 3.0), 8),
    (Rule(22, "sqrtsoftplus", factor=1.5), 1100),
    (Rule(3, "softmax", factor=1.5), 700),
]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_routing(rule: Rule, experts: int, given: bool) -> None:
    """Experts, weights and gradients; a bias changes nothing but the choice."""
    logits_TE = 3 * drawn(4, experts, dtype=torch.float32)
    bias_E = None if rule.scores in ("logits", "softmax") else drawn(experts, dtype=torch.float32)
    chosen_TK = torch.stack([torch.randperm(experts)[: rule.topk] for _ in range(4)])
    grad_TK = drawn(4, rule.topk, dtype=torch.float32)
    results = []
    for routes, kind in ((triton_op("routing"), torch.float32), (routing.REFERENCE, F64)):
        here = logits_TE.to(kind).requires_grad_()
        bias = None if bias_E is None else bias_E.to(kind)
        if given:
            experts_TK, weights_TK = chosen_TK, routes.weigh(here, chosen_TK, rule)
        else:
            experts_TK, weights_TK = routes.route(here, bias, rule)
        grads = torch.autograd.grad(weights_TK, here, grad_TK.to(kind))
        results.append((experts_TK, weights_TK, *grads))
    (experts_TK, *ours), (wanted_TK, *wanted) = results
    assert experts_TK.dtype == torch.int64 and torch.equal(experts_TK, wanted_TK)
    for name, got, want in zip(("weights", "gradient"), ours, wanted, strict=True):
        assert got.dtype == torch.float32
        close(got, want, torch.float32, name, growth=4)


def test_routing_of_equal_and_of_broken_scores() -> None:
    """Of equals the first; what is no number is best, and no expert comes twice."""
    route = triton_op("routing").route
    logits_TE = torch.zeros(4, 6)
    logits_TE[1] = -torch.inf
    logits_TE[2, 4] = torch.nan
    logits_TE[3] = 40.0  # sigmoids are 1
    for rule in (Rule(3, "logits"), Rule(3, "sigmoid"), Rule(4, "sqrtsoftplus", 3, 2)):
        experts_TK, _ = route(logits_TE, None, rule)
        assert torch.equal(experts_TK, routing.route(logits_TE, None, rule)[0])
        equal = list(range(rule.topk))
        assert experts_TK[[0, 1, 3]].tolist() == [equal] * 3
        first = [0, 1, 5] if rule.groups > 1 else [0, 1]
        assert experts_TK[2].tolist() == [4, *first]


@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])
def test_routing_far_from_zero(scores: Any) -> None:
    """Scores that nearly vanish keep their digits, and those that do have no gradient."""
    logits_TE = torch.tensor([[-20.0, -30.0, -25.0], [-300.0, -200.0, -250.0], [80.0, 5.0, -80.0]])
    results = []
    for routes in (triton_op("routing"), routing.REFERENCE):
        here = logits_TE.clone().requires_grad_()
        weights_TK = routes.route(here, None, Rule(3, scores))[1]
        (grad_TE,) = torch.autograd.grad(weights_TK[:, 0].sum(), here)
        results.append((weights_TK, grad_TE))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 4, (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
     (torch.float16, torch.float16, torch.float32, torch.float16)],
    ids=["fp32", "bf16 gradient and mean", "fp16 master"],
)  # fmt: skip
def test_adam(dtypes: tuple[torch.dtype, ...], decoupled: bool) -> None:
    """Parameter, gradient, mean and square, each in its own dtype, over the first steps."""
    values = [drawn(2050, dtype=kind).to(kind) for kind in dtypes]
    values[3] = values[3].abs()
    for number in (1, 2, 3):
        how = adam_step(number, decoupled=decoupled, inverse_scale=torch.tensor(4.0))
        # Each step from the same state: the interpreter rounds to bf16 towards zero.
        ours = [v.clone() for v in values]
        triton_op("adam")(*ours, how)
        gradient = values[1].clone()
        adam_reference(*values, how)
        assert torch.equal(ours[1], gradient) and torch.equal(values[1], gradient)
        for got, expected, kind in zip(ours, values, dtypes, strict=True):
            close(got, expected, kind)


def test_adam_equals_torchs_own_kernel() -> None:
    values = [torch.randn(300) for _ in range(3)] + [torch.rand(300)]
    ours, theirs = ([v.clone() for v in values] for _ in range(2))
    how = adam_step(1, inverse_scale=torch.tensor(0.5))
    triton_op("adam")(*ours, how)
    torch._fused_adamw_(
        *([v] for v in theirs), [], [how.number], lr=how.lr, beta1=how.beta1, beta2=how.beta2,
        weight_decay=how.weight_decay, eps=how.eps, amsgrad=False, maximize=False,
        grad_scale=how.inverse_scale, found_inf=how.found_nonfinite,
    )  # fmt: skip
    for number in (0, 2, 3):  # torch divides the gradient in place
        torch.testing.assert_close(ours[number], theirs[number], rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_leaves_everything() -> None:
    values = [torch.randn(100) for _ in range(4)]
    ours = [v.clone() for v in values]
    triton_op("adam")(*ours, adam_step(3, found_nonfinite=torch.ones(())))
    assert all(torch.equal(*pair) for pair in zip(ours, values, strict=True))


def misplaced(*shape: int) -> Tensor:
    """Return a tensor whose last dim is not contiguous."""
    return torch.randn(*shape).transpose(-1, -2)


def strided(size: int) -> Tensor:
    """Return a vector of every other element."""
    return torch.randn(2 * size)[::2]


GAIN = torch.ones(4)
REFUSED: dict[str, Callable[[], Any]] = {
    "norm": lambda: triton_op("rms_norm")(misplaced(4, 6), GAIN, 1e-5),
    "gain": lambda: triton_op("rms_norm")(torch.randn(6, 4), strided(4), 1e-5),
    "short gain": lambda: triton_op("rms_norm")(torch.randn(6, 4), torch.ones(3), 1e-5),
    "wide norm": lambda: triton_op("rms_norm")(torch.randn(1, 2**14 + 1), None, 1e-5),
    "rope": lambda: triton_op("rope")(misplaced(2, 1, 4, 3), *torch.ones(2, 2, 2)),
    "activation": lambda: triton_op("gelu")(misplaced(4, 6)),
    "halves": lambda: triton_op("swiglu")(torch.randn(2, 5)),
    "dropout": lambda: triton_op("bias_dropout_add")(
        misplaced(4, 6), None, torch.randn(6, 4), 0.1, 1
    ),
    "residual": lambda: triton_op("bias_dropout_add")(
        torch.randn(6, 4), None, torch.randn(6, 1), 0.1, 1
    ),
    "cross entropy": lambda: triton_op("cross_entropy").statistics(
        misplaced(4, 6), torch.zeros(6, dtype=torch.int64), 4, False
    ),
    "softmax": lambda: triton_op("masked_softmax")(misplaced(1, 1, 4, 4), None, True, 1.0),
    "routing in fp64": lambda: triton_op("routing").route(
        torch.zeros(2, 4, dtype=F64), None, Rule(2, "logits")
    ),
    "adam": lambda: triton_op("adam")(*(strided(4) for _ in range(4)), adam_step(1)),
    "adam in fp64": lambda: triton_op("adam")(*torch.ones(4, 4, dtype=F64), adam_step(1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_kernel_would_misread_is_refused(case: str) -> None:
    with pytest.raises(AssertionError):
        REFUSED[case]()
