"""The Triton kernels on a device against their references, at sizes of several tiles and programs.

What their interpreter cannot show: that programs do not disturb each other, that layouts of threads
and shared memory are right, and that what was compiled is what was meant. `tests/kernels` has
further cases of the same kernels, and `test_kernels.py` norms, rotary positions and activations at
small sizes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.kernels import cross_entropy, philox, table
from megatron.core.kernels.adam import AdamStep, adam_reference
from megatron.core.kernels.attention import Extras, Packing, Rule, attention_reference
from megatron.core.kernels.dropout import bias_dropout_add_reference
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.rng import DropoutKey
from megatron.core.transformer.config import TransformerConfig
from tests.gpu import needs
from tests.gpu.needs import DEVICE, REHEARSAL, far
from tests.kernels.needs import DTYPES, F64, ROUNDING, drawn

pytestmark = needs.CUDA
ROWS = 9 if REHEARSAL else 700
"""More than there are programs that sum over rows."""
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def triton_and_seed() -> None:
    needs.triton()
    torch.manual_seed(13)


def triton_op(op: str) -> Any:
    return table.TABLE[op]["triton"].implementation


def compare(op: str, inputs: list[Tensor], dtype: torch.dtype, call: Callable[..., Tensor]) -> None:
    """Compare value and gradients with the reference in float64; twice, which must be the same."""
    results = []
    for name, device, kind in (
        ("triton", DEVICE, dtype),
        ("triton", DEVICE, dtype),
        ("reference", torch.device("cpu"), F64),
    ):
        here = [x.to(device, kind).requires_grad_() for x in inputs]
        out = call(table.TABLE[op][name].implementation, *here)
        weight = torch.linspace(-1, 2, out.numel(), dtype=F64).view(out.shape).to(dtype)
        results.append([out, *torch.autograd.grad(out, here, weight.to(device, kind))])
    first, again, want = results
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    apart = [far(*pair) for pair in zip(first, want, strict=True)]
    # Relative to the size of all of it; sums over rows are fp32.
    assert max(apart) <= 4 * ROUNDING[dtype], apart


WIDTHS = [64, 1000, 8192, 12288, 16384]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms(op: str, width: int, dtype: torch.dtype) -> None:
    inputs = [drawn(ROWS, width, dtype=dtype), drawn(width, dtype=dtype)]
    if op == "layer_norm":
        inputs.append(drawn(width, dtype=dtype))
    compare(op, inputs, dtype, lambda f, *x: f(*x, 1e-5))


@pytest.mark.parametrize("op", ["gelu_tanh", "squared_relu", "swiglu", "quick_geglu"])
def test_activations(op: str) -> None:
    inputs = [drawn(ROWS, 5000, dtype=BF16), drawn(5000, dtype=BF16)]
    compare(op, inputs, BF16, lambda f, *x: f(*x))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dropout_add(dtype: torch.dtype, p: float) -> None:
    shape = (ROWS, 3, 1030)
    inputs = [drawn(*shape, dtype=dtype), drawn(1030, dtype=dtype), drawn(*shape, dtype=dtype)]
    assert table.TABLE["bias_dropout_add"]["reference"].source is bias_dropout_add_reference
    compare("bias_dropout_add", inputs, dtype, lambda f, y, b, r: f(y, b, r, p, 2**63 + 5))


def test_masks_are_those_of_the_reference() -> None:
    shape = (ROWS, 1030)
    one, zero = torch.ones(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)
    for seed, p in ((0, 0.5), (2**64 - 1, 0.1), (2**63 + 12345678901, 0.9)):
        kept = triton_op("bias_dropout_add")(one, None, zero, p, seed) != 0
        assert torch.equal(kept.cpu(), philox.keep_mask(*shape, p, seed, torch.device("cpu")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "valid"), [(50304, 50257), (1000, 0)])
def test_cross_entropy(columns: int, valid: int, dtype: torch.dtype) -> None:
    tokens = 5 if REHEARSAL else 300
    logits = 4 * drawn(tokens, columns, dtype=dtype)
    labels = torch.randint(-1, max(valid, 1), (tokens,)) if valid else torch.full((tokens,), -1)
    want = cross_entropy.statistics_reference(logits, labels, valid, True)
    kernels = triton_op("cross_entropy")
    own = kernels.statistics(logits.to(DEVICE, dtype), labels.to(DEVICE), valid, True)
    if valid:
        for name in ("largest_N", "total_N", "target_N", "summed_N"):
            assert far(getattr(own, name), getattr(want, name)) <= 1e-6, name
    numbers = [logits.amax(1), *(0.5 + torch.rand(3, tokens, dtype=F64))]
    numbers = [x.float().to(F64) for x in numbers]
    got = kernels.gradient(
        own.kept_Nv, labels.to(DEVICE), valid, *(x.to(DEVICE, F32) for x in numbers), 1e-6
    )
    reference = cross_entropy.gradient_reference(logits, labels, valid, *numbers, 1e-6)
    assert far(got, reference) <= 4 * ROUNDING[dtype] and (got[:, valid:] == 0).all()


@pytest.mark.parametrize("kind", ["causal", "packed", "window", "full"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_attention_around_a_fused_softmax(dtype: torch.dtype, kind: str) -> None:
    S = 6 if REHEARSAL else 1500
    shapes = ((S, 2, 4, 32), (S, 2, 2, 32), (S, 2, 2, 32))
    inputs = [drawn(*shape, dtype=dtype) for shape in shapes]
    rule = Rule(scale=0.2, causal=kind != "full", window=(3, 0) if kind == "window" else None)
    results = []
    for function, device, dt in (
        (table.TABLE["attention"]["triton_softmax"].implementation, DEVICE, dtype),
        (attention_reference, torch.device("cpu"), F64),
    ):
        bounds = torch.tensor([0, S - 2, S, 2 * S], dtype=torch.int32, device=device)
        extras = Extras(packing=Packing(bounds) if kind == "packed" else None)
        here = [x.to(device, dt).requires_grad_() for x in inputs]
        out = function(*here, rule, extras)
        results.append([out, *torch.autograd.grad(out.square().sum(), here)])
    # Products of fp32 may be taken in tf32.
    bound = 2e-2 if dtype == BF16 else 3e-3
    assert max(far(*pair) for pair in zip(*results, strict=True)) <= bound


@pytest.mark.parametrize("dtypes", [(F32,) * 4, (F32, BF16, BF16, BF16)], ids=["fp32", "mixed"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    size = 3000 if REHEARSAL else 1_000_003
    values = [drawn(size, dtype=dtype).to(dtype) for dtype in dtypes]
    values[3] = values[3].abs()
    ours = [value.to(DEVICE) for value in values]
    for number in (1, 2):
        scalars = [torch.tensor(x) for x in (float(number), 4.0, 0.0)]

        def how(device: torch.device, scalars: list[Tensor] = scalars) -> AdamStep:
            number, scale, found = (x.to(device) for x in scalars)
            return AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.1, decoupled, number, scale, found)

        adam_reference(*values, how(torch.device("cpu")))
        triton_op("adam")(*ours, how(DEVICE))
    for got, want, dtype in zip(ours, values, dtypes, strict=True):
        assert far(got, want) <= (1e-6 if dtype == F32 and BF16 not in dtypes else 1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "unfused"},
        {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm"},
    ],
    ids=["GPT-3's", "Llama's"],
)
def test_a_step_of_a_model(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, on the device through Triton and on the CPU through torch; dropout within blocks."""
    config = TransformerConfig.resolve(
        num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=16,
        attention_dropout=0.0, hidden_dropout=0.2, init_method_std=0.2,
        cross_entropy_loss_fusion=True, **settings,
    )  # fmt: skip
    text = torch.randint(0, 90, (2, 17))
    # Masks that torch draws differ between devices: none on the embedding.
    monkeypatch.setattr("megatron.core.kernels.dropout.dropout", lambda x, p, seed: x)
    results: list[list[Tensor]] = []
    for device in (DEVICE, torch.device("cpu")):
        if results:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
            counted = table.TABLE["bias_dropout_add"]["reference"]
            monkeypatch.setitem(table.TABLE["bias_dropout_add"], "torch", counted)
        model = GPTModel(config, Mesh.serial(device), vocab_size=90, padded_vocab_size=128)
        rng.initialize(model, 3)
        tokens, labels = text[:, :-1].to(device), text[:, 1:].to(device)
        losses = model(tokens, labels, dropout=DropoutKey(1, 1, 0))
        losses.sum().backward()
        fused = model.backends.names["bias_dropout_add"] == "triton"
        assert fused == (not results)
        results.append([losses, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert max(far(*pair) for pair in zip(*results, strict=True)) <= 1e-3
