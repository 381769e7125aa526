"""tools/checkpoint.py on checkpoints of runs, and on a model of the transformers library."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pretrain_gpt
from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from tests.harness import Pool
from tests.programs import ROOT, launch
from tests.unit.hub_files import (
    LLAMA,
    llama_shapes,
    random_tensors,
    write_gpt2,
    write_llama,
)
from tools import checkpoint

TRAIN = (
    "--use-checkpoint-args --seq-length 16 --micro-batch-size 1 --lr 1e-3 --mock-data --device cpu "
    "--eval-iters 0 --num-workers 0 --log-interval 1"
)
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(LLAMA["vocab_size"] - 1))

Tool = Callable[..., int]


@pytest.fixture
def tool() -> Tool:
    return lambda *words: checkpoint.main([str(word) for word in words])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("theirs") / "llama", bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="module")
def imported(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints with the imported model."""
    folder = tmp_path_factory.mktemp("imported") / "save"
    words = ["convert", "--load", str(theirs), "--save", str(folder), *NULL]
    assert checkpoint.main(words) == 0
    return folder


@pytest.fixture(scope="module")
def run(imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two checkpoints of a run in bf16 that started from the imported model."""
    folder = tmp_path_factory.mktemp("run") / "save"
    words = f"{TRAIN} --load {imported} --save {folder} --save-interval 1 --train-iters 2 --bf16"
    assert pretrain_gpt.main(f"{words} --global-batch-size 3".split()) == 0
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def flip(folder: Path, offset: int = 40) -> None:
    """Change a bit of the first file of a checkpoint."""
    path = min(folder.glob("*.bin"))
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


# verify


def test_a_sound_checkpoint_is_told_in_a_line(
    run: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("verify", run) == 0
    assert tool("verify", "--load", run / "iter_0000001") == 0
    assert tool("verify", run, "--all") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "iter_0000002 sound: 57 tensors" in lines[0] and "iter_0000001 sound" in lines[1]
    assert "iter_0000001, iter_0000002 sound: 114 tensors" in lines[2]


def _change_a_bit(folder: Path) -> str:
    flip(folder)
    return "does not match its checksum"


def _remove_a_file(folder: Path) -> str:
    min(folder.glob("*.bin")).unlink()
    return "is missing"


def _cut_a_file(folder: Path) -> str:
    path = min(folder.glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-64])
    return "bytes instead of"


def _edit_the_index(folder: Path) -> str:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace("float32", "float64", 1))
    return "does not match its own checksum"


@pytest.mark.parametrize("damage", [_change_a_bit, _remove_a_file, _cut_a_file, _edit_the_index])
def test_damage_is_listed_and_ends_with_one(
    damage: Callable[[Path], str], copy: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = damage(copy / "iter_0000002")
    for named in ((copy,), (copy / "iter_0000002",), (copy, "--ckpt-step", 2), (copy, "--all")):
        assert tool("verify", *named) == 1
        out = capsys.readouterr().out
        assert words in out and out.splitlines()[-1].endswith("1 damage(s)")
    assert tool("verify", copy, "--ckpt-step", 1) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "absent"), "absent does not exist"),
        (("verify", "."), "holds no checkpoint"),
        (("verify",), "takes one checkpoint, not 0"),
        (("inspect", "a", "b"), "takes one checkpoint, not 2"),
        (("diff", "a"), "takes two checkpoints, not 1"),
        (("look", "a"), "look: the first word is one of inspect, verify"),
        (("diff", "a", "b", "--tolerance", "-1"), "--tolerance"),
        (("reshard", "--load", "absent", "--save", "s"), "absent does not exist"),
        (("reshard", "--load", "absent", "--save", "s", "--files", 0), "--files"),
        (("convert", "--load", "a", "--save", "b", "--to", "zip"), "'zip' is no format"),
        (("convert", "--load", "a", "--save", "b", "--saver", "torch"), "--to torch_dist on any"),
        (("convert", "--load", "a", "--save", "b", "--model-type", "BERT"), "--model-type is one"),
    ],
)
def test_wrong_words_are_the_users_mistake(
    words: tuple[object, ...],
    message: str,
    tool: Tool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        tool(*words)


# inspect


def test_inspect_says_what_is_there(
    run: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("inspect", run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["iteration"] == 2 and found["format"] == "megatron-boxes"
    parts = {name: (part["tensors"], part["bytes"]) for name, part in found["parts"].items()}
    assert parts.pop("random states")[0] == 1
    elements = sum(tensor.numel() for tensor in random_tensors(llama_shapes(LLAMA)).values())
    masters = (14, 4 * elements)
    assert parts == {
        "weights": (14, 2 * elements),
        **{f"optimizer {kind}": masters for kind in ("exp_avg", "exp_avg_sq", "master")},
    }
    head = found["tensors"]["model.embedding.word_embeddings.weight"]
    assert head["dtype"] == "bfloat16" and head["shape"] == [21, 12] and head["bytes"] == 504

    assert tool("inspect", run, "--ckpt-step", 1, "--settings") == 0
    text = capsys.readouterr().out
    assert "iter_0000001: format megatron-boxes" in text and "  iteration         1\n" in text
    assert "    num_layers = 2\n" in text and "optimizer exp_avg" in text


def test_inspect_says_what_values_a_tensor_has(
    run: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "optimizer.master.decoder.final_layernorm.weight"
    assert tool("inspect", run, "--tensor", name, "--json") == 0
    found = json.loads(capsys.readouterr().out)["statistics"][name]
    with Checkpoint(run / "iter_0000002") as source:
        values = source.read(name)
    assert found["min"] == values.min().item() and found["elements"] == 12
    assert found["norm"] == pytest.approx(values.double().norm().item())
    with pytest.raises(UserError, match="has no such tensor"):
        tool("inspect", run, "--tensor", "nothing")


# diff


def test_a_copy_is_equal_and_one_step_is_not(
    run: Path, copy: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("diff", run, copy) == 0
    assert "57 tensors compared, 0 to name: equal" in capsys.readouterr().out
    one, two = run / "iter_0000001", run / "iter_0000002"
    assert tool("diff", one, two, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["iteration"] == [1, 2]
    name = "optimizer.master.decoder.final_layernorm.weight"
    with Checkpoint(one) as a, Checkpoint(two) as b:
        distance = (a.read(name).double() - b.read(name).double()).abs().max().item()
    assert found["tensors"][name]["max_absolute"] == distance > 0
    # Nothing moves by more than the rate, in two steps of it; bf16 rounds further.
    assert tool("diff", one, two, "--only", "optimizer.master", "--tolerance", 2e-3) == 0
    assert tool("diff", one, two, "--only", "optimizer.master", "--tolerance", 1e-5) == 1
    with pytest.raises(UserError, match="--only optimiser: neither has a tensor"):
        tool("diff", one, two, "--only", "optimiser")


def test_a_changed_bit_is_found_where_it_is(
    run: Path, copy: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpoint(copy / "iter_0000002") as source:
        key, stored = next(iter(source.tensors.items()))
        offset = stored.boxes[0].offset + 3 * stored.torch_dtype.itemsize
    flip(copy / "iter_0000002", offset)
    assert tool("diff", run, copy) == 1
    out = capsys.readouterr().out
    assert f"{key}: 1 of 12 values differ" in out and "first at [3]" in out
    assert "57 tensors compared, 1 to name: different" in out


def test_what_only_one_has_is_named(
    run: Path, imported: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("diff", imported, run) == 1
    out = capsys.readouterr().out
    assert f"optimizer.exp_avg.embedding.word_embeddings.weight: only in {run}" in out
    assert "model.embedding.word_embeddings.weight: dtype float32 and bfloat16" in out


# reshard


@pytest.mark.parametrize("files", [1, 3])
def test_a_reshard_holds_the_same_in_few_boxes(
    files: int, run: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    assert tool("reshard", "--load", run, "--save", target, "--files", files) == 0
    assert tool("diff", run, target) == 0 and tool("verify", target) == 0
    assert catalog.read_tracker(target) == 2
    with Checkpoint(target / "iter_0000002") as made, Checkpoint(run / "iter_0000002") as source:
        assert len(made.files) == files
        assert sum(len(tensor.boxes) for tensor in made.tensors.values()) <= 57 + files - 1
        facts = {name: value for name, value in source.facts.items() if name != "published"}
        assert {name: made.facts[name] for name in facts} == facts
    with pytest.raises(UserError, match="exists already"):
        tool("reshard", "--load", run, "--save", target)
    with pytest.raises(UserError, match="holds the checkpoint itself"):
        tool("reshard", "--load", target / "iter_0000002", "--save", target)


def test_weights_alone_in_another_dtype_come_from_their_masters(
    run: Path, tmp_path: Path, tool: Tool
) -> None:
    words = ("--load", run, "--save", tmp_path, "--params-dtype", "fp32", "--no-optim")
    assert tool("reshard", *words) == 0
    with (
        Checkpoint(tmp_path / "iter_0000002") as made,
        Checkpoint(run / "iter_0000002") as source,
    ):
        assert [key for key in made.tensors if key.startswith("optimizer.")] == []
        assert made.facts["parts"]["optimizer"] is False
        assert not made.facts["config"]["bf16"] and source.facts["config"]["bf16"]
        for key in made.tensors:
            if key.startswith("model."):
                finer = source.read(key.replace("model.", "optimizer.master."))
                assert torch.equal(made.read(key), finer)
                assert not torch.equal(finer, source.read(key).float())


def test_a_resharded_run_goes_on_as_it_would_have(run: Path, tmp_path: Path, tool: Tool) -> None:
    assert tool("reshard", "--load", run, "--save", tmp_path / "copy", "--files", 2) == 0
    for load, save in ((run, "straight"), (tmp_path / "copy", "resharded")):
        words = f"{TRAIN} --load {load} --save {tmp_path / save} --train-iters 4 --bf16"
        words += " --use-checkpoint-opt_param-scheduler"
        assert pretrain_gpt.main(f"{words} --global-batch-size 3".split()) == 0
    words = ("diff", tmp_path / "straight", tmp_path / "resharded")
    assert tool(*words, "--only", "model.", "optimizer.") == 0


# convert


def test_ckpt_19_layout_and_batch_are_not_inherited(
    imported: Path, pool: Pool, tmp_path: Path, tool: Tool
) -> None:
    """Trained on two stages and two replicas with a batch of 24; goes on alone with one of 5."""
    layout = f"--pipeline-model-parallel-size 2 --global-batch-size 24 --train-iters 1 {TRAIN}"
    words = f"{layout} --load {imported} --save {tmp_path / 'spread'}"
    ended = launch(pool, 4, "pretrain_gpt", *words.split(), folder=tmp_path)
    assert [rank.code for rank in ended] == [0] * 4
    assert tool("convert", "--load", tmp_path / "spread", "--save", tmp_path / "alone") == 0
    with Checkpoint(tmp_path / "alone" / "iter_0000001") as made:
        config = made.facts["config"]
    inherited = {"pipeline_model_parallel_size", "global_batch_size", "micro_batch_size"}
    assert inherited & config.keys() == set() and config["num_layers"] == 2
    words = f"{TRAIN} --load {tmp_path / 'alone'} --global-batch-size 5 --train-iters 2"
    words += " --override-opt_param-scheduler"
    assert pretrain_gpt.main(words.split()) == 0


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


def test_a_tokenizer_beside_the_weights_is_found_and_copied(
    imported: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "llama", vocab_size=40)
    (source / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (source / "tokenizer_config.json").write_text('{"eos_token": "c"}')
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


# Megatron-core's format

MCORE = ROOT / "tests" / "data" / "mcore_trajectories" / "llama" / "dist_ckpt_iter5"


def test_a_checkpoint_of_megatron_core_becomes_ours_and_theirs_again(
    tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("verify", MCORE) == 0
    with pytest.raises(UserError, match="how many are true; give --vocab-size"):
        tool("convert", "--load", MCORE, "--save", tmp_path / "ours")
    with pytest.raises(UserError, match="cannot come from a vocabulary of 129"):
        tool("convert", "--load", MCORE, "--save", tmp_path / "ours", "--vocab-size", 129)
    with pytest.raises(UserError, match="--from megatron: .* is in the format torch_dist"):
        tool("convert", "--load", MCORE, "--save", tmp_path / "ours", "--from", "megatron")
    with pytest.raises(UserError, match="convert reads it"):
        tool("reshard", "--load", MCORE, "--save", tmp_path / "ours")
    words = ("convert", "--load", MCORE, "--save", tmp_path / "ours", "--from", "torch_dist")
    assert tool(*words, "--vocab-size", 128) == 0
    assert tool("verify", tmp_path / "ours") == 0 and tool("diff", MCORE, tmp_path / "ours") == 0
    words = ("convert", "--load", tmp_path / "ours", "--save", tmp_path / "theirs")
    assert tool(*words, "--to", "torch_dist") == 0
    assert tool("diff", MCORE, tmp_path / "theirs") == 0
    assert catalog.read_tracker(tmp_path / "theirs") == 5
    capsys.readouterr()
    assert tool("inspect", tmp_path / "theirs", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "torch_dist"
    assert {part["tensors"] for part in found["parts"].values()} == {15}


def test_a_vocabulary_without_its_padding(tmp_path: Path, tool: Tool) -> None:
    words = ("convert", "--load", MCORE, "--save", tmp_path / "cut", *NULL[:3], 100)
    assert tool(*words) == 0
    with Checkpoint(tmp_path / "cut" / "iter_0000005") as made, Checkpoint(MCORE) as source:
        for name in ("embedding.word_embeddings", "output_layer"):
            rows = made.read(f"model.{name}.weight")
            assert torch.equal(rows, source.read(f"model.{name}.weight")[:101])
        assert made.facts["vocabulary_rows"] == made.facts["vocabulary"] == 101
    assert tool("diff", tmp_path / "cut", MCORE) == 0


def test_a_run_reaches_the_transformers_library_by_way_of_megatron_core(
    run: Path, tmp_path: Path, tool: Tool
) -> None:
    for load, save, to in (
        (run, tmp_path / "mcore", "torch_dist"),
        (tmp_path / "mcore", tmp_path / "by_way", "hf"),
        (run, tmp_path / "straight", "hf"),
    ):
        assert tool("convert", "--load", load, "--save", save, "--to", to) == 0
    for folder in ("by_way", "straight"):
        assert (tmp_path / folder / "config.json").exists()
    assert tool("diff", tmp_path / "straight", tmp_path / "by_way") == 0


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


# memory


MEASURE = """
import resource, sys
from pathlib import Path
from tools import checkpoint
from megatron.core.dist_checkpointing import stream
import torch

big, out = sys.argv[1], sys.argv[2]
shapes = {
    "model.large": stream.Shape("float32", (96, 2**19)),
    "model.wide": stream.Shape("float32", (2, 2**23)),
}

def read(key, box):
    shape = [stop - start for start, stop in box]
    return torch.full(shape, float(box[0][0]))

stream.write(Path(big) / "iter_0000001", shapes, read, {"iteration": 1})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
small = {"model.small": stream.Shape("float32", (8, 8))}
stream.write(Path(out) / "small" / "iter_0000001", small, read, {"iteration": 1})
for words in (["verify", f"{out}/small"], ["diff", f"{out}/small", f"{out}/small"]):
    assert checkpoint.main(words) == 0
before = peak()
assert checkpoint.main(["verify", big]) == 0
assert checkpoint.main(["inspect", big, "--tensor", *shapes]) == 0
words = ["reshard", "--load", big, "--save", f"{out}/copy", "--files", "2", "--params-dtype"]
assert checkpoint.main([*words, "bf16"]) == 0
assert checkpoint.main(["diff", big, f"{out}/copy", "--tolerance", "0.1"]) == 0
print("grew", peak() - before)
"""


def test_memory_stays_far_below_the_checkpoints_size(tmp_path: Path) -> None:
    """256 MiB are verified, summed up, converted and compared."""
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "big"), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grew = int(done.stdout.split("grew")[1])
    assert grew < 120, f"{grew} MiB"


# progress


def test_a_long_job_says_how_far_it_is(
    run: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tools.checkpoint_reading.QUIET", -1.0)
    assert tool("verify", run) == 0
    out, err = capsys.readouterr()
    assert "% | checked " in err and "/s, model." in err and "\r" not in err
    assert out.count("\n") == 1
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert tool("verify", run) == 0
    assert capsys.readouterr().err.startswith("\r\x1b[2K[")
