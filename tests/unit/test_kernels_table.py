"""The table of backends: what auto takes, and what a missing backend says."""

import importlib

import pytest
import torch

from megatron.core.kernels import probe, table
from megatron.core.kernels.attention import attention_reference
from megatron.core.kernels.blocked import attention_blocked
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def packages(monkeypatch):
    """Decide what importing an optional package does."""
    present: dict[str, object] = {}
    real = importlib.import_module

    def fake(name, *args):
        root = name.partition(".")[0]
        if root in probe.INSTALL:
            found = present.get(root, ImportError(f"No module named {root!r}"))
            if isinstance(found, Exception):
                raise found
            return found
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", fake)
    probe.missing.cache_clear()
    yield present
    probe.missing.cache_clear()


def test_auto_takes_the_best_for_the_device(packages):
    assert table.select("attention", "auto", CPU, torch.float32) is attention_blocked
    assert table.choose("attention", "auto", CUDA, torch.bfloat16) == "sdpa"
    best = "function" if probe.compiled_missing(CPU, torch.float64) else "compiled"
    assert table.choose("rms_norm", "auto", CPU, torch.float64) == best
    assert table.choose("rms_norm", "auto", CPU, torch.bfloat16) == "function"
    assert table.choose("rms_norm", "auto", CUDA, torch.float32) == "torch"
    packages["flash_attn"] = object()
    probe.missing.cache_clear()
    assert table.choose("attention", "auto", CUDA, torch.bfloat16) == "flash_attn"
    assert table.choose("attention", "auto", CUDA, torch.float32) == "sdpa"
    assert table.choose("attention", "auto", CPU, torch.bfloat16) == "blocked"


@pytest.mark.parametrize("op", table.TABLE)
def test_auto_always_finds_one(packages, op):
    for device in (CPU, CUDA):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            name = table.choose(op, "auto", device, dtype)
            assert table.select(op, name, device, dtype) is table.TABLE[op][name].implementation


def test_a_missing_backend_is_named_with_the_way_to_get_it(packages):
    with pytest.raises(UserError, match="flash_attn.*No module named.*pip install flash-attn"):
        table.choose("attention", "flash_attn", CUDA, torch.bfloat16)
    with pytest.raises(UserError, match="needs a CUDA device, this is cpu"):
        table.choose("attention", "flash_attn", CPU, torch.bfloat16)
    with pytest.raises(UserError, match="--bf16 or --fp16"):
        table.choose("attention", "flash_attn", CUDA, torch.float32)


def test_an_unknown_backend_suggests_a_known_one():
    with pytest.raises(UserError, match="'sdpaa'.*choose auto.*did you mean sdpa"):
        table.choose("attention", "sdpaa", CPU, torch.float32)


@pytest.mark.parametrize(
    ("flag", "backend"),
    [("auto", "blocked"), ("flash", "blocked"), ("fused", "sdpa"), ("unfused", "reference")],
)
def test_values_of_attention_backend_on_cpu(packages, flag, backend):
    assert table.choose("attention", table.attention_backend(flag), CPU, torch.float32) == backend


def test_flash_on_cuda_is_the_package_or_torchs_own(packages):
    flash = table.attention_backend("flash")
    assert table.choose("attention", flash, CUDA, torch.bfloat16) == "sdpa"
    packages["flash_attn"] = object()
    probe.missing.cache_clear()
    assert table.choose("attention", flash, CUDA, torch.bfloat16) == "flash_attn"


def test_local_is_the_reference():
    chosen = table.select("attention", table.attention_backend("local"), CPU, torch.float32)
    assert chosen is attention_reference


def test_unknown_flag_values():
    with pytest.raises(UserError, match="--attention-backend fast is unknown"):
        table.attention_backend("fast")
    with pytest.raises(UserError, match="--transformer-impl fast is unknown"):
        table.general_backend("fast")


def test_transformer_engine_that_cannot_load_is_explained(packages):
    packages["transformer_engine"] = RuntimeError("Found empty `transformer-engine` meta package")
    with pytest.raises(UserError, match="Found empty.*pip install.*--transformer-impl local"):
        table.general_backend("transformer_engine")
    assert table.general_backend("local") == table.general_backend("auto") == "auto"


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError, AttributeError])
def test_a_package_that_fails_to_import_in_any_way_is_missing(packages, error):
    packages["flash_attn"] = error("broken\nbuild")
    assert probe.missing("flash_attn") == "flash_attn: broken build"


def test_a_package_is_asked_for_once(packages):
    assert probe.missing("flash_attn").startswith("flash_attn: No module named")
    packages["flash_attn"] = object()
    assert probe.missing("flash_attn") is not None


def test_a_model_with_an_extra_logit_is_built_on_a_backend_that_has_one(packages):
    packages["flash_attn"] = object()
    probe.missing.cache_clear()
    for kind, expected in (("vanilla", "flash_attn"), ("learnable", "sdpa")):
        config = TransformerConfig.resolve(
            num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8,
            attention_backend="flash", softmax_type=kind,
        )  # fmt: skip
        backends = choose_backends(config, CUDA, torch.bfloat16)
        assert backends.names["attention"] == expected
    unfit = backends.unfit["attention"]
    assert "--softmax-type learnable" in unfit["flash_attn"]
    with pytest.raises(UserError, match="--softmax-type learnable"):
        table.choose("attention", "flash_attn", CUDA, torch.bfloat16, unfit)
