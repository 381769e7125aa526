"""Choices of the architecture that are written as text, or follow from each other."""

import pytest

from megatron.core.transformer.config import MLPConfig, parse_pattern
from megatron.core.utils import UserError
from megatron.training.arguments import parse

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", 4),
        ("-1", -1),
        ("([0]*3+[1]*2)", (0, 0, 0, 1, 1)),
        ("([1]*2+[0]*1)*2", (1, 1, 0, 1, 1, 0)),
        ("2*[0,1] + [1]", (0, 1, 0, 1, 1)),
        ("[1, 0]", (1, 0)),
        ("1,0", (1, 0)),
    ],
)
def test_layer_patterns(text: str, expected: int | tuple[int, ...]) -> None:
    assert parse_pattern(text) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "2*3", "[0]+1", "[1.5]", "True", "[0]*10**9", "print(1)", "[[0]]", "([0]*3"]
)
def test_what_is_no_pattern_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(UserError):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("flags", "activation"),
    [
        ("", "gelu_tanh"),
        ("--no-bias-gelu-fusion", "gelu"),
        ("--disable-bias-linear", "gelu"),
        ("--disable-bias-linear --openai-gelu", "gelu_tanh"),
        ("--swiglu", "swiglu"),
        ("--squared-relu --no-bias-gelu-fusion", "squared_relu"),
    ],
)
def test_gelu_is_the_formula_that_megatron_lm_computes(flags: str, activation: str) -> None:
    """Megatron-LM's kernel for bias and GELU, its default, has the tanh formula."""
    mlp: MLPConfig = parse(f"{BASE} {flags}".split()).config.model.mlp
    assert mlp.activation == activation


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--attention-softcap 0", "--attention-softcap (0.0) must be above 0"),
        ("--attention-softcap -1", "--attention-softcap"),
        ("--logit-softcap 0", "--logit-softcap (0.0) must be above 0"),
        ("--rotary-base 0", "--rotary-base (0) must be above 0"),
        ("--position-embedding-type yarn --rotary-base 1", "--rotary-base (1) must be above 1"),
        ("--rotary-seq-len-interpolation-factor 0", "--rotary-seq-len-interpolation-factor (0)"),
        ("--rope-scaling-factor 0", "--rope-scaling-factor (0.0)"),
        ("--rope-scaling-factor nan", "--rope-scaling-factor (nan)"),
        ("--yarn-rotary-scaling-factor 0.5", "--yarn-rotary-scaling-factor (0.5)"),
        ("--yarn-beta-slow 0", "--yarn-beta-slow (0.0)"),
        ("--norm-epsilon -1e-5", "--norm-epsilon (-1e-05) must not be negative"),
        ("--init-method-std -1", "--init-method-std (-1.0) must not be negative"),
        ("--embedding-init-method-std -1", "--embedding-init-method-std (-1.0)"),
    ],
)
def test_values_that_make_no_model_are_refused(text: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(f"{BASE} {text} --dry-run".split())
    assert part in str(caught.value)


def test_bounds_that_are_still_a_model() -> None:
    parse(f"{BASE} --norm-epsilon 0 --init-method-std 0 --rotary-base 1 --dry-run".split())
