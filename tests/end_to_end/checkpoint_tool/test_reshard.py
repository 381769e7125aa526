"""tools/checkpoint.py reshard, and convert to this project's own format."""

from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from tests.end_to_end.checkpoint_tool.words import TRAIN, Tool
from tests.harness import Pool
from tests.programs import launch


@pytest.mark.parametrize("files", [1, 3])
def test_a_reshard_holds_the_same_in_few_boxes(
    files: int, run: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    assert tool("reshard", "--load", run, "--save", target, "--files", files) == 0
    assert "no layout needs this" in capsys.readouterr().err
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
    run: Path, tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load", run, "--save", tmp_path, "--params-dtype", "fp32", "--no-optim")
    assert tool("reshard", *words) == 0
    assert "no layout needs this" not in capsys.readouterr().err
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
