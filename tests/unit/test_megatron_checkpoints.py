"""Runs of Megatron-core's go on here: logits, losses and norms from its checkpoints.

``dist_ckpt`` of each case holds the initial weights, ``dist_ckpt_iter5`` a whole run after
iteration 5, both written by Megatron-core 0.19.2 (see `test_gpt_trajectories`).
"""

import argparse
import ast
import io
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron.core import rng
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.megatron_formats import common
from megatron.core.dist_checkpointing.megatron_formats.export import export_torch_dist
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import ScheduleConfig
from megatron.core.optimizer.schedule import Schedule, build_schedule
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints.convert import convert
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import Loaded, load_checkpoint
from megatron.training.checkpoints.run import CheckpointedRun
from tests.programs import ROOT
from tests.unit.test_gpt_trajectories import CASES, DATA, Training, config_of, joined

CONTINUED = [name for name in CASES if (DATA / name / "dist_ckpt_iter5").exists()]


def schedule_of(lr: float = 5e-3) -> Schedule:
    config = ScheduleConfig(lr=lr, min_lr=5e-3, lr_decay_style="constant")
    return build_schedule(config, 0.1, train_iters=7)


def load(training: Training, folder: Path, **flags) -> tuple[Loaded, str]:
    """Load a folder into a model of other weights; return what came, and what was said."""
    rng.initialize(training.model, 99)
    facts = RunFacts(
        config={"global_batch_size": 4, "adam_eps": 1e-5},
        schedule=schedule_of(flags.pop("lr", 5e-3)),
        tokenizer="",
        vocabulary=128,
        vocabulary_rows=128,
        objective="tokens" if training.objective.per_token else "microbatches",
    )
    said: list[str] = []
    config = CheckpointConfig(load=str(folder), **flags)
    schedules = ScheduleConfig(lr=5e-3)
    models, mesh = [training.model], training.model.mesh
    run = CheckpointedRun(config, mesh, models, training.optimizer, facts, said.append)
    loaded = load_checkpoint(run, schedules)
    return loaded, "\n".join(said)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_read_as_they_were(name: str) -> None:
    stored = np.load(DATA / name / "init.npz")
    weights = joined({key: torch.from_numpy(stored[key]) for key in stored})
    with Checkpoint(DATA / name / "dist_ckpt") as checkpoint:
        assert set(checkpoint.tensors) == {f"model.{key}" for key in weights}
        for key, weight in weights.items():
            assert torch.equal(checkpoint.read(f"model.{key}"), weight), key
        assert checkpoint.damages() == []


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_loaded_model(name: str) -> None:
    training = Training(name)
    loaded, said = load(training, DATA / name / "dist_ckpt", load_optim=False)
    assert loaded.state.iteration == 0 and loaded.parts == ("weights", "progress")
    assert "in the format torch_dist (Megatron)" in said
    with torch.no_grad():
        logits = training.model(training.batches["tokens"][0, 0])
    expected = torch.from_numpy(np.load(DATA / name / "logits.npz")["logits"])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_goes_on_after_iteration_5(name: str) -> None:
    training = Training(name)
    loaded, said = load(training, DATA / name / "dist_ckpt_iter5")
    assert (loaded.state.iteration, loaded.state.consumed_samples) == (5, 20)
    assert loaded.parts == ("weights", "optimizer", "progress")
    # The flags' schedule, counted in iterations, is the stored one, counted in samples.
    assert loaded.schedule == schedule_of() and "WARNING" not in said
    for record in training.case["after_checkpoint"]:
        training.iterate(record)


def test_a_schedule_that_differs_from_megatrons_needs_a_word() -> None:
    with pytest.raises(UserError, match=r"lr: 0.005 -> 0.008"):
        load(Training("gpt2"), DATA / "gpt2" / "dist_ckpt_iter5", lr=8e-3)


def test_a_checkpoint_without_states_is_not_continued_in_silence() -> None:
    with pytest.raises(CheckpointError, match="without the optimizer's state; give --no-load-opt"):
        load(Training("gpt2"), DATA / "gpt2" / "dist_ckpt")


def stored(folder: Path) -> tuple[Metadata, dict[str, torch.Tensor]]:
    """Return what torch's own reader finds in a folder: metadata, and every tensor."""
    metadata = FileSystemReader(folder).read_metadata()
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return metadata, tensors


@pytest.mark.parametrize("name", CASES)
def test_an_export_equals_what_megatron_wrote(name: str, tmp_path: Path) -> None:
    """Keys, shapes, types and values, the optimizer's too, as torch reads them."""
    whole = DATA / name / "dist_ckpt_iter5"
    source = whole if whole.exists() else DATA / name / "dist_ckpt"
    with Checkpoint(source) as checkpoint:
        export_torch_dist(checkpoint, tmp_path / "iter_0000005")
    before, old = stored(source)
    after, new = stored(tmp_path / "iter_0000005")
    assert set(after.state_dict_metadata) == set(before.state_dict_metadata)
    assert set(new) == set(old)
    for key in old:
        assert new[key].dtype == old[key].dtype and torch.equal(new[key], old[key]), key
    with Checkpoint(source) as first, Checkpoint(tmp_path / "iter_0000005") as second:
        assert second.damages() == []
        for fact in ("iteration", "progress", "parts", "optimizer", "schedule"):
            assert second.facts[fact] == first.facts[fact], fact
        for key in ("adam_beta1", "adam_beta2", "adam_eps"):
            assert second.facts["config"].get(key) == first.facts["config"].get(key)


def test_an_export_says_what_megatrons_loading_asks_for(tmp_path: Path) -> None:
    with Checkpoint(DATA / "gpt2" / "dist_ckpt_iter5") as checkpoint:
        export_torch_dist(checkpoint, tmp_path / "one")
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(tmp_path / "one" / "common.pt", weights_only=True)
    index = FileSystemReader(tmp_path / "one").read_metadata().storage_data
    place = index[MetadataIndex("common_state/shard_0_1")]
    data = (tmp_path / "one" / place.relative_path).read_bytes()[place.offset :][: place.length]
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(io.BytesIO(data), weights_only=True)[0].keys() == common.keys()
    theirs = case_state("gpt2")
    assert common.keys() == theirs.keys() | {"args", "num_floating_point_operations_so_far"}
    assert common["opt_param_scheduler"] == theirs["opt_param_scheduler"]
    assert common["optimizer"]["state"] == theirs["optimizer"]["state"]
    groups = common["optimizer"]["param_groups"]
    for mine, other in zip(groups, theirs["optimizer"]["param_groups"], strict=True):
        assert {key: mine[key] for key in other} == other
    args = common["args"]
    assert (args.consumed_train_samples, args.no_save_optim, args.no_save_rng) == (20, False, True)


def case_state(name: str) -> dict:
    """Return what Megatron-core stored beside tensors, as torch reads it."""
    folder = DATA / name / "dist_ckpt_iter5"
    place = (
        FileSystemReader(folder)
        .read_metadata()
        .storage_data[MetadataIndex("common_state/shard_0_1")]
    )
    data = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
    return torch.load(io.BytesIO(data), weights_only=True)[0]


# Flags


def arguments(flags: str) -> dict[str, Any]:
    """Return the arguments that Megatron-LM makes of a command line, every default among them."""
    rows = (ROOT / "tests" / "data" / "megatron_flags.tsv").read_text().splitlines()[1:]
    args, kinds = {}, {}
    for row in rows:
        flag, _, kind, default = row.split("\t")
        name = flag.removeprefix("--").replace("-", "_")
        if "sets false" in kind:
            name = name.removeprefix("no_").removeprefix("disable_")
            name = {"bias_linear": "add_bias_linear"}.get(name, name)
        kinds[flag] = (name, kind)
        args.setdefault(name, literal(default))
    words = shlex.split(flags)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word in kinds:
            name, kind = kinds[word]
            args[name] = "true" in kind if "switch" in kind else literal(following)
    if args["ffn_hidden_size"] is None:
        args["ffn_hidden_size"] = 4 * args["hidden_size"]
    return args


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@pytest.mark.parametrize("name", CASES)
def test_megatrons_arguments_make_the_same_model(name: str) -> None:
    flags = json.loads((DATA / name / "case.json").read_text())["flags"]
    state = {"args": argparse.Namespace(**arguments(flags)), "iteration": 5}
    stored = common.facts(state, has_states=True)["config"]
    words = "--seq-length 32 --micro-batch-size 2 --train-iters 7 --lr 1e-3 --mock-data"
    words += " --tokenizer-type NullTokenizer --vocab-size 127 --use-checkpoint-args --load there"
    run = parse(words.split(), stored_config=lambda folder, step: stored)
    assert run.config.model.flatten() == config_of(flags).flatten()
    assert run.config.training.calculate_per_token_loss == (name == "gpt2_pertoken")


BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
    "--lr 1e-3 --mock-data --train-iters 2 --dry-run --dry-run-world-size 4"
)


def test_parallel_sizes_come_from_the_checkpoint_when_asked_for() -> None:
    stored = {"num_layers": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}

    def run(*more: str) -> tuple[int, int]:
        words = [*BASE.split(), "--load", "there", "--use-checkpoint-args", *more]
        parallel = parse(words, stored_config=lambda folder, step: stored).config.parallel
        return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size

    assert run() == (1, 1)
    assert run("--use-mp-args-from-checkpoint-args") == (2, 2)
    one = ("--tensor-model-parallel-size", "1")
    assert run("--use-mp-args-from-checkpoint-args", *one) == (1, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ckpt-format torch_dist", "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"),
        ("--ckpt-convert-save out", "--ckpt-convert-save (no --ckpt-convert-format)"),
        ("--use-mp-args-from-checkpoint-args", "(no --use-checkpoint-args)"),
        ("--load-main-params-from-ckpt", "--load-main-params-from-ckpt (no --load)"),
    ],
)
def test_what_a_flag_does_not_do_is_said(words: str, said: str) -> None:
    (note,) = parse([*BASE.split(), *words.split()]).no_effect
    assert note.startswith(words.split()[0]) and said in note


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("--load a --ckpt-convert-format torch --ckpt-convert-save b", "give torch_dist"),
        ("--load a --ckpt-convert-format torch_dist", "--ckpt-convert-save DIR"),
        ("--ckpt-convert-format torch_dist --ckpt-convert-save b", "--load DIR"),
    ],
)
def test_a_conversion_that_cannot_be_is_refused(words: str, way_out: str) -> None:
    with pytest.raises(UserError, match=way_out):
        parse([*BASE.split(), *words.split()])


def test_a_checkpoint_is_not_converted_onto_itself(tmp_path: Path) -> None:
    shutil.copytree(DATA / "gpt2" / "dist_ckpt", tmp_path / "torch_dist" / "iter_0000000")
    config = CheckpointConfig(
        load=str(tmp_path / "torch_dist"),
        ckpt_convert_format="torch_dist",
        ckpt_convert_save=str(tmp_path),
    )
    with pytest.raises(UserError, match="which is to be converted"):
        convert(config, Mesh.serial(), print)


@pytest.mark.parametrize("from_weights", [False, True])
def test_masters_come_from_the_weights_when_asked_for(tmp_path: Path, from_weights: bool) -> None:
    """A checkpoint whose masters are not its weights, as Megatron-LM's would be after surgery."""
    name = "decoder.final_layernorm.weight"
    weights = dict(np.load(DATA / "llama" / "init.npz"))
    state = {key: torch.from_numpy(value) for key, value in weights.items()}
    state |= {f"optimizer.state.fp32_param.{key}": value + 1 for key, value in state.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {key: torch.ones(value.shape) for key, value in weights.items()}
        state |= {f"optimizer.state.{kind}.{key}": value for key, value in moments.items()}
    scheduler = {"num_steps": 20}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    # Where Megatron-core before 0.19 put it.
    torch.save({"iteration": 5, "opt_param_scheduler": scheduler}, tmp_path / "common.pt")
    training = Training("llama")
    load(training, tmp_path, load_main_params_from_ckpt=from_weights)
    found = dict(training.model.named_parameters())[name].detach()
    expected = torch.from_numpy(weights[name]) + (0 if from_weights else 1)
    torch.testing.assert_close(found, expected)
