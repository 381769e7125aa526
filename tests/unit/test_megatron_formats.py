"""Formats of Megatron-LM, written here as it writes them: ranks, flat shares, padding, attacks."""

import argparse
import pickle
import random
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.detect import format_of, open_index
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.load import load
from megatron.core.dist_checkpointing.megatron_formats import common, export, names, unpickling
from megatron.core.dist_checkpointing.plan import Piece
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.sharding import Box
from tests.unit.checkpoint_files import WORLD, item, whole_items, write

H, F, LAYERS, VOCABULARY, HEADS = 8, 12, 4, 24, 4
Tensors = dict[str, torch.Tensor]


def model(layers: int = LAYERS) -> Tensors:
    """Return weights of a gated model under Megatron-core's names, every value another one."""
    shapes = {"embedding.word_embeddings.weight": (VOCABULARY, H), "output_layer.weight": (24, H)}
    for layer in range(layers):
        rest = {
            "self_attention.linear_qkv.layer_norm_weight": (H,),
            "self_attention.linear_qkv.weight": (2 * H, H),
            "self_attention.linear_qkv.bias": (2 * H,),
            "self_attention.linear_proj.weight": (H, H),
            "self_attention.linear_proj.bias": (H,),
            "mlp.linear_fc1.layer_norm_weight": (H,),
            "mlp.linear_fc1.weight": (2 * F, H),
            "mlp.linear_fc2.weight": (H, F),
        }
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in rest.items()}
    shapes["decoder.final_layernorm.weight"] = (H,)
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def part(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what Megatron's tensor-parallel rank holds of a weight."""
    if "linear_fc1.weight" in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
        return tensor.chunk(ranks)[rank].clone()
    if "embedding" in name or "output_layer" in name:
        return tensor.chunk(ranks)[rank].clone()
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        return tensor.chunk(ranks, dim=1)[rank].contiguous()
    return tensor


def save_legacy(
    folder: Path, weights: Tensors, ranks: int, stages: int, *, layers: int = LAYERS, **args: Any
) -> None:
    """Write the files of every rank, layers numbered from 0 in each stage."""
    here = layers // stages
    for stage in range(stages):
        for rank in range(ranks):
            held = {}
            for name, tensor in weights.items():
                words = name.split(".")
                if words[1] == "layers":
                    if int(words[2]) // here != stage:
                        continue
                    words[2] = str(int(words[2]) % here)
                elif stage != (0 if name.startswith("embedding") else stages - 1):
                    continue
                held[".".join(words)] = part(name, tensor, rank, ranks)
            suffix = f"_{stage:03d}" if stages > 1 else ""
            path = folder / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            state = {
                "args": argparse.Namespace(consumed_train_samples=40, **args),
                "checkpoint_version": 3.0,
                "iteration": 10,
                "model": held,
                "rng_state": [
                    {
                        "np_rng_state": np.random.get_state(),
                        "random_rng_state": random.getstate(),
                        "torch_rng_state": torch.get_rng_state(),
                    }
                ],
            }
            torch.save(state, path)


def ours(name: str) -> str:
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return "model." + name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def check_equal(folder: Path, weights: Tensors) -> None:
    with Checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == {ours(name) for name in weights}
        for name, tensor in weights.items():
            assert torch.equal(checkpoint.read(ours(name)), tensor), name
            # Any box, through parts of several ranks.
            box = tuple((size // 3, size - size // 4) for size in tensor.shape)
            found = torch.empty([stop - start for start, stop in box], dtype=torch.float64)
            checkpoint.fill(ours(name), Piece(box, found))
            assert torch.equal(found, tensor[tuple(slice(*extent) for extent in box)].double())
        assert checkpoint.damages() == []


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_legacy_ranks_are_joined(tmp_path: Path, ranks: int, stages: int) -> None:
    weights = model()
    save_legacy(tmp_path / "iter", weights, ranks, stages, untie_embeddings_and_output_weights=True)
    assert format_of(tmp_path / "iter") == "torch"
    check_equal(tmp_path / "iter", weights)
    facts = open_index(tmp_path / "iter").facts
    assert facts["progress"]["consumed_samples"] == 40 and not facts["parts"]["optimizer"]


def test_the_last_stages_copy_of_a_tied_embedding_is_left_out(tmp_path: Path) -> None:
    tied = model()
    tied["output_layer.weight"] = tied["embedding.word_embeddings.weight"]
    save_legacy(tmp_path, tied, 1, 2, untie_embeddings_and_output_weights=False)
    del tied["output_layer.weight"]
    check_equal(tmp_path, tied)


def test_names_of_models_before_megatron_core(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    layer = {
        "layers.0.input_norm.weight": torch.ones(H),
        "layers.0.self_attention.query_key_value.weight": torch.randn(3 * H, H),
        "layers.0.self_attention.dense.weight": torch.randn(H, H),
        "layers.0.post_attention_layernorm.weight": torch.ones(H),
        "layers.0.mlp.dense_h_to_4h.weight": torch.randn(F, H),
        "layers.0.mlp.dense_4h_to_h.weight": torch.randn(H, F),
        "final_layernorm.bias": torch.zeros(H),
    }
    embedding = {"word_embeddings": {"weight": torch.randn(VOCABULARY, H)}}
    state = {"language_model": {"embedding": embedding, "encoder": layer}}
    torch.save({"checkpoint_version": 3.0, "iteration": 1, "model": state}, path)
    assert set(open_index(tmp_path).tensors) == {
        "model.embedding.word_embeddings.weight",
        "model.decoder.layers.0.input_layernorm.weight",
        "model.decoder.layers.0.self_attention.linear_qkv.weight",
        "model.decoder.layers.0.self_attention.linear_proj.weight",
        "model.decoder.layers.0.pre_mlp_layernorm.weight",
        "model.decoder.layers.0.mlp.linear_fc1.weight",
        "model.decoder.layers.0.mlp.linear_fc2.weight",
        "model.decoder.final_layernorm.bias",
    }


def test_legacy_files_that_do_not_make_a_model_are_refused(tmp_path: Path) -> None:
    save_legacy(tmp_path / "a", model(), 2, 2)
    (tmp_path / "a" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks the file of tensor-parallel rank 1, pipeline"):
        open_index(tmp_path / "a")
    path = tmp_path / "b" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"model": {}, "checkpoint_version": 1.0}, path)
    with pytest.raises(CheckpointError, match="version 1, whose queries, keys and values"):
        open_index(tmp_path / "b")


def save_dcp(folder: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("__0_0.distcp", r"has no \.metadata: the save of it never finished"),
        ("decoder.weight/.zarray", "is in the format zarr"),
        ("mp_rank_00_000_001/model_optim_rng.pt", "experts in the format torch"),
    ],
)
def test_what_cannot_be_read_is_called_by_its_name(tmp_path: Path, file: str, said: str) -> None:
    path = tmp_path / "iter_0000001" / file
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(CheckpointError, match=said):
        open_index(tmp_path / "iter_0000001")
    (reason,) = catalog.scan(tmp_path).ignored.values()
    assert re.search(said, reason)


def test_torch_dcp_gives_weights(tmp_path: Path) -> None:
    weights = model()
    save_dcp(tmp_path, {**{f"model.{k}": v for k, v in weights.items()}, "iteration": 3})
    check_equal(tmp_path, weights)
    assert open_index(tmp_path).facts["iteration"] == 3


def test_flat_ranges_of_each_ranks_part_become_states(tmp_path: Path) -> None:
    """Parts of 2 tensor-parallel ranks, each flat (replicas' ranges are chunks of it)."""
    name = "decoder.layers.self_attention.linear_proj.weight"
    weight, state = torch.randn(3, H, H), torch.randn(3, H, H)
    flat = state.reshape(3, 1, H, 2, H // 2).permute(0, 1, 3, 2, 4).reshape(3, 1, 2, H * H // 2)
    save_dcp(tmp_path, {name: weight, f"optimizer.state.exp_avg.{name}": flat})
    with Checkpoint(tmp_path) as checkpoint:
        for layer in range(3):
            key = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
            assert torch.equal(checkpoint.read(f"model.{key}"), weight[layer])
            assert torch.equal(checkpoint.read(f"optimizer.exp_avg.{key}"), state[layer])


def test_buckets_of_a_layout_are_not_taken_for_states(tmp_path: Path) -> None:
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32).bucket_0.exp_avg"
    save_dcp(tmp_path, {"decoder.final_layernorm.weight": torch.ones(H), key: torch.ones(64)})
    index = open_index(tmp_path)
    assert list(index.tensors) == ["model.decoder.final_layernorm.weight"]
    assert "--dist-ckpt-optim-fully-reshardable" in index.facts["parts"]["why"]


@pytest.mark.parametrize(("rows", "fits"), [(24, True), (17, True), (16, False), (25, False)])
def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path: Path, rows: int, fits: bool) -> None:
    weights = model()
    save_legacy(
        tmp_path, weights, 2, 1, make_vocab_size_divisible_by=4, tensor_model_parallel_size=2
    )
    name = "embedding.word_embeddings.weight"
    here = torch.zeros(rows, H)
    wanted = item(f"model.{name}", here)
    with Checkpoint(tmp_path) as checkpoint:
        if not fits:
            with pytest.raises(CheckpointError, match="of another shape"):
                load([wanted], checkpoint, WORLD, strictness="log_all")
            return
        load([wanted], checkpoint, WORLD, strictness="log_all")
    assert torch.equal(here, weights[name][:rows])


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    weights = model()
    save_dcp(tmp_path, dict(weights))
    index = open_index(tmp_path)
    box = index.tensors["model.decoder.final_layernorm.weight"].boxes[0]
    with open(tmp_path / box.file, "r+b") as file:
        file.seek(box.offset)
        byte = file.read(1)
        file.seek(box.offset)
        file.write(bytes([byte[0] ^ 1]))
    with Checkpoint(tmp_path) as checkpoint:
        (damage,) = checkpoint.damages()
    assert damage.startswith("decoder.final_layernorm.weight") and "checksum" in damage


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("open('attacked', 'w')",)


@pytest.mark.parametrize("place", [".metadata", "mp_rank_00/model_optim_rng.pt", "common.pt"])
def test_what_a_pickle_names_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "iter" / place
    path.parent.mkdir(parents=True)
    if place == ".metadata":
        path.write_bytes(pickle.dumps(Attack()))
    else:
        if place == "common.pt":
            save_dcp(tmp_path / "iter", {"decoder.final_layernorm.weight": torch.ones(2)})
        torch.save({"model": {}, "args": Attack()}, path)
    with pytest.raises(CheckpointError, match=r"names (builtins|__builtin__)\.eval"):
        open_index(tmp_path / "iter")
    assert not (tmp_path / "attacked").exists()


def test_objects_of_classes_that_are_not_here_do_nothing() -> None:
    text = b"cmegatron.core.transformer.enums\nAttnBackend\n(I5\ntR."
    value = unpickling.unpickle(text, "here")
    assert isinstance(value, unpickling.Inert) and unpickling.plain(value) == 5
    for name in (b"cos\nsystem\n", b"cbuiltins\ngetattr\n", b"ctorch\nload\n", b"cposix\nsystem\n"):
        with pytest.raises(CheckpointError, match="not in the list"):
            unpickling.unpickle(name + b"(tR.", "here")


@pytest.mark.parametrize("name", sorted(unpickling._ALLOWED))
def test_a_pickle_changes_nothing_of_what_it_names(name: str) -> None:
    """The opcode BUILD, with a state for slots, sets attributes of whatever stands before it."""
    module, _, attribute = name.rpartition(".")
    text = f"c{module}\n{attribute}\n(N(dVmark\nI1\nstb.".encode()
    with pytest.raises(CheckpointError, match="cannot be unpickled"):
        unpickling.unpickle(text, "here")
    assert not hasattr(unpickling._ALLOWED[name], "mark")


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_whatever_bits_are_flipped_it_is_said_as_damage(tmp_path: Path, kind: str) -> None:
    if kind == "torch_dist":
        save_dcp(tmp_path, dict(model()))
        path = tmp_path / ".metadata"
    else:
        save_legacy(tmp_path, model(), 1, 1)
        path = next(tmp_path.glob("mp_rank_*/*.pt"))
    whole, draw, refused = path.read_bytes(), random.Random(7), 0
    # The pickle, not the tensors behind it.
    end = len(whole) if kind == "torch_dist" else whole.index(b"PK\x03\x04", 4)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[draw.randrange(end)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            open_index(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_shared_expert_glu_interleave_size", 32),
        ("moe_apply_probs_on_input", True),
        ("apply_residual_connection_post_layernorm", True),
        ("use_mup", True),
    ],
)
def test_weights_that_mean_something_else_are_refused(name: str, value: int) -> None:
    state = {"args": argparse.Namespace(num_layers=2, **{name: value}), "iteration": 8}
    with pytest.raises(CheckpointError, match=f"--{name.replace('_', '-')} {value}"):
        common.facts(state, has_states=False)
    unset = {"args": argparse.Namespace(num_layers=2, **{name: type(value)(0) or None})}
    assert common.facts(unset, has_states=False)["config"]["num_layers"] == 2


def test_arguments_become_settings() -> None:
    args = argparse.Namespace(
        num_layers=2,
        num_query_groups=1,
        group_query_attention=False,
        params_dtype=torch.bfloat16,
        calculate_per_token_loss=False,
        consumed_train_samples=64,
        attention_backend=unpickling.Inert(5),
        rampup_batch_size=None,
    )
    scale = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}
    groups = [{"betas": (0.9, 0.95), "eps": 1e-6, "step": 8}]
    optimizer = {"optimizer": {"param_groups": groups}, "grad_scaler": scale}
    state = {"args": args, "iteration": 8, "optimizer": optimizer}
    facts = common.facts(state, has_states=True)
    assert facts["config"] == {
        "num_layers": 2,
        "group_query_attention": False,
        "params_dtype": "bfloat16",
        "calculate_per_token_loss": False,
        "consumed_train_samples": 64,
        "attention_backend": 5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-6,
    }
    assert facts["objective"] == "microbatches"
    assert facts["optimizer"] == {
        "step": 8,
        "loss_scale": {"scale": 1024.0, "steps": 3, "overflows_left": 2},
    }
    assert common.facts({"iteration": 8}, has_states=False)["progress"] is None


def test_retention_leaves_other_programs_checkpoints_alone(tmp_path: Path) -> None:
    save_dcp(tmp_path / "iter_0000001", model())
    for iteration in (2, 3):
        ranks = [whole_items(0, 1, saving=True)]
        write(tmp_path / f"iter_{iteration:07d}", ranks, {"iteration": iteration})
    catalog.write_tracker(tmp_path, 3)
    assert [path.name for path in catalog.prune(tmp_path, 1, None)] == ["iter_0000002"]
    assert (tmp_path / "iter_0000001").exists()


def test_an_export_holds_one_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are cut between rows, and no piece outlives its turn."""
    weights, limit = model(), 3 * H * 4
    save_dcp(tmp_path / "in", dict(weights))
    monkeypatch.setattr(export, "LARGEST", limit)
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched(Checkpoint):
        def read(self, key: str, box: Box | None = None) -> torch.Tensor:
            assert all(piece() is None for piece in alive[:-1])
            tensor = super().read(key, box)
            assert tensor.nbytes <= max(limit, tensor[:1].nbytes)
            alive.append(weakref.ref(tensor))
            return tensor

    with Watched(tmp_path / "in") as checkpoint:
        export.export_torch_dist(checkpoint, tmp_path / "out")
    assert len(alive) > 2 * len(weights)
    check_equal(tmp_path / "out", weights)


def test_latents_of_experts_have_megatrons_names() -> None:
    """Those of its `MoELayer`, with the entries that stand beside linear layers."""
    for which in ("fc1", "fc2"):
        ours, theirs = (f"decoder.layers.{n}mlp.{which}_latent_proj.weight" for n in ("3.", ""))
        assert names.to_megatron(ours, {ours}) == (theirs, 3)
        assert names.to_ours(theirs, 3) == ours
        assert names.LINEARS.search(theirs)


def test_layers_that_differ_cannot_be_exported(tmp_path: Path) -> None:
    weights = model(2)
    weights["decoder.layers.1.mlp.linear_fc2.weight"] = torch.ones(H, F + 1)
    save_dcp(tmp_path / "in", weights)
    with (
        Checkpoint(tmp_path / "in") as checkpoint,
        pytest.raises(CheckpointError, match=r"linear_fc2\.weight is not alike in all layers"),
    ):
        export.export_torch_dist(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
