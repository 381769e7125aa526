"""What cannot be converted is refused by name, before anything is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.bridge.files import open_weights
from megatron.bridge.gpt2 import GPT2 as GPT2Family
from megatron.bridge.hugging_face import FAMILIES, Import, export, our_tensors
from megatron.bridge.llama import Llama
from megatron.bridge.settings import Settings
from megatron.bridge.writing import write_weights
from megatron.core.dist_checkpointing.stream import Shape
from megatron.core.sharding import Box, box_slices
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from tests.unit.hub_files import (
    GPT2,
    LLAMA,
    llama_shapes,
    random_tensors,
    write_folder,
    write_llama,
)


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def test_hf_07_every_tensor_has_a_partner(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "good")
    tensors = load_file(folder / "model.safetensors")
    Import(folder).__exit__()
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {key: value for key, value in tensors.items() if key != name}
    cases = (
        (rest, rf"1 tensor\(s\) missing in .*: {name}"),
        ({**rest, f"{name}_renamed": tensors[name]}, f"nothing takes.*{name}_renamed"),
        ({**tensors, "model.layers.2.extra": torch.ones(3)}, "nothing takes.*layers.2.extra"),
        ({**tensors, name: torch.ones(9, 12)}, r"another shape.*up_proj.*\[9, 12\] instead of"),
    )
    for number, (other, words) in enumerate(cases):
        with pytest.raises(UserError, match=words):
            Import(write_folder(tmp_path / f"bad{number}", LLAMA, other))


def test_hf_09_a_tied_model_needs_no_head_and_an_untied_one_does(tmp_path: Path) -> None:
    with Import(write_llama(tmp_path / "tied")) as opened:
        assert not opened.config.untie_embeddings_and_output_weights
        assert "output_layer.weight" not in opened.tensors
    config = LLAMA | {"tie_word_embeddings": False}
    tensors = random_tensors(llama_shapes(config))
    with Import(write_folder(tmp_path / "untied", config, tensors)) as opened:
        head = opened.read("output_layer.weight", whole((21, 12)))
    assert torch.equal(head, tensors["lm_head.weight"])
    del tensors["lm_head.weight"]
    with pytest.raises(UserError, match="has no lm_head.weight.*tie_word_embeddings: false"):
        Import(write_folder(tmp_path / "beheaded", config, tensors))


def test_a_head_beside_a_tied_embedding_must_be_equal_to_it(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes(LLAMA))
    head = tensors["model.embed_tokens.weight"].clone()
    Import(write_folder(tmp_path / "equal", LLAMA, {**tensors, "lm_head.weight": head})).__exit__()
    head[20, 11] += 1
    with pytest.raises(UserError, match="lm_head.weight is not model.embed_tokens.weight"):
        Import(write_folder(tmp_path / "other", LLAMA, {**tensors, "lm_head.weight": head}))


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias is True.*mlp_bias"),
        ("llama", {"rope_theta": 10000.5}, "rope_theta is 10000.5.*whole"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, "factor is 2.5"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "low_freq_factor is 2.0: only 1",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "new": 1}}, "rope_parameters: new = 1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"sliding_window": 64}, "sliding_window = 64"),
        ("llama", {"hidden_size": "12"}, "hidden_size is '12': it must be a whole number"),
        ("llama", {"num_hidden_layers": None}, "no num_hidden_layers"),
        ("llama", {"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM.*GPT2LMHeadModel"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"embd_pdrop": 0.5}, "embd_pdrop is 0.5: here it must be resid_pdrop"),
    ],
)
def test_settings_that_cannot_be_expressed_are_named(
    family: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = (LLAMA if family == "llama" else GPT2) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        Import(tmp_path)


def test_settings_of_older_and_newer_files_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling |= {"original_max_position_embeddings": 8192}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    newer = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    found = [Llama().from_theirs(Settings(config, "config.json")) for config in (older, newer)]
    assert found[0] == found[1]
    assert (found[0]["rotary_base"], found[0]["rope_scaling_factor"]) == (500_000, 8.0)


BASE = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "num_query_groups": 3}
AS_LLAMA = BASE | {
    "position_embedding_type": "rope",
    "max_position_embeddings": 64,
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 10,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
AS_GPT2 = BASE | {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("values", "change", "flag"),
    [
        (AS_LLAMA, {"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        (AS_LLAMA, {"qk_layernorm": True}, "--qk-layernorm True"),
        (AS_LLAMA, {"window_size": (4, 0)}, "--window-size 4 0"),
        (AS_LLAMA, {"add_qkv_bias": True}, "--add-qkv-bias True"),
        (AS_LLAMA, {"apply_layernorm_1p": True}, "--apply-layernorm-1p True"),
        (AS_LLAMA, {"embedding_multiplier": 2.0}, "--embedding-multiplier 2.0"),
        (AS_LLAMA, {"softmax_scale": 0.3}, "--softmax-scale 0.3"),
        (AS_LLAMA, {"logit_softcap": 30.0}, "--logit-softcap 30.0"),
        (AS_LLAMA, {"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        (AS_LLAMA, {"swiglu": False, "geglu": True}, "activation geglu"),
        (AS_LLAMA, {"multi_latent_attention": True}, "--multi-latent-attention True"),
        (AS_GPT2, {"group_query_attention": True, "num_query_groups": 1}, "--num-query-groups 1"),
        (AS_GPT2, {"kv_channels": 5}, "--kv-channels 5"),
        (AS_GPT2, {"squared_relu": True}, "activation squared_relu"),
        (AS_GPT2, {"add_bias_linear": False}, "--add-bias-linear False"),
    ],
)
def test_what_their_classes_cannot_compute_is_named_by_its_flag(
    values: dict[str, Any], change: dict[str, Any], flag: str
) -> None:
    good = TransformerConfig.resolve(**values)
    assert [family.misfits(good) == [] for family in FAMILIES].count(True) == 1
    with pytest.raises(UserError, match=flag):
        export(TransformerConfig.resolve(**values | change), 21, {}, lambda name, box: None)


def test_settings_that_change_no_result_are_no_obstacle() -> None:
    aside = {"recompute_granularity": "full", "recompute_method": "uniform"}
    aside |= {"recompute_num_layers": 1, "label_smoothing": 0.1, "rope_scaling_factor": 2.0}
    aside |= {"relative_attention_num_buckets": 16}  # of other positions
    aside |= {"hidden_dropout": 0.0, "init_method_std": 0.5, "softmax_scale": 0.5}
    config = TransformerConfig.resolve(**AS_LLAMA | aside)
    assert Llama().misfits(config) == []
    assert Llama().left_out(config) == ["--label-smoothing 0.1 (it has 0.0)"]
    tanh = TransformerConfig.resolve(**AS_GPT2 | {"openai_gelu": True})
    assert GPT2Family().misfits(tanh) == []
    exact = TransformerConfig.resolve(**AS_GPT2 | {"bias_gelu_fusion": False})
    assert GPT2Family().to_theirs(exact)["activation_function"] == "gelu"


def test_an_export_needs_the_models_weights_and_no_others() -> None:
    config = TransformerConfig.resolve(**AS_LLAMA)
    there = {name: Shape("float32", shape) for name, shape in our_tensors(config, 21).items()}

    def read(name: str, box: Box) -> Tensor:
        return torch.zeros([stop - start for start, stop in box])

    made = export(config, 21, there, read, dtype="bfloat16")
    assert made.read("model.norm.weight", ((0, 12),)).dtype == torch.bfloat16
    assert made.settings["torch_dtype"] == "bfloat16"
    head = there.pop("output_layer.weight")
    with pytest.raises(UserError, match="missing in the checkpoint: output_layer.weight"):
        export(config, 21, there, read)
    with pytest.raises(UserError, match="nothing takes in the checkpoint: mtp.weight"):
        export(config, 21, {**there, "output_layer.weight": head, "mtp.weight": head}, read)


def test_weights_of_several_dtypes_keep_what_they_can(tmp_path: Path) -> None:
    tensors = random_tensors(llama_shapes(LLAMA))
    tensors = {name: value.bfloat16() for name, value in tensors.items()}
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.full((4, 12), 1 / 3)
    with Import(write_folder(tmp_path / "mixed", LLAMA, tensors)) as opened:
        dtypes = {name: tensor.dtype for name, tensor in opened.tensors.items()}
        fused = opened.read("decoder.layers.0.self_attention.linear_qkv.weight", whole((20, 12)))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert dtypes.pop(name) == "float32" and set(dtypes.values()) == {"bfloat16"}
    assert torch.equal(fused[12:16], torch.full((4, 12), 1 / 3))
    queries = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(fused[:12], queries.float())


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _garble(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[0:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(bytes(data))


def _overlong(folder: Path) -> None:
    path = folder / "model.safetensors"
    text = path.read_bytes().replace(b'"shape":[12]', b'"shape":[13]', 1)
    path.write_bytes(text)


def _gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _pickle(folder: Path) -> None:
    _gone(folder)
    torch.save({"model.norm.weight": Path("x")}, folder / "pytorch_model.bin")


def _short_listing(folder: Path) -> None:
    table = {"model.norm.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _stray_listing(folder: Path) -> None:
    table = {"model.norm.weight": "../model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "is no whole safetensors file|is damaged"),
        (_garble, "its header would have"),
        (_overlong, "would lie from byte"),
        (_gone, "has none of model.safetensors"),
        (_pickle, "can be read safely"),
        (_short_listing, "is not what its index says: it has, unlisted"),
        (_stray_listing, "outside of its folder"),
    ],
)
def test_damaged_files_are_told_from_whole_ones(damage: Any, words: str, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    open_weights(folder).close()
    damage(folder)
    with pytest.raises(UserError, match=words):
        open_weights(folder)


def test_what_is_written_is_read_by_the_library_of_the_format(tmp_path: Path) -> None:
    tensors = random_tensors({"a": (5, 7), "b": (11,), "empty": (0, 3), "c": (2, 3, 4)})
    tensors["half"] = torch.arange(6.0).bfloat16()
    tensors["scalar"] = torch.tensor(7)
    shapes = {name: Shape(str(v.dtype)[6:], tuple(v.shape)) for name, v in tensors.items()}

    def read(name: str, box: Box) -> Tensor:
        return tensors[name][box_slices(box)]

    names = write_weights(tmp_path / "out", shapes, read, {"a": 1}, most_bytes=150)
    assert len(names) == 3
    found: dict[str, Tensor] = {}
    for name in names:
        found |= load_file(tmp_path / "out" / name)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(value, found[name]) for name, value in tensors.items())
    opened = open_weights(tmp_path / "out")
    assert all(torch.equal(opened.read(n, whole(v.shape)), v) for n, v in tensors.items())
    opened.close()
    save_file(tensors, tmp_path / "model.safetensors")  # and theirs by us
    opened = open_weights(tmp_path)
    assert opened.tensors == shapes
    opened.close()


def test_a_model_without_experts_is_told_so_by_the_family_of_experts() -> None:
    """And not that a number which nobody gave is wrong."""
    dense = TransformerConfig.resolve(num_layers=1, hidden_size=8, num_attention_heads=2)
    (family,) = (one for one in FAMILIES if one.architecture == "MixtralForCausalLM")
    assert family.misfits(dense) == ["layers without experts"]
