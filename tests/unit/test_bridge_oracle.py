"""Models of the transformers library become ours and go back: equal logits, equal bytes.

Configurations are small and lopsided on purpose: fewer groups than heads, heads that do not fill
the hidden size, an odd vocabulary and odd widths, biases and norms far from their initial values.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the library reads it

import transformers  # noqa: E402

from megatron.bridge import hugging_face  # noqa: E402
from megatron.bridge.hugging_face import Import  # noqa: E402
from megatron.bridge.writing import write_weights  # noqa: E402
from megatron.core.mesh import Mesh  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.sharding import box_slices  # noqa: E402
from megatron.core.transformer.config import TransformerConfig  # noqa: E402
from megatron.core.utils import UserError  # noqa: E402
from tests.unit.bridge_models import filled, read_all  # noqa: E402

GPT2 = {"vocab_size": 101, "n_positions": 33, "n_embd": 48, "n_layer": 2, "n_head": 6}
GPT2 |= {"bos_token_id": 7, "eos_token_id": 100}
LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2 | {"n_inner": 83}),
    "gpt2-untied": (
        "GPT2",
        GPT2
        | {
            "n_head": 3,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "scale_attn_weights": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "llama": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    "llama-tied": (
        "Llama",
        LLAMA
        | {
            "num_key_value_heads": 3,
            "head_dim": 10,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama-multi-query": (
        "Llama",
        LLAMA
        | {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        },
    ),
    "mixtral": (
        "Mixtral",
        LLAMA
        | {"experts_implementation": "eager"}  # another needs bfloat16
        | {"head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "rms_norm_eps": 1e-2},
    ),
    "llama-plain": ("Llama", LLAMA | {"num_key_value_heads": 6}),
}


def make_theirs(case: str, dtype: torch.dtype, seed: int = 1) -> nn.Module:
    """Return a model of theirs with large random values everywhere."""
    name, values = CASES[case]
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation="eager")
    cls = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Mixtral": "MixtralForCausalLM"}[
        name
    ]
    model: nn.Module = getattr(transformers, cls)(config).to(dtype).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            wide = parameter.ndim == 1
            values_ = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(values_ * (0.5 if wide else 0.15) + key.endswith("norm.weight"))
    return model


def make_ours(config: TransformerConfig, rows: int, tensors: Mapping[str, Tensor]) -> GPTModel:
    """Return our model with these weights, in their dtype."""
    dtype = next(iter(tensors.values())).dtype
    model = GPTModel(config, Mesh.serial(), vocab_size=rows, dtype=dtype)
    return filled(model, tensors)


def logits_of_both(theirs: nn.Module, ours: GPTModel, rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, rows, (2, 31), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return ours(tokens), theirs(tokens, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_theirs_and_the_way_back_gives_the_same_files(case: str, tmp_path: Path) -> None:
    theirs = make_theirs(case, torch.float64)
    theirs.save_pretrained(tmp_path / "first", max_shard_size="20KB")
    with Import(tmp_path / "first") as opened:
        config, rows, shapes = opened.config, opened.rows, opened.tensors
        tensors, token_ids = read_all(opened), opened.token_ids
    found, expected = logits_of_both(theirs, make_ours(config, rows, tensors), rows)
    assert expected.abs().max() > 1
    # They compute rotations in fp32, whatever the dtype of the rest.
    tolerance = 1e-10 if case.startswith("gpt2") else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    made = hugging_face.export(
        config, rows, shapes, lambda name, box: tensors[name][box_slices(box)], token_ids=token_ids
    )
    folder = tmp_path / "second"
    files = write_weights(folder, made.tensors, made.read, made.settings, most_bytes=20_000)
    assert len(files) > 3
    again = type(theirs).from_pretrained(folder, dtype="auto").eval()
    assert again.dtype == torch.float64
    state, returned = theirs.state_dict(), again.state_dict()
    assert state.keys() == returned.keys()
    assert all(torch.equal(value, returned[name]) for name, value in state.items())
    aside = {"transformers_version", "_name_or_path", "n_inner"}  # the last one is computed
    before, after = theirs.config.to_dict(), again.config.to_dict()
    assert {k: before[k] for k in before.keys() - aside} == {
        k: after.get(k) for k in before.keys() - aside
    }


@pytest.mark.parametrize("case", ["gpt2", "llama-tied", "mixtral"])
def test_a_model_of_ours_in_fp32_computes_the_same_as_theirs(case: str, tmp_path: Path) -> None:
    """The other direction first: weights that never were theirs."""
    theirs = make_theirs(case, torch.float32)
    theirs.save_pretrained(tmp_path / "shape")
    with Import(tmp_path / "shape") as opened:
        config, rows, shapes = opened.config, opened.rows, opened.tensors
    draw = torch.Generator().manual_seed(9)
    tensors = {
        name: torch.randn(shape.shape, generator=draw) * 0.2 + ("layernorm.weight" in name)
        for name, shape in shapes.items()
    }
    made = hugging_face.export(
        config, rows, shapes, lambda name, box: tensors[name][box_slices(box)]
    )
    folder = tmp_path / "made"
    write_weights(folder, made.tensors, made.read, made.settings, most_bytes=10**9)
    plain = {"experts_implementation": "eager"} if case == "mixtral" else {}
    again = type(theirs).from_pretrained(folder, attn_implementation="eager", **plain).eval()
    found, expected = logits_of_both(again, make_ours(config, rows, tensors), rows)
    # Sums of a few hundred products in fp32, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_hf_07_every_matrix_of_every_expert_has_a_partner(tmp_path: Path) -> None:
    """Logits and bytes of the case `mixtral` are compared above; here one matrix is wrong."""
    make_theirs("mixtral", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    rest = {key: value for key, value in tensors.items() if key != name}
    sixth = name.replace("experts.3", "experts.5")
    for other, words in (
        (rest, rf"1 tensor\(s\) missing in .*: {name}"),
        ({**tensors, sixth: tensors[name].clone()}, f"nothing takes.*{sixth}"),
        ({**tensors, name: tensors[name].t().contiguous()}, r"another shape.*experts\.3\.w2"),
    ):
        save_file(other, file)
        with pytest.raises(UserError, match=words):
            Import(tmp_path)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"moe_shared_expert_intermediate_size": 8}, "--moe-shared-expert-intermediate-size 8"),
        ({"moe_layer_freq": (0, 1)}, "--moe-layer-freq 0 1"),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        ({"moe_router_pre_softmax": True}, "--moe-router-pre-softmax True"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor 1.0"),
        ({"moe_n_hash_layers": 1}, "--moe-n-hash-layers 1"),
        (
            {"moe_router_load_balancing_type": ("sinkhorn",), "moe_aux_loss_coeff": (0.0,)},
            "--moe-router-load-balancing-type sinkhorn",
        ),
        ({"add_bias_linear": True}, "--add-bias-linear True"),
    ],
)
def test_experts_that_mixtral_has_not_are_named_by_their_flag(
    change: dict[str, Any], flag: str
) -> None:
    values: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    values |= {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"}
    values |= {"position_embedding_type": "rope", "num_experts": 4, "moe_ffn_hidden_size": 12}
    values |= {"untie_embeddings_and_output_weights": True, "moe_aux_loss_coeff": (0.1,)}
    values |= {"max_position_embeddings": 64}
    family = hugging_face.Mixtral()
    good = TransformerConfig.resolve(**values)
    assert family.misfits(good) == []
    assert [one.misfits(good) == [] for one in hugging_face.FAMILIES].count(True) == 1
    assert any("--moe-aux-loss-coeff" in line for line in family.left_out(good))
    assert any(
        flag in line for line in family.misfits(TransformerConfig.resolve(**values | change))
    )


def test_windows_of_mixtral_are_refused(tmp_path: Path) -> None:
    make_theirs("mixtral", torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 8}))
    with pytest.raises(UserError, match="sliding_window is 8"):
        Import(tmp_path)


def test_a_pickled_file_is_the_same_model(tmp_path: Path) -> None:
    theirs = make_theirs("gpt2", torch.float32)
    theirs.save_pretrained(tmp_path / "safe")
    (tmp_path / "pickled").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    theirs.config.save_pretrained(tmp_path / "pickled")
    with Import(tmp_path / "safe") as one, Import(tmp_path / "pickled") as other:
        assert one.tensors == other.tensors
        # This file has the tied head too.
        first, second = read_all(one), read_all(other)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
