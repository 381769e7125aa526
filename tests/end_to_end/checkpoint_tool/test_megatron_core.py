"""tools/checkpoint.py convert from and to Megatron-core's format."""

import json
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from tests.end_to_end.checkpoint_tool.words import MCORE, NULL, Tool


def test_a_checkpoint_of_megatron_core_becomes_ours_and_theirs_again(
    tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("verify", MCORE) == 0
    with pytest.raises(UserError, match="how many are true; give --vocab-size"):
        tool("convert", "--load", MCORE, "--save", tmp_path / "ours")
    with pytest.raises(UserError, match="cannot come from a vocabulary of 129"):
        tool("convert", "--load", MCORE, "--save", tmp_path / "ours", "--vocab-size", 129)
    with pytest.raises(UserError, match=r"torch_dist, but --from \(or --loader\) says torch"):
        tool("convert", "--load", MCORE, "--save", tmp_path / "ours", "--from", "torch")
    with pytest.raises(UserError, match="convert reads it"):
        tool("reshard", "--load", MCORE, "--save", tmp_path / "ours")
    words = ("convert", "--load", MCORE, "--save", tmp_path / "ours", "--from", "torch_dist")
    assert tool(*words, "--vocab-size", 128) == 0
    assert tool("verify", tmp_path / "ours") == 0 and tool("diff", MCORE, tmp_path / "ours") == 0
    words = ("convert", "--load", tmp_path / "ours", "--save", tmp_path / "theirs")
    assert tool(*words, "--to", "torch_dist") == 0
    assert tool("diff", MCORE, tmp_path / "theirs") == 0
    assert catalog.read_tracker(tmp_path / "theirs") == 5
    # The old tool's loader reads any format of Megatron's.
    old = f"--loader mcore --saver mcore --load-dir {MCORE} --save-dir {tmp_path / 'old'}"
    assert tool(*old.split(), "--vocab-size", 128) == 0
    assert tool("diff", tmp_path / "ours", tmp_path / "old") == 0
    capsys.readouterr()
    assert tool("inspect", tmp_path / "theirs", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "torch_dist"
    assert {part["tensors"] for part in found["parts"].values()} == {15}


def test_a_vocabulary_without_its_padding(
    tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("convert", "--load", MCORE, "--save", tmp_path / "cut", *NULL[:3], 100)
    assert tool(*words) == 0
    assert "--vocab-size 100 and one more row" in capsys.readouterr().err
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


def test_by_way_of_megatron_core_generators_stay_behind_and_the_schedule_is_the_same(
    run: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-core's schedule counts in samples, and does not say where the warm-up begins."""
    words = ("convert", "--load", run, "--save", tmp_path / "mcore", "--to", "torch_dist")
    assert tool(*words) == 0
    said = "torch_dist has no place for the generators of 1 rank(s): whoever goes on starts"
    assert said in capsys.readouterr().err
    assert tool("convert", "--load", tmp_path / "mcore", "--save", tmp_path / "back") == 0
    for other in ("mcore", "back"):
        capsys.readouterr()
        tool("diff", run, tmp_path / other)
        out = capsys.readouterr().out
        assert "fact schedule" not in out and f"random.00000: only in {run}" in out
        assert "fact parts.random: True and False" in out
        assert "0 different (1 more named" in out and out.endswith(": equal\n")
