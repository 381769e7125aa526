"""What a load refuses or warns of: other tensors, damage, another schedule, other settings."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core import sharding
from megatron.core.config import specs
from megatron.core.dist_checkpointing import format
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.reader import DamagedError
from megatron.core.mesh import Mesh
from megatron.core.optimizer.schedule import Schedule
from megatron.core.sharding import whole
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from megatron.training.checkpoints import settings
from megatron.training.checkpoints.facts import RunFacts, check_rule
from megatron.training.checkpoints.load import load_checkpoint
from megatron.training.checkpoints.save import save_checkpoint
from megatron.training.state import TrainState
from tests.distributed.test_upcycling import config_of, run_of
from tests.unit.checkpoint_runs import NORMAL, Run, equal


def drop(folder: Path, key: str) -> None:
    """Take one tensor out of a checkpoint's index."""
    index = format.read_index(folder)
    del index.tensors[key]
    format.write_index(index, folder / format.INDEX)


def test_ckpt_12_a_missing_weight_stops_the_run(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    drop(tmp_path / "iter_0000002", "model.matrix")
    run = Run(tmp_path, seed=9)
    before = run.weights()
    with pytest.raises(CheckpointError, match="1 tensor.s. missing:\n  model.matrix"):
        run.load()
    assert equal(before, run.weights())
    run = Run(tmp_path, seed=9, dist_ckpt_strictness="log_all").load()
    said = "WARNING: 1 missing tensors, they keep their initial values: model.matrix"
    assert said in run.text
    assert torch.equal(run.weights()["matrix"], before["matrix"])


def test_ckpt_13_a_stray_tensor_stops_the_run(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    folder = tmp_path / "iter_0000002"
    index = format.read_index(folder)
    index.tensors["model.stray"] = replace(index.tensors["model.bias"])
    format.write_index(index, folder / format.INDEX)
    with pytest.raises(CheckpointError, match="1 tensor.s. unexpected:\n  model.stray"):
        Run(tmp_path).load()
    run = Run(tmp_path, dist_ckpt_strictness="log_unexpected").load()
    assert "WARNING: 1 unexpected tensors, they are left out: model.stray" in run.text


def test_another_optimizer_is_refused_with_the_flag_that_helps(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    with pytest.raises(CheckpointError, match=r"(?s)optimizer\.momentum.*--no-load-optim"):
        Run(tmp_path, optimizer="sgd").load()


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            {"optimizer": "adam"},
            {"optimizer": "lion"},
            "--optimizer adam, this run has --optimizer",
        ),
        (
            {"optimizer": "muon", "muon_scalar_optimizer": "adam"},
            {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
            "--muon-scalar-optimizer adam, or --no-load-optim",
        ),
    ],
)
def test_states_of_another_rule_are_refused_by_its_name(
    before: dict[str, str], now: dict[str, str], said: str
) -> None:
    run = RunFacts(
        config=now, schedule=None, tokenizer="", vocabulary=5, vocabulary_rows=5, objective="tokens"
    )
    with pytest.raises(UserError, match=said):
        check_rule({"config": before}, run, Path("save"))
    check_rule({"config": now}, run, Path("save"))
    check_rule({}, run, Path("save"))  # of another program


def test_verify_integrity_finds_a_flipped_bit(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    path = tmp_path / "iter_0000002" / "rank00000.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 64
    path.write_bytes(data)
    Run(tmp_path, verify_integrity=False).load()
    with pytest.raises(DamagedError, match=r"(?s)is damaged.*model\.table.*No other"):
        Run(tmp_path, ckpt_step=2).load()
    with pytest.raises(CheckpointError, match=r"(?s)no complete checkpoint.*is damaged.*model\.ta"):
        Run(tmp_path).load()


def test_a_load_logs_where_from_and_the_hash_of_the_content(tmp_path: Path) -> None:
    saved = Run(tmp_path).train(2)
    saved.save()
    stored = json.loads((tmp_path / "iter_0000002" / format.INDEX).read_text())["hash"]
    run = Run(tmp_path).load()
    assert run.loaded.hash == stored and f"hash {stored}" in run.text
    assert f"hash {stored}" in saved.text
    assert f"successfully loaded checkpoint from {tmp_path} at iteration 2" in run.text


def test_another_schedule_needs_a_word_and_shows_both_curves(tmp_path: Path) -> None:
    Run(tmp_path).train(5).save()
    with pytest.raises(UserError, match=r"lr: 0\.1 -> 0\.2.*--override-opt_param-scheduler"):
        Run(tmp_path, lr=0.2).load()
    for flag, rate in (
        ("override_opt_param_scheduler", 0.2),
        ("use_checkpoint_opt_param_scheduler", 0.1),
    ):
        run = Run(tmp_path, lr=0.2, **{flag: True}).load()
        assert isinstance(run.schedule, Schedule) and run.schedule.lr == rate
        # Iterations 0, 2, 5, 8 and 10, with the old rate and the new one.
        rows = [line for line in run.lines if line.strip()[:1].isdigit()]
        assert len(rows) == 5 and "1.333333e-01" in rows[1] and "6.666667e-02" in rows[1]
    assert Run(tmp_path, lr=0.2, finetune=True).load().schedule.lr == 0.2


@pytest.mark.parametrize(("before", "now", "what"), [(None, 0.3, "drop"), (0.3, None, "give")])
def test_a_stored_schedule_cannot_bring_or_take_away_a_decoupled_rate(
    tmp_path: Path, before: float | None, now: float | None, what: str
) -> None:
    """How parameters are grouped follows from the flags, so the rate would be lost or made up."""
    saved, other = Run(tmp_path), Run(tmp_path, use_checkpoint_opt_param_scheduler=True)
    saved.schedule = replace(saved.schedule, decoupled_lr=before, decoupled_min_lr=0.0)
    saved.train(2).save()
    other.schedule = replace(other.schedule, decoupled_lr=now, decoupled_min_lr=0.0)
    with pytest.raises(UserError, match=f"{what} --decoupled-lr"):
        other.load()


def test_other_shapes_are_said_before_another_schedule(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    run = Run(tmp_path, lr=0.2)
    record = whole((5, 3), NORMAL, matrix=True)
    run.model.matrix = run.model._make(record, (5, 3), torch.float32)
    sharding.name_parameters(run.model)
    with pytest.raises(UserError, match=r"matrix: float32 \[4, 3\], here float32 \[5, 3\]"):
        run.load()


EXPERTS, SHARED = "--num-experts 8", "--moe-shared-expert-intermediate-size 12"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("", EXPERTS, r"--num-experts was absent and is 8 here; .*add --moe-use-upcycling"),
        (EXPERTS, "--num-experts 4", r"--num-experts was 8 and is 4 here; give the checkpoint's"),
        (EXPERTS, "", r"--num-experts was 8 and is absent here"),
        (
            f"{EXPERTS} {SHARED}",
            EXPERTS,
            r"--moe-shared-expert-intermediate-size was 12 and is absent here",
        ),
        ("--swiglu", "", r"--swiglu was True and is False here"),
        ("", "--num-layers 4", r"--num-layers was 3 and is 4 here"),
        ("--ffn-hidden-size 48", "--ffn-hidden-size 24", r"--ffn-hidden-size was 48 and is 24"),
        (
            "--group-query-attention --num-query-groups 2",
            "",
            r"--num-query-groups was 2 and is 4 here",
        ),
    ],
)
def test_weights_that_do_not_fit_are_explained_by_flags_first(
    tmp_path: Path, before: str, now: str, said: str
) -> None:
    saved = run_of(config_of(f"{before} --save {tmp_path}"), Mesh.serial())
    save_checkpoint(saved, TrainState(iteration=2, consumed_samples=8))
    config = config_of(f"{now} --load {tmp_path} --no-load-optim --no-load-rng")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(run_of(config, Mesh.serial()), config.schedule)
    first, *rest = str(caught.value).splitlines()
    assert "is of another model: " in first and re.search(said, first), first
    assert any("tensor(s)" in line for line in rest)


TRAVELS = f"{EXPERTS} {SHARED} --moe-token-dispatcher-type alltoall"
ROTARY = "--position-embedding-type rope"
BALANCE = "--moe-router-load-balancing-type"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (TRAVELS, f"{TRAVELS} --moe-shared-expert-overlap"),
        (f"{TRAVELS} --moe-shared-expert-overlap", TRAVELS),
        (EXPERTS, f"{EXPERTS} --moe-router-fusion --moe-permute-fusion --moe-grouped-gemm"),
        (EXPERTS, f"{EXPERTS} --moe-layer-freq [1]*3"),
        (f"{EXPERTS} --moe-layer-freq [1,0,1]", f"{EXPERTS} --moe-layer-freq 2"),
        (f"{ROTARY} --no-rope-freq 2", f"{ROTARY} --no-rope-freq [0,1,0]"),
        (f"{ROTARY} --no-rope-freq [0]*3", ROTARY),
        (
            "--window-size 4,0 --window-attn-skip-freq [1,0,1]",
            "--window-size 4,0 --window-attn-skip-freq 2",
        ),
        ("--window-size 4,0", "--window-size 4,0 --window-attn-skip-freq [1]*3"),
        (ROTARY, f"{ROTARY} --max-position-embeddings 4096"),
        (EXPERTS, f"{EXPERTS} {BALANCE} seq_aux_loss"),
        (f"{EXPERTS} {BALANCE} global_aux_loss", f"{EXPERTS} {BALANCE} none"),
    ],
)
def test_what_makes_no_other_model_may_change(tmp_path: Path, before: str, now: str) -> None:
    said = _crossing(tmp_path, before, now)
    assert "another model" not in said


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (EXPERTS, f"{EXPERTS} {BALANCE} sinkhorn", "was aux_loss and is sinkhorn here"),
        (f"{EXPERTS} {BALANCE} sinkhorn", EXPERTS, "was sinkhorn and is aux_loss here"),
        (f"{ROTARY} --no-rope-freq 2", f"{ROTARY} --no-rope-freq [1,0,0]", "--no-rope-freq was 2"),
        (ROTARY, f"{ROTARY} --no-rope-freq 3", "--no-rope-freq was absent and is 3 here"),
        (
            "--window-size 4,0 --window-attn-skip-freq [0,1,1]",
            "--window-size 4,0 --window-attn-skip-freq 2",
            "and is 2 here",
        ),
    ],
)
def test_weights_that_mean_something_else_are_refused(
    tmp_path: Path, before: str, now: str, said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        _crossing(tmp_path, before, now)
    with pytest.raises(UserError, match="but the checkpoint has"):
        config_of(f"{now} --load {tmp_path} --use-checkpoint-args {_balance_of(now)}")


def _balance_of(words: str) -> str:
    """Return what says the default kind of balance, where that is what a checkpoint contradicts."""
    return "" if BALANCE in words or EXPERTS not in words else f"{BALANCE} aux_loss"


def _crossing(folder: Path, before: str, now: str) -> str:
    """Save a run with some flags and go on with others; return what was said."""
    saved = run_of(config_of(f"{before} --save {folder}"), Mesh.serial())
    save_checkpoint(saved, TrainState(iteration=2, consumed_samples=8))
    config, lines = config_of(f"{now} --load {folder} --no-load-optim --no-load-rng"), []
    run = replace(run_of(config, Mesh.serial()), say=lines.append)
    load_checkpoint(run, config.schedule)
    return "\n".join(lines)


FIXED = """
num_layers hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
add_qkv_bias qk_layernorm qk_l2_norm window_size window_attn_skip_freq softmax_type
attention_softcap softmax_scale multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim
qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor original_max_position_embeddings
beta_fast beta_slow mscale mscale_all_dim mtp_num_layers ffn_hidden_size swiglu geglu geglu_tanh
quick_geglu relu squared_relu openai_gelu activation_func_clamp_value glu_linear_offset
bias_gelu_fusion num_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size
moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_n_hash_layers normalization
norm_epsilon apply_layernorm_1p position_embedding_type rotary_base rotary_percent
rotary_interleaved yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast
yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int no_rope_freq
relative_attention_num_buckets relative_attention_max_distance decoder_num_layers encoder_alone
sentence_order_head add_bias_linear untie_embeddings_and_output_weights embedding_multiplier
logit_multiplier logit_softcap
"""
"""Settings of a model that weights depend on, by their shapes or by what they mean."""


def test_of_every_setting_of_a_model_it_is_decided_whether_it_may_change() -> None:
    """A new one belongs here, or to `CHANGEABLE` or `IGNORED`: is it the model, or speed only?"""
    assert set(settings.architecture()) == set(FIXED.split())
    known = {*specs(TransformerConfig)}
    assert {*settings.CHANGEABLE, *settings.IGNORED} <= known


def test_what_differs_from_the_checkpoint_is_said(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    same = Run(tmp_path).load()
    assert "settings that differ" not in same.text and "WARNING" not in same.text
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run = Run(tmp_path, lr=0.2, override_opt_param_scheduler=True).load()
    finally:
        torch.set_num_threads(threads)
    assert f"threads {threads} -> {threads + 1}" in run.text
    assert "settings that differ from the checkpoint's: lr 0.1 -> 0.2" in run.lines


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    saved = Run(tmp_path)
    saved.extra = {"num_attention_heads": 4, "moe_grouped_gemm": False, "hidden_dropout": 0.1}
    saved.train(2).save()
    other = {"num_attention_heads": 2, "moe_grouped_gemm": True, "hidden_dropout": 0.0}
    refused = Run(tmp_path, seed=9)
    refused.extra, before = other, refused.weights()
    with pytest.raises(UserError, match=r"--num-attention-heads was 4 and is 2 here\. Give"):
        refused.load()
    assert equal(before, refused.weights())
    for flags in ({"finetune": True}, {"dist_ckpt_strictness": "log_all"}):
        run = Run(tmp_path, seed=9, **flags)
        run.extra = other
        assert equal(run.load().weights(), saved.weights())
    assert "WARNING: " in run.text and "of another model: --num-attention-heads was 4" in run.text
    run = Run(tmp_path, seed=9)
    run.extra = {**other, "num_attention_heads": 4}
    assert equal(run.load().weights(), saved.weights())


def test_settings_that_change_the_order_of_sums_are_warned_of(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.extra = {"ddp_bucket_size": 1000}
    run.train(2).save()
    other = Run(tmp_path)
    other.extra = {"ddp_bucket_size": 2000}
    other.load()
    assert "WARNING: ddp_bucket_size 1000 -> 2000: sums may be rounded in another" in other.text
    assert "settings that differ" not in other.text


ALONE = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "micro_batch_size": 2,
}
TP, SP = "tensor_model_parallel_size 1 -> 2", "sequence_parallel False -> True"


@pytest.mark.parametrize(
    ("changed", "causes"),
    [
        ({"tensor_model_parallel_size": 2}, []),
        ({"sequence_parallel": True}, []),  # without effect on one rank
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, [TP, SP]),
        ({"tensor_model_parallel_size": 2, "attention_dropout": 0.1}, [TP]),
        ({"context_parallel_size": 2}, ["context_parallel_size 1 -> 2"]),
        ({"context_parallel_size": 2, "hidden_dropout": 0.0}, []),
        ({"micro_batch_size": 1}, ["micro_batch_size 2 -> 1"]),
        ({"hidden_dropout": 0.2}, []),
    ],
)
def test_what_changes_dropout_masks_is_warned_of(
    tmp_path: Path, changed: dict[str, object], causes: list[str]
) -> None:
    run, other = Run(tmp_path), Run(tmp_path)
    run.extra = ALONE
    run.train(2).save()
    other.extra = {**ALONE, **changed}
    other.load()
    said = [line for line in other.lines if "draw other masks" in line]
    assert len(said) == bool(causes)
    for line in said:
        assert line.startswith(f"WARNING: {', '.join(causes)}: --hidden-dropout and")


def test_where_a_run_reads_and_writes_is_no_difference(tmp_path: Path) -> None:
    run, other = Run(tmp_path), Run(tmp_path)
    run.extra = {"save": "a", "load": None, "log_interval": 1}
    run.train(2).save()
    other.extra = {"save": "b", "load": "a", "log_interval": 2}
    other.load()
    assert "settings that differ from the checkpoint's: log_interval 1 -> 2" in other.lines
