"""tools/checkpoint.py verify, inspect and diff."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.format import INDEX, read_index, write_index
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from tests.end_to_end.checkpoint_tool.words import TRAIN, Tool, flip
from tests.unit.hub_files import (
    LLAMA,
    llama_shapes,
    random_tensors,
)


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
    with pytest.raises(UserError, match=f"has no such tensor; .* inspect {run} lists them"):
        tool("inspect", run, "--tensor", "nothing")
    with pytest.raises(UserError, match="has no such tensor; did you mean model.decoder.final"):
        tool("inspect", run, "--tensor", "decoder.final_layernorm.weights")


def test_a_copy_is_equal_and_one_step_is_not(
    run: Path, copy: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("diff", run, copy) == 0
    assert "57 tensors compared, 0 different: equal" in capsys.readouterr().out
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
    assert "57 tensors compared, 1 different: different" in out


def test_what_only_one_has_is_named(
    run: Path, imported: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("diff", imported, run) == 1
    out = capsys.readouterr().out
    assert f"optimizer.exp_avg.embedding.word_embeddings.weight: only in {run}" in out
    assert "model.embedding.word_embeddings.weight: dtype float32 and bfloat16" in out


def test_a_long_job_says_how_far_it_is(
    run: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron.core.progress.QUIET", -1.0)
    assert tool("verify", run) == 0
    out, err = capsys.readouterr()
    assert "% | checked " in err and "/s, model." in err and "\r" not in err
    assert out.count("\n") == 1
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert tool("verify", run) == 0
    assert capsys.readouterr().err.startswith("\r\x1b[2K[")


def test_diff_lists_a_setting_that_was_given_to_one_run_alone(
    tmp_path: Path, tool: Tool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{TRAIN} --load {run} --save {tmp_path} --train-iters 3 --bf16 --save-keep-last 2 "
    words += "--override-opt_param-scheduler"
    assert pretrain_gpt.main(f"{words} --global-batch-size 3".split()) == 0
    capsys.readouterr()
    assert tool("diff", run, tmp_path) == 1
    assert "fact config.save_keep_last: None and 2" in capsys.readouterr().out


def test_generators_that_one_has_are_named_and_do_not_decide(
    run: Path, copy: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    index = read_index(copy / "iter_0000002")
    index.tensors["random.00001"] = index.tensors["random.00000"]
    write_index(index, copy / "iter_0000002" / INDEX)
    assert tool("diff", run, copy) == 0
    out = capsys.readouterr().out
    assert f"random.00001: only in {copy}" in out
    assert "57 tensors compared, 0 different (1 more named that do not count): equal" in out
    index.tensors["other"] = index.tensors.pop("random.00001")
    write_index(index, copy / "iter_0000002" / INDEX)
    assert tool("diff", run, copy, "--ignore", "random.") == 1
    assert "56 tensors compared, 1 different: different" in capsys.readouterr().out
    assert tool("diff", run, copy, "--ignore", "random.", "other") == 0
    with pytest.raises(UserError, match="--ignore rng: neither has a tensor"):
        tool("diff", run, copy, "--ignore", "rng")


def test_a_tolerance_takes_another_dtype_and_the_count_agrees(
    imported: Path, run: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("diff", imported, run / "iter_0000001", "--only", "model.")
    assert tool(*words, "--tolerance", 0.1) == 0
    out = capsys.readouterr().out
    assert out.count("dtype float32 and bfloat16") == 14
    assert "14 tensors compared, 0 different (14 more named that do not count): equal" in out
    assert tool(*words) == 1
    assert "14 tensors compared, 14 different: different" in capsys.readouterr().out


def test_a_model_of_the_transformers_library_is_converted_before_a_comparison(
    theirs: Path, run: Path, tool: Tool
) -> None:
    for pair in ((theirs, run), (run, theirs)):
        with pytest.raises(UserError, match=f"convert it first: .* --load {theirs} --save FOLDER"):
            tool("diff", *pair)


@pytest.mark.parametrize(
    ("verb", "begins"),
    [("inspect", "inspect [FOLDER ...] [--FLAG"), ("reshard", "reshard [--FLAG")],
)
def test_help_shows_the_verb_and_what_comes_before_flags(
    verb: str, begins: str, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        tool(verb, "--help")
    assert capsys.readouterr().out.startswith(f"usage: checkpoint.py {begins}")
