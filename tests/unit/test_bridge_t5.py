"""T5 of the transformers library becomes ours and goes back: equal logits and loss, equal bytes.

Random models of both kinds, whose heads do not fill the hidden size, whose decoder is deeper than
the encoder and whose vocabulary is odd.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the library reads it

import transformers  # noqa: E402

from megatron.bridge import hugging_face  # noqa: E402
from megatron.bridge.hugging_face import Import  # noqa: E402
from megatron.bridge.t5 import T5  # noqa: E402
from megatron.bridge.writing import write_weights  # noqa: E402
from megatron.core.mesh import Mesh  # noqa: E402
from megatron.core.models.t5 import T5Model  # noqa: E402
from megatron.core.sharding import box_slices  # noqa: E402
from megatron.core.transformer.config import TransformerConfig  # noqa: E402
from megatron.core.utils import UserError  # noqa: E402
from tests.unit.bridge_models import filled, read_all  # noqa: E402

BASE: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 97,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 41,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 1e-3,
    "dropout_rate": 0.2,
    "n_positions": 77,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "1.0": {"feed_forward_proj": "relu"},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "1.1-tied": {"feed_forward_proj": "gated-silu", "scale_decoder_outputs": False},
    "scaled-untied": {
        "feed_forward_proj": "gelu",
        "tie_word_embeddings": False,
        "scale_decoder_outputs": True,
    },
}
HEAD = "lm_head.weight"


def write_theirs(folder: Path, kind: str, dtype: torch.dtype = torch.float64) -> Path:
    """Write a folder of large random values; those of an untied head are its own."""
    settings = BASE | KINDS[kind] | {"torch_dtype": str(dtype).removeprefix("torch.")}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))
    draw = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(value.shape, generator=draw, dtype=torch.float64) * 0.4 + wide(name)).to(
            dtype
        )
        for name, value in model.state_dict().items()
        if "embed_tokens" not in name
        and (name != HEAD or settings.get("tie_word_embeddings") is False)
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def wide(name: str) -> float:
    return 2.0 if name.endswith("norm.weight") else 0.1


def load_theirs(folder: Path) -> Any:
    found = transformers.T5ForConditionalGeneration
    return found.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()


def make_ours(config: TransformerConfig, tensors: dict[str, Tensor]) -> T5Model:
    dtype = next(iter(tensors.values())).dtype
    model = T5Model(config, Mesh.serial(), vocab_size=97, dtype=dtype)
    return filled(model, tensors)


def check_equal(ours: T5Model, theirs: Any) -> None:
    """Compare logits and loss of samples with padding."""
    draw = torch.Generator().manual_seed(5)
    encoder_tokens = torch.randint(97, (3, 19), generator=draw)
    decoder_tokens, labels = torch.randint(97, (2, 3, 13), generator=draw)
    encoder_valid = torch.arange(19) < torch.tensor([[19], [7], [1]])
    decoder_valid = torch.arange(13) < torch.tensor([[5], [13], [2]])
    with torch.no_grad():
        expected = theirs(
            input_ids=encoder_tokens,
            attention_mask=encoder_valid.long(),
            decoder_input_ids=decoder_tokens,
            decoder_attention_mask=decoder_valid.long(),
            labels=labels.masked_fill(~decoder_valid, -100),
        )
        logits = ours(encoder_tokens, decoder_tokens, encoder_valid_BS=encoder_valid)
        losses = ours(encoder_tokens, decoder_tokens, labels, encoder_valid_BS=encoder_valid)
    assert expected.logits.abs().max() > 1
    # A query at padding sees padding here; what it says counts for nothing.
    said, theirs_said = logits[decoder_valid], expected.logits[decoder_valid]
    torch.testing.assert_close(said, theirs_said, rtol=1e-5, atol=1e-5)
    loss = losses[decoder_valid].mean()
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)


def send_back(opened: Import, tensors: dict[str, Tensor], folder: Path) -> Path:
    made = hugging_face.export(
        opened.config,
        opened.rows,
        opened.tensors,
        lambda name, box: tensors[name][box_slices(box)],
        token_ids=opened.token_ids,
    )
    assert not made.left_out
    write_weights(folder, made.tensors, made.read, made.settings, most_bytes=10**9)
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_are_theirs_and_the_way_back_gives_the_same(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_theirs(tmp_path / "theirs", kind, dtype)
    with Import(folder) as opened:
        tensors = read_all(opened)
        check_equal(make_ours(opened.config, tensors), load_theirs(folder))
        back = send_back(opened, tensors, tmp_path / "back")
    before, after = (load_file(one / "model.safetensors") for one in (folder, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    settings = json.loads((back / "config.json").read_text())
    assert (BASE | KINDS[kind]).items() <= settings.items()
    check_equal(make_ours(opened.config, tensors), load_theirs(back))


def test_a_folder_that_the_library_wrote_again_is_the_same_model(tmp_path: Path) -> None:
    """Its config.json says then that a head of its own is tied."""
    for kind in KINDS:
        first = write_theirs(tmp_path / kind, kind)
        again = tmp_path / f"{kind} again"
        load_theirs(first).save_pretrained(again)
        with Import(first) as one, Import(again) as other:
            untied = kind in ("1.1", "scaled-untied")
            assert one.config.untie_embeddings_and_output_weights == untied
            assert one.config == other.config
            found, expected = read_all(other), read_all(one)
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_what_old_files_hold_besides_is_read_or_refused(tmp_path: Path) -> None:
    """The embedding under three more names, and biases that no layer reads."""
    folder = write_theirs(tmp_path / "theirs", "1.0")
    file = folder / "model.safetensors"
    plain = load_file(file)
    vectors = plain["shared.weight"]
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(plain | {name: vectors.clone() for name in names} | {unread: torch.ones(8, 4)}, file)
    with Import(folder) as opened:
        assert not opened.config.untie_embeddings_and_output_weights
        assert len(opened.tensors) == 47
    save_file(plain | {names[0]: vectors + 1}, file)
    with pytest.raises(UserError, match=r"encoder.embed_tokens.weight is not shared.weight"):
        Import(folder)
    save_file({name: value for name, value in plain.items() if ".wo." not in name}, file)
    with pytest.raises(UserError, match=r"5 tensor\(s\) missing in .*encoder.block.0.*wo.weight"):
        Import(folder)
    save_file(plain, file)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match='say "tie_word_embeddings": true and "scale_decoder_out'):
        Import(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu': .* relu, gated"),
        ({"dense_act_fn": "silu"}, r"dense_act_fn is 'silu': .*\(relu\) says relu"),
        (
            {"is_gated_act": True},
            r"is_gated_act is True: feed_forward_proj \(relu\) says otherwise",
        ),
        ({"d_kv": None}, "has no d_kv"),
        ({"sliding": 4}, "sliding = 4"),
    ],
)
def test_settings_that_cannot_be_expressed_are_named(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | change))
    with pytest.raises(UserError, match=words):
        Import(tmp_path)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"softmax_scale": None}, "--softmax-scale None"),
        ({"add_bias_linear": True}, "--add-bias-linear True"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        ({"position_embedding_type": "rope"}, "--position-embedding-type rope"),
        ({"relu": False, "geglu": True}, "feed_forward_proj is 'geglu'"),
        ({"logit_multiplier": 0.5}, "--logit-multiplier 0.5"),
    ],
)
def test_what_t5_has_not_is_named_by_its_flag(change: dict[str, Any], flag: str) -> None:
    values: dict[str, Any] = {"num_layers": 2, "decoder_num_layers": 1, "hidden_size": 16}
    values |= {"num_attention_heads": 2, "softmax_scale": 1.0, "add_bias_linear": False}
    values |= {"normalization": "RMSNorm", "position_embedding_type": "relative", "relu": True}
    values |= {"max_position_embeddings": 64}
    family = T5()
    good = TransformerConfig.resolve(**values)
    assert family.misfits(good) == []
    assert [one.misfits(good) == [] for one in hugging_face.FAMILIES].count(True) == 1
    found = family.misfits(TransformerConfig.resolve(**values | change))
    assert any(flag in line for line in found), found


@pytest.mark.parametrize(
    ("change", "lines", "absent"),
    [
        (
            {"encoder_alone": True},
            [
                "this model, an encoder alone, is none .* for --to hf; --to megatron writes it",
                r"GPT2LMHeadModel: an encoder alone \(it is a decoder alone\)$",
                r"T5ForConditionalGeneration: an encoder alone \(it is an encoder with a ",
            ],
            "--",
        ),
        (
            {"decoder_num_layers": 2},
            [
                "this model, an encoder with a decoder, is none .*; --to megatron writes it",
                r"MixtralForCausalLM: an encoder with a decoder \(it is a decoder alone\)$",
                r"T5ForConditionalGeneration: .*--position-embedding-type learned_absolute \(it",
            ],
            "--num-experts",
        ),
        (
            {"position_embedding_type": "rope", "qk_layernorm": True},
            [
                "this model, a decoder alone, .*; --to megatron or torch_dist writes it",
                r"GPT2LMHeadModel: --qk-layernorm True \(it has False\); --position-embedding-type",
                "MixtralForCausalLM: layers without experts$",
            ],
            "--rotary-base",
        ),
    ],
)
def test_a_model_of_no_class_is_told_what_it_is(
    change: dict[str, Any], lines: list[str], absent: str
) -> None:
    """Each class says how it differs: in kind, or by the settings that decide, and what works."""
    values = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    config = TransformerConfig.resolve(max_position_embeddings=32, **values, **change)
    with pytest.raises(UserError) as refusal:
        hugging_face.export(config, 21, {}, lambda name, box: None)
    head, *classes = str(refusal.value).split("\n")
    found = [head, *(line.strip() for line in classes)]
    for line in lines:
        assert any(re.match(line, text) for text in found), (line, found)
    assert not any(absent in text for text in classes)
