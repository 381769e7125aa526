"""Flags choose fused or separate operations, and packages' when they are there and asked for."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.kernels import activation, cross_entropy, norm, packages, probe, table
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import cross_entropy as losses_of
from megatron.core.tensor_parallel.embedding import VocabularyRows
from megatron.core.transformer.backends import Backends, choose_backends
from megatron.core.utils import UserError
from megatron.training import device_choices, idle, startup
from megatron.training.arguments import parse
from megatron.training.config import RunConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
BASE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --mock-data --position-embedding-type rope"
)


@pytest.fixture
def gpu_packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let packages seem to be there; `missing` is asked anew before and after."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def install(*names: str) -> None:
        monkeypatch.setattr(table, "missing", lambda name: None if name in names else f"no {name}")
        monkeypatch.setattr(
            packages, "missing", lambda name: None if name in names else f"no {name}"
        )
        monkeypatch.setattr(probe, "missing", lambda name: None if name in names else f"no {name}")
        # Modules of Triton kernels cannot be imported here: their names tell which would run.
        monkeypatch.setattr(table.Backend, "implementation", property(lambda self: self.source))

    return install


def run_of(text: str) -> RunConfig:
    return parse(f"{BASE} {text}".split()).config


def names(text: str, device: torch.device = CUDA) -> dict[str, str]:
    return choose_backends(run_of(text).model, device, BF16).names


class _With(nn.Module):
    """As much of a model as its start-up lines read."""

    def __init__(self, backends: Backends) -> None:
        super().__init__()
        self.backends = backends


CHOICES = {
    # flag: op, the model it counts for, fused on CUDA, separate
    "--no-masked-softmax-fusion": (
        "attention", "--attention-backend unfused", "triton_softmax", "reference"
    ),
    "--no-bias-gelu-fusion": ("gelu_tanh", "", "triton", "reference"),
    "--no-bias-swiglu-fusion": ("swiglu", "--swiglu", "triton", "reference"),
    "--no-bias-dropout-fusion": ("bias_dropout_add", "", "triton", "torch"),
    "--no-rope-fusion": ("rope", "", "triton", "reference"),
    "--no-persist-layer-norm": ("layer_norm", "", "triton", "torch"),
    "--cross-entropy-loss-fusion": ("cross_entropy", "", "in_place", "triton"),
}  # fmt: skip


@pytest.mark.parametrize("flag", CHOICES)
def test_each_flag_chooses_where_triton_is(flag: str, gpu_packages: Any) -> None:
    gpu_packages("triton")
    op, model, without, with_flag = CHOICES[flag]
    assert names(model)[op] == without
    if flag == "--no-bias-gelu-fusion":  # it also is the exact formula
        op = "gelu"
    assert names(f"{model} {flag}")[op] == with_flag


@pytest.mark.parametrize("flag", CHOICES)
def test_where_triton_is_not_the_separate_one_runs(flag: str, gpu_packages: Any) -> None:
    gpu_packages()
    op, model, *_ = CHOICES[flag]
    for device in (CPU, CUDA):
        found = names(f"{model} {flag}", device)
        assert not any("triton" in name for name in found.values())
        assert found["bias_dropout_add"] == "torch" and found["cross_entropy"] == "in_place"


def test_on_the_cpu_too_a_flag_chooses() -> None:
    """Torch has quicker forms of rotary positions and SwiGLU there."""
    fused, separate = (names(f"--swiglu {more}", CPU) for more in ("", "--no-rope-fusion"))
    assert (fused["rope"], separate["rope"]) == ("function", "reference")
    assert fused["swiglu"] == "function"
    assert names("--swiglu --no-bias-swiglu-fusion", CPU)["swiglu"] == "reference"


def test_a_model_runs_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fused operations take the biases over from the layers before them."""
    config = run_of("--attention-dropout 0 --hidden-dropout 0").model
    plain = GPTModel(config, Mesh.serial(), vocab_size=32)
    seen: list[tuple[str, bool]] = []

    def spy(name: str, op: Any, place: int) -> Any:
        def call(*arguments: Any) -> Tensor:
            seen.append((name, arguments[place] is not None))
            return op(*arguments)

        return call

    for op, place, name in (("gelu_tanh", 1, "act"), ("bias_dropout_add", 1, "add")):
        source = spy(name, table.TABLE[op]["reference"].source, place)
        monkeypatch.setitem(table.TABLE[op], "triton", table.Backend(source))
    fused = GPTModel(config, Mesh.serial(), vocab_size=32)
    for mine, other in zip(fused.parameters(), plain.parameters(), strict=True):
        mine.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(mine.numel()))
        other.data.copy_(mine)
    tokens = torch.arange(8)[None] % 5
    out = [model(tokens, tokens) for model in (fused, plain)]
    assert seen == [("add", True), ("act", True), ("add", True)]
    torch.testing.assert_close(*out)
    for loss in out:
        loss.sum().backward()
    for (name, mine), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_choices_that_nothing_comes_of_are_named() -> None:
    text = (
        "--no-masked-softmax-fusion --no-bias-swiglu-fusion --cross-entropy-fusion-impl te "
        "--squared-relu --no-bias-gelu-fusion --position-embedding-type none --no-rope-fusion"
    )
    parsed = parse(f"{BASE} {text}".split())
    found = idle.without_effect(parsed.config, parsed.origins)
    assert {line.split()[0] for line in found} >= {
        "--masked-softmax-fusion",
        "--bias-swiglu-fusion",
        "--cross-entropy-fusion-impl",
        "--bias-gelu-fusion",
        "--rope-fusion",
    }


def test_norms_too_wide_for_a_kernel_are_torchs(gpu_packages: Any) -> None:
    gpu_packages("triton")
    assert names("--hidden-size 16384")["layer_norm"] == "triton"
    found = choose_backends(run_of("--hidden-size 16640").model, CUDA, BF16)
    assert found.names["layer_norm"] == found.names["rms_norm"] == "torch"
    assert "--hidden-size 16640" in found.unfit["rms_norm"]["triton"]


@pytest.mark.parametrize(
    ("widths", "cuts", "named"),
    [
        ("--hidden-size 16 --moe-ffn-hidden-size 24", 1, ()),
        ("--hidden-size 16 --moe-ffn-hidden-size 24", 3, ()),
        ("--hidden-size 16 --moe-ffn-hidden-size 24", 2, ("size 24 / --expert-tensor-parallel",)),
        ("--hidden-size 12 --moe-ffn-hidden-size 24", 1, ("--hidden-size 12",)),
        ("--hidden-size 12 --moe-latent-size 8", 1, ()),
        ("--hidden-size 16 --moe-latent-size 6", 1, ("--moe-latent-size 6",)),
        # Both shares of a gated unit together are 8 wide, but the second product reads one.
        (
            "--hidden-size 12 --moe-ffn-hidden-size 4 --swiglu",
            1,
            ("--hidden-size 12", "--moe-ffn-hidden-size 4"),
        ),
    ],
)
def test_experts_of_odd_widths_are_multiplied_one_by_one(
    widths: str, cuts: int, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of torch's grouped product in bf16 lie 16 bytes apart, or a multiple of that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    moe = "--num-experts 2 --moe-grouped-gemm --add-bias-linear"
    model = run_of(f"{moe} --ffn-hidden-size 32 {widths}").model
    found = choose_backends(model, CUDA, BF16, cuts)
    assert found.names["grouped_products"] == ("reference" if named else "torch")
    if not named:
        return
    reasons = found.unfit["grouped_products"]
    for text in ("multiples of 8", *named):
        assert text in reasons["torch"]
    said = next(line for line in startup.kernel_lines(_With(found), CUDA, BF16) if "torch:" in line)
    assert "grouped_products without torch" in said and named[0] in said
    with pytest.raises(UserError, match="multiples of 8"):
        table.choose("grouped_products", "torch", CUDA, BF16, reasons)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--transformer-impl transformer_engine", "pip install transformer-engine.*local"),
        ("--transformer-impl apex", "build NVIDIA's Apex.*--transformer-impl local"),
        (
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
            "pip install transformer-engine.*--cross-entropy-fusion-impl native",
        ),
    ],
)
def test_a_package_that_is_missing_is_an_error_with_two_ways_out(
    text: str, words: str, gpu_packages: Any
) -> None:
    gpu_packages("triton")
    with pytest.raises(UserError, match=words):
        names(text)


def test_packages_run_their_ops_alone(gpu_packages: Any) -> None:
    """What they lack is the best of our own; without --transformer-impl nothing is theirs."""
    gpu_packages("triton", "transformer_engine", "apex")
    engine = names("--swiglu --transformer-impl transformer_engine")
    assert engine["layer_norm"] == engine["rms_norm"] == engine["swiglu"] == "transformer_engine"
    assert engine["rope"] == engine["bias_dropout_add"] == "triton"
    apex = names("--swiglu --transformer-impl apex")
    assert apex["layer_norm"] == apex["rms_norm"] == "apex" and apex["swiglu"] == "triton"
    te = names("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    assert te["cross_entropy"] == "transformer_engine"
    assert set(names("--swiglu").values()).isdisjoint(table.PACKAGES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--transformer-impl transformer_engine --qk-l2-norm", "--qk-l2-norm"),
        ("--transformer-impl transformer_engine --fp32-residual-connection --bf16", "--fp32-res"),
        (
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --label-smoothing 0.1",
            "--label-smoothing 0.1",
        ),
    ],
)
def test_what_a_package_cannot_do_for_a_model_is_said(
    text: str, reason: str, gpu_packages: Any
) -> None:
    gpu_packages("transformer_engine")
    with pytest.raises(UserError, match=f"transformer_engine.*{reason}"):
        names(text)


def test_device_cpu_maps_packages_to_our_own() -> None:
    text = "--transformer-impl apex --cross-entropy-loss-fusion --cross-entropy-fusion-impl te"
    wanted = run_of(text)
    on_cpu = replace(wanted, process=replace(wanted.process, device="cpu"))
    config, (line,) = device_choices.map_to_cpu(on_cpu, {})
    assert config.model.transformer_impl == "auto"
    assert config.model.fusion.cross_entropy_fusion_impl == "native"
    assert "--transformer-impl apex (auto), --cross-entropy-fusion-impl te (native)" in line
    with pytest.raises(UserError, match="--cross-entropy-fusion-impl te.*--device cpu"):
        device_choices.check_device(run_of(text), cuda_is_available=False)


def test_reasons_against_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(probe, "missing", lambda name: None)
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/bin/{name}")
    assert "TRITON_INTERPRET=1" in str(probe.triton_missing(CPU, BF16))
    assert "torch.float64" in str(probe.triton_missing(CUDA, torch.float64))
    assert probe.triton_missing(CUDA, BF16) is None
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    assert "install gcc" in str(probe.triton_missing(CUDA, BF16))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert probe.triton_missing(CPU, BF16) is None
    monkeypatch.setattr(probe, "missing", lambda name: "no triton")
    assert "pip install triton" in str(probe.triton_missing(CPU, BF16))


# Stand-ins with the packages' documented signatures, which compute the definitions.


class EngineNorm(nn.Module):
    """As transformer_engine.pytorch.LayerNorm and RMSNorm: the backward reads the parameters."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        device: str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert device == "meta"
        self.eps, self.zero_centered = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))
        if type(self).__name__ == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if type(self).__name__ == "LayerNorm":
            return norm.layer_norm_reference(
                x, self.weight, self.bias, self.eps, self.zero_centered
            )
        return norm.rms_norm_reference(x, self.weight, self.eps, self.zero_centered)


class SwiGLU(nn.Module):
    """As transformer_engine.pytorch.ops.SwiGLU: the gate is the first half."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class ParallelCrossEntropy(torch.autograd.Function):
    """As transformer_engine.pytorch.cross_entropy.CrossEntropyFunction, for one rank."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        dist_process_group: Any = None,
        ignore_idx: int = -100,
    ) -> Tensor:
        assert dist_process_group is None and not reduce_loss and not label_smoothing
        assert logits.dim() == 3 and target.shape == logits.shape[:2]
        probabilities = logits.float().softmax(-1)
        ctx.save_for_backward(probabilities, target)
        return -probabilities.gather(-1, target[..., None]).squeeze(-1).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, target = ctx.saved_tensors
        target = F.one_hot(target, probabilities.shape[-1])
        return (probabilities - target) * grad[..., None], None, None, None, None, None


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: torch.Size,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As in apex.normalization.fused_layer_norm."""
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: torch.Size,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As there."""
    return F.rms_norm(input, normalized_shape, weight, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: torch.Size, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """As there."""
    return F.rms_norm(input, normalized_shape, None, eps)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            "LayerNorm": type("LayerNorm", (EngineNorm,), {}),
            "RMSNorm": type("RMSNorm", (EngineNorm,), {}),
        },
        "transformer_engine.pytorch.ops": {"SwiGLU": SwiGLU},
        "transformer_engine.pytorch.cross_entropy": {
            "parallel_cross_entropy": ParallelCrossEntropy.apply
        },
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {
            function.__name__: function
            for function in (fused_layer_norm_affine, fused_rms_norm_affine, fused_rms_norm)
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def agree(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    weight = torch.linspace(-1, 2, got.numel()).view(got.shape)
    torch.testing.assert_close(got, want)
    pair = [torch.autograd.grad((y * weight).sum(), inputs) for y in (got, want)]
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("package", ["transformer_engine", "apex"])
def test_norms_of_packages(stand_ins: None, package: str, zero_centered: bool) -> None:
    x = torch.randn(3, 2, 6, requires_grad=True)
    gain, shift = (nn.Parameter(torch.randn(6)) for _ in range(2))
    ops = {op: table.TABLE[op][package].implementation for op in ("layer_norm", "rms_norm")}
    got = ops["layer_norm"](x, gain, shift, 1e-3, zero_centered)
    want = norm.layer_norm_reference(x, gain, shift, 1e-3, zero_centered)
    agree(got, want, [x, gain, shift])
    got = ops["rms_norm"](x, gain, 1e-3, zero_centered)
    agree(got, norm.rms_norm_reference(x, gain, 1e-3, zero_centered), [x, gain])


def test_norm_without_gains_of_apex(stand_ins: None) -> None:
    x = torch.randn(3, 6, requires_grad=True)
    agree(packages.rms_norm_of_apex(x, None, 1e-3), norm.rms_norm_reference(x, None, 1e-3), [x])


def test_swiglu_of_transformer_engine(stand_ins: None) -> None:
    x, bias = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    swiglu = packages.swiglu_of_transformer_engine
    agree(swiglu(x), activation.swiglu(x), [x])
    agree(swiglu(x, bias), activation.swiglu(x, bias), [x, bias])


def test_cross_entropy_of_transformer_engine(stand_ins: None) -> None:
    """It is told of no padding: those logits are made to count for nothing."""
    mesh = Mesh.serial()
    rows = VocabularyRows(9, 12, mesh)
    logits = torch.randn(4, 2, 12, requires_grad=True)
    labels = torch.randint(0, 9, (2, 4)).t()
    ours, theirs = (
        losses_of(logits.clone(), labels, rows, mesh.tp, kernels=kernels)
        for kernels in (cross_entropy.IN_PLACE, packages.cross_entropy_of_transformer_engine)
    )
    agree(theirs, ours, [logits])
