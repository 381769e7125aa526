"""tools/checkpoint.py on models of the transformers library."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pretrain_gpt
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from tests.end_to_end.checkpoint_tool.words import NULL, TRAIN, Tool
from tests.unit.hub_files import (
    write_gpt2,
    write_llama,
)


@pytest.mark.parametrize("write", [write_llama, write_gpt2])
def test_hf_02_an_export_has_the_true_rows(
    write: Callable[..., Path], tmp_path: Path, tool: Tool
) -> None:
    """A run that learns nothing padded 21 rows to 128; the model that comes out is the first."""
    theirs = write(tmp_path / "theirs")
    assert tool("convert", "--load", theirs, "--save", tmp_path / "imported", *NULL) == 0
    words = f"{TRAIN} --load {tmp_path / 'imported'} --save {tmp_path / 'save'} --train-iters 1"
    assert pretrain_gpt.main(f"{words} --lr 0 --min-lr 0 --global-batch-size 1".split()) == 0
    target = tmp_path / "hf"
    assert tool("convert", "--load", tmp_path / "save", "--save", target, "--to", "hf") == 0
    before, after = (json.loads((f / "config.json").read_text()) for f in (theirs, target))
    assert after["vocab_size"] == 21 and after["tie_word_embeddings"] is True
    assert {name: after[name] for name in before if name != "tie_word_embeddings"}.items() <= (
        before.items()
    )
    found = load_file(target / "model.safetensors")
    expected = load_file(theirs / "model.safetensors")
    if write is write_gpt2:
        masks = [name for name in expected if name.endswith(".attn.bias")]
        assert len(masks) == 2
        expected = {f"transformer.{n}": v for n, v in expected.items() if n not in masks}
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_there_and_back_is_the_same_folder(
    theirs: Path, imported: Path, tmp_path: Path, tool: Tool
) -> None:
    target = tmp_path / "back"
    shards = ("--max-shard-size", 3e-6)
    assert tool("convert", "--load", imported, "--save", target, "--to", "hf", *shards) == 0
    config = json.loads((target / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    listing = json.loads((target / "model.safetensors.index.json").read_text())
    found = {
        name: value
        for file in set(listing["weight_map"].values())
        for name, value in load_file(target / file).items()
    }
    before = load_file(theirs / "model.safetensors")
    assert found.keys() == before.keys() == listing["weight_map"].keys()
    assert all(torch.equal(value, found[name]) for name, value in before.items())
    again = tmp_path / "again"
    old = f"--loader llama_mistral --saver mcore --model-type GPT --load-dir {target} --save-dir"
    sizes = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --megatron-path x"
    assert tool(*f"{old} {again} {sizes}".split(), *NULL) == 0
    assert tool("diff", imported, again) == 0
    with pytest.raises(UserError, match="is not empty"):
        tool("convert", "--load", imported, "--save", target, "--to", "hf")


def test_an_export_names_what_it_leaves_behind(
    tmp_path: Path, tool: Tool, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{TRAIN} --load {imported} --save {tmp_path / 'save'} --train-iters 1 "
    words += "--global-batch-size 1 --hidden-dropout 0.25 --attention-dropout 0.125"
    assert pretrain_gpt.main(words.split()) == 0
    capsys.readouterr()
    target = tmp_path / "hf"
    words = f"convert --load {tmp_path / 'save'} --save {target} --to hf --copy-tokenizer"
    assert tool(*words.split()) == 0
    said = capsys.readouterr().err
    assert "LlamaForCausalLM has no --hidden-dropout 0.25 (it has 0.0): left out" in said
    assert "attention" not in said, "which their settings have a word for"
    assert json.loads((target / "config.json").read_text())["attention_dropout"] == 0.125
    assert "NullTokenizer, which the checkpoint names, has no files" in said


def test_a_tokenizer_beside_the_weights_is_found_and_copied(
    imported: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "llama", vocab_size=40)
    (source / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (source / "tokenizer_config.json").write_text('{"eos_token": "c"}')
    (source / "generation_config.json").write_text('{"temperature": 0.1}')
    target = tmp_path / "save"
    assert tool("convert", "--load", source, "--save", target, "--copy-tokenizer") == 0
    shutil.rmtree(source)
    with Checkpoint(target / "release") as made:
        facts = made.facts
    assert facts["vocabulary"] == 3 and facts["vocabulary_rows"] == 40
    assert facts["config"]["vocab_size"] == 40 and facts["tokenizer"]
    words = f"{TRAIN} --load {target} --train-iters 1 --global-batch-size 1"
    assert pretrain_gpt.main(words.split()) == 0
    assert (
        tool(
            "convert", "--load", target, "--save", tmp_path / "hf", "--to", "hf", "--copy-tokenizer"
        )
        == 0
    )
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    copied = {path.name for path in (target / "tokenizer").iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json"}, "how to sample is no tokenizer"
    with pytest.raises(UserError, match="has 30 ids, the model 21 rows; --vocab-size 20 would fit"):
        tool(
            "convert",
            "--load",
            write_llama(tmp_path / "l2"),
            "--save",
            tmp_path / "s2",
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            29,
        )


def _tokenizer() -> dict[str, object]:
    """Return the least tokenizer.json: three letters."""
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
        "added_tokens": [],
    }


def test_a_model_without_a_tokenizer_says_so(
    theirs: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("convert", "--load", theirs, "--save", tmp_path / "save") == 0
    assert "has no tokenizer that is known here" in capsys.readouterr().err
    from tools import generate_text

    with pytest.raises(UserError, match="names no tokenizer"):
        generate_text.main(["--load", str(tmp_path / "save"), "--prompt", "1", "--device", "cpu"])


def test_an_imported_model_generates(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools import generate_text

    words = f"--load {imported} --device cpu --temperature 0 --num-tokens-to-generate 4 --prompt"
    assert generate_text.main([*words.split(), "5 6 7"]) == 0
    assert len(capsys.readouterr().out.split()) == 7


def test_a_folder_of_theirs_is_looked_into_like_a_checkpoint(
    theirs: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("inspect", theirs) == 0
    assert "format safetensors" in capsys.readouterr().out
    assert tool("verify", theirs) == 0
    assert "20 tensors" in (out := capsys.readouterr().out) and "no checksums" in out
    cut = Path(shutil.copytree(theirs, tmp_path / "cut"))
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-4])
    assert tool("verify", cut) == 1
    assert tool("diff", theirs, write_llama(tmp_path / "same", bos_token_id=1)) == 0


# damage


def _shards(folder: Path) -> dict[str, str]:
    """Take the weights apart into two files and an index; return what lies where."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), dict[str, str]()
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    _list(folder, where)
    return where


def _list(folder: Path, where: object) -> None:
    text = json.dumps({"weight_map": where})
    (folder / "model.safetensors.index.json").write_text(text)


def _cut_the_end(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _cut_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def _lose_a_shard(folder: Path) -> None:
    (folder / _shards(folder)["model.norm.weight"]).unlink()


def _list_what_is_nowhere(folder: Path) -> None:
    where = _shards(folder)
    _list(folder, {**where, "model.extra.weight": where["model.norm.weight"]})


def _list_it_elsewhere(folder: Path) -> None:
    where = _shards(folder)
    _list(folder, {**where, "model.embed_tokens.weight": where["model.norm.weight"]})


def _list_outside(folder: Path) -> None:
    _list(folder, {**_shards(folder), "model.norm.weight": "../other.safetensors"})


def _quantize(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path)


def _cut_the_settings(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:40])


def _no_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut_the_end, "is no whole safetensors file: .* would lie from byte"),
        (_cut_the_header, "is no whole safetensors file: its header would have"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "file: it has 0 bytes"),
        (lambda f: (f / "model.safetensors").unlink(), "has none of model.safetensors, "),
        (_lose_a_shard, "of-00002.safetensors is missing"),
        (_list_what_is_nowhere, "not what its index says: it lacks model.extra.weight"),
        (_list_it_elsewhere, "not what its index says: it lacks model.embed_tokens.weight"),
        (_list_outside, "names a file outside of its folder"),
        (lambda f: (_shards(f), _list(f, [])), "index.json has no weight_map"),
        (_quantize, r"1 tensor\(s\) of .* model.norm.weight \(int8\); quantized"),
        (lambda f: (f / "config.json").unlink(), "holds no checkpoint"),
        (_cut_the_settings, "config.json cannot be read"),
        (_no_text, "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[1]"), "config.json holds no object"),
    ],
)
def test_a_damaged_folder_is_refused_before_anything_is_written(
    damage: Callable[[Path], object], message: str, tmp_path: Path, tool: Tool
) -> None:
    folder = write_llama(tmp_path / "theirs")
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        tool("convert", "--load", folder, "--save", tmp_path / "save", *NULL)
    assert "\n" not in str(caught.value) and not (tmp_path / "save").exists()
