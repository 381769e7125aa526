"""Recomputation and offload on layouts: what one process gives that keeps everything.

To 1e-10 of the serial run, bit for bit of the same layout without them, and with exactly the
communication of the closed form.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.recompute import recompute
from megatron.core.saved_tensors import keeping
from megatron.training.arguments import read_settings
from megatron.training.config import RunConfig
from megatron.training.processes import setup
from megatron.training.verification import equality
from megatron.training.verification.layout_words import Layout, parse_layout
from megatron.training.verification.outcomes import Outcome, compare
from megatron.training.verification.small_run import SmallRun
from tests.harness import Pool
from tools.verify_layout import case, closed_form

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1"
)
ROTARY = "--position-embedding-type rope"
VARIANTS = {
    "gpt2": "",
    "llama": f"{ROTARY} --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "latents": f"--multi-latent-attention {ROTARY} --q-lora-rank 16 --qk-layernorm",
    "ahead": f"{ROTARY} --mtp-num-layers 1",
}
FULL = "--recompute-granularity full --recompute-method"
UNIFORM = f"{FULL} uniform --recompute-num-layers"
PARTS = "--recompute-granularity selective --recompute-modules layernorm mlp"
MOVED = "--fine-grained-activation-offloading --offload-modules attn_norm core_attn attn_proj"
CASES = [
    ("gpt2", "tp2 sp", f"{UNIFORM} 1"),
    ("gpt2", "tp2", f"{UNIFORM} 2 --distribute-saved-activations"),
    ("gpt2", "pp2 vpp2", f"{FULL} block --recompute-num-layers 1"),
    ("gpt2", "pp2 zb-v dp2 overlap", f"{PARTS} core_attn"),
    ("gpt2", "cp2", "--recompute-activations"),
    ("llama", "tp2 sp pp2 zb-h1", f"{PARTS} {MOVED}"),
    ("llama", "cp2 all_gather tp2 sp", "--cpu-offloading-num-layers 3"),
    ("latents", "tp2 sp cp2 a2a", f"{PARTS} mla_up_proj core_attn"),
    (
        "ahead",
        "pp2 zb-h1",
        f"{UNIFORM} 1 --fine-grained-activation-offloading --offload-modules layer_input",
    ),
]
INPUTS = "--fine-grained-activation-offloading --offload-modules attn_norm mlp_norm"
MORE = [
    ("gpt2", "tp4 pp2 zb-v", f"{UNIFORM} 1 --distribute-saved-activations"),
    ("gpt2", "pp2 gpipe", f"{PARTS} core_attn"),
    ("gpt2", "pp2 zb-h1", f"{UNIFORM} 3"),
    ("gpt2", "cp2 a2a dp2", f"{FULL} block --recompute-num-layers 3"),
    ("llama", "tp2 sp --tp-comm-overlap", f"{PARTS} core_attn"),
    ("llama", "cp4 a2a+p2p", f"{UNIFORM} 1"),
    ("llama", "tp2 sp pp2 vpp2 dp2", f"{PARTS} core_attn {INPUTS}"),
    ("latents", "tp2 pp2 zb-v", f"{UNIFORM} 1"),
    (
        "latents",
        "pp2 zb-h1",
        f"{INPUTS} qkv_linear --recompute-granularity selective --recompute-modules mla_up_proj",
    ),
    ("ahead", "tp2 sp", f"{PARTS} core_attn"),
    ("ahead", "cp2 pp2 vpp2", f"{UNIFORM} 2"),
]


def small(variant: str, words: str) -> SmallRun:
    return SmallRun(read_settings(f"{MODEL} {VARIANTS[variant]} {words}".split(), "test").values)


class Plain:
    """Runs that keep everything, each made once: the serial one, and that of a layout."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._known: dict[str, Outcome] = {}

    def of(self, config: RunConfig) -> Outcome:
        if repr(config) not in self._known:
            self._known[repr(config)] = equality.run(self.pool, case(config))
        return self._known[repr(config)]


@pytest.fixture(scope="module")
def plain(pool: Pool) -> Plain:
    return Plain(pool)


def check(plain: Plain, variant: str, layout: Layout, words: str) -> None:
    config = small(variant, words).on(layout)
    found = equality.run(plain.pool, case(config))
    usual = small(variant, "")
    assert compare(found, plain.of(usual.reference(layout))).largest <= 1e-10
    assert compare(found, plain.of(usual.on(layout))).largest == 0
    assert found.traffic == closed_form(config)


@pytest.mark.parametrize(("variant", "layout", "words"), CASES)
def test_equals_a_run_that_keeps_everything(
    plain: Plain, variant: str, layout: str, words: str
) -> None:
    check(plain, variant, parse_layout(layout, "test"), words)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "layout", "words"), MORE)
def test_equals_such_a_run_on_more_layouts(
    plain: Plain, variant: str, layout: str, words: str
) -> None:
    check(plain, variant, parse_layout(layout, "test"), words)


@pytest.mark.parametrize(
    ("layout", "words"),
    [("tp2 sp", f"{PARTS} core_attn"), ("pp2 zb-v dp2", f"{UNIFORM} 1")],
)
def test_dropout_is_the_same_the_second_time(plain: Plain, layout: str, words: str) -> None:
    def with_dropout(config: RunConfig) -> RunConfig:
        attention = replace(config.model.attention, attention_dropout=0.2)
        return replace(config, model=replace(config.model, attention=attention, hidden_dropout=0.2))

    place = parse_layout(layout, "test")
    found = equality.run(plain.pool, case(with_dropout(small("gpt2", words).on(place))))
    usual = small("gpt2", "").on(place)
    assert compare(found, plain.of(with_dropout(usual))).largest == 0
    assert compare(found, plain.of(usual)).loss > 1e-4


def shared_input(rank: int, run: RunConfig) -> tuple[Tensor, Tensor, int]:
    """Return the gradients of a shared and of a whole input, and the share's elements."""
    axis = setup.connected_mesh(run, torch.device("cpu")).dp
    x = torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7).requires_grad_()
    sizes: list[int] = []

    class Seen:
        def keep(self, x: Tensor) -> None:
            sizes.append(x.numel())

    with keeping(Seen()):
        y = recompute(lambda x: torch.sin(x.t()).square().sum(), x * 1, distribute=axis)
    y.backward()
    grad, x.grad = x.grad, None
    torch.sin(x.t()).square().sum().backward()
    assert grad is not None and x.grad is not None and len(sizes) == 1
    return grad, x.grad, sizes[0]


def test_an_input_that_does_not_divide_is_shared_out(pool: Pool) -> None:
    run = small("gpt2", "").on(parse_layout("dp3", "test"))
    for shared, whole, size in pool.run(3, shared_input, run):
        assert torch.equal(shared, whole) and size == 12  # 35 elements over three ranks
