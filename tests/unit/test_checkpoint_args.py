"""--use-checkpoint-args: what the checkpoint decides and what a flag may change."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun, parse
from megatron.training.checkpoints import settings, source
from megatron.training.checkpoints.programs import program_of
from megatron.training.config import RunConfig

RUN = "--seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --swiglu "
    "--tokenizer-type NullTokenizer"
)


def stored(text: str = "") -> dict[str, Any]:
    flat = parse(f"{RUN} {MODEL} --vocab-size 50 {text}".split()).config.flatten()
    # As JSON gives it back.
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}


def resume(text: str, checkpoint: dict[str, Any]) -> ParsedRun[RunConfig]:
    words = f"{RUN} --load somewhere --use-checkpoint-args {text}".split()
    return parse(words, stored_config=lambda folder, step: checkpoint)


def test_the_architecture_comes_from_the_checkpoint() -> None:
    run = resume("", stored("--window-size 8,0 --position-embedding-type rope"))
    model = run.config.model
    assert (model.num_layers, model.hidden_size, model.mlp.swiglu) == (3, 64, True)
    assert model.attention.window_size == (8, 0)
    assert run.origins["num_layers"] == run.origins["swiglu"] == "checkpoint"
    assert any("--num-layers 3" in line for line in run.reports)
    assert run.no_effect == ()


def test_the_layout_the_schedule_and_the_data_do_not() -> None:
    run = resume("", stored("--lr 0.5 --min-lr 0.1 --global-batch-size 8 --eod-mask-loss --bf16"))
    assert run.config.schedule.lr == 1e-3 and run.config.schedule.min_lr == 0.0
    assert run.config.training.global_batch_size == 2
    assert not run.config.data.eod_mask_loss and not run.config.precision.bf16


def test_ckpt_18_an_explicit_flag_beats_the_stored_dropout_and_says_so() -> None:
    checkpoint = stored("--hidden-dropout 0.1 --attention-dropout 0.3")
    run = resume("--hidden-dropout 0.0", checkpoint)
    assert run.config.model.hidden_dropout == 0.0
    assert run.origins["hidden_dropout"] == "flag"
    assert any(
        "--hidden-dropout 0.0 (flag)" in line and "checkpoint's 0.1" in line for line in run.reports
    )
    assert run.config.model.attention.attention_dropout == 0.3
    assert run.origins["attention_dropout"] == "checkpoint"


def test_ckpt_18_an_explicit_tokenizer_beats_the_stored_one() -> None:
    checkpoint = stored("--tokenizer-type HuggingFaceTokenizer --tokenizer-model old.json")
    run = resume("--tokenizer-model new.json", checkpoint)
    tokenizer = run.config.tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.tokenizer_model) == (
        "HuggingFaceTokenizer",
        "new.json",
    )
    assert any("new.json (flag)" in line and "old.json" in line for line in run.reports)
    kept = resume("", checkpoint)
    assert kept.config.tokenizer.tokenizer_model == "old.json"
    assert kept.origins["tokenizer_model"] == "checkpoint"


def test_a_tokenizer_of_another_kind_takes_nothing_of_the_stored_one() -> None:
    checkpoint = stored("--tokenizer-type HuggingFaceTokenizer --tokenizer-model old.json")
    run = resume("--vocab-file v.json --merge-file m.txt", checkpoint)
    assert run.config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert run.config.tokenizer.tokenizer_model is None
    none = resume("--no-use-tokenizer-model-from-checkpoint-args", checkpoint)
    assert none.config.tokenizer.tokenizer_model is None


def test_a_contradiction_names_both_values() -> None:
    with pytest.raises(UserError) as caught:
        resume("--num-layers 4 --no-swiglu --rotary-base 500", stored())
    message = str(caught.value)
    assert "--num-layers 4 (flag) but the checkpoint has 3" in message
    assert "--swiglu False" in message and "--rotary-base 500" in message


def test_what_agrees_with_the_checkpoint_is_no_contradiction() -> None:
    checkpoint = stored("--window-size 8,0")
    run = resume("--num-layers 3 --window-size 8,0", checkpoint)
    assert run.origins["num_layers"] == "flag"


def test_a_longer_sequence_is_reported_but_not_past_a_learned_table() -> None:
    checkpoint = stored("--position-embedding-type rope")
    words = f"{RUN} --load x --use-checkpoint-args".replace("--seq-length 32", "--seq-length 64")
    longer = parse(words.split(), stored_config=lambda folder, step: checkpoint)
    assert longer.config.data.seq_length == 64
    assert any("--seq-length 64 (flag)" in line for line in longer.reports)
    with pytest.raises(UserError, match="--max-position-embeddings"):
        parse(words.split(), stored_config=lambda folder, step: stored())


def test_the_objective_is_the_checkpoints() -> None:
    run = resume("", stored("--no-calculate-per-token-loss"))
    assert run.config.training.calculate_per_token_loss is False


def test_the_folder_and_the_iteration_are_passed_on() -> None:
    asked = []

    def reader(folder: str, step: int | None) -> dict[str, Any]:
        asked.append((folder, step))
        return stored()

    parse(f"{RUN} --load here --ckpt-step 7 --use-checkpoint-args".split(), stored_config=reader)
    assert asked == [("here", 7)]


def test_the_checkpoint_of_another_program_is_named() -> None:
    """T5's, BERT's and GPT's models take nothing of one another's settings."""
    more = {"pretrain_gpt": "", "pretrain_bert": "", "pretrain_t5": "--decoder-seq-length 8"}
    configs = {}
    for program, words in more.items():
        run = parse(f"{RUN} {MODEL} --vocab-size 50 {words}".split(), program)
        configs[program] = json.loads(json.dumps(run.config.flatten()))
    for theirs, mine in itertools.permutations(more, 2):
        words = f"{RUN} {more[mine]} --load here --use-checkpoint-args --dry-run"
        with pytest.raises(UserError) as error:
            parse(words.split(), mine, stored_config=lambda *_, one=theirs: configs[one])
        assert f"in here is of {theirs}.py, which trains" in str(error.value)
        assert f"load a checkpoint of {mine}.py, or run {theirs}.py" in str(error.value)
        said = settings.explain(configs[theirs], configs[mine], Path("here"), upcycles=False)
        assert said.startswith(f"here is of {theirs}.py") and said.endswith(f"run {theirs}.py\n")
        with pytest.raises(UserError, match=f"here is of {theirs}.py"):
            settings.check_model(configs[theirs], configs[mine], Path("here"))
    assert program_of({"num_layers": 3}) is None, "settings made elsewhere do not say"


def test_a_folder_is_needed() -> None:
    with pytest.raises(UserError, match="--load"):
        parse(f"{RUN} {MODEL} --use-checkpoint-args".split(), stored_config=lambda f, s: {})


def test_a_first_start_takes_the_pretrained_checkpoint_or_the_flags_alone() -> None:
    words = f"{RUN} --load empty --use-checkpoint-args"
    pretrained = parse(
        f"{words} --pretrained-checkpoint base".split(),
        stored_config=lambda folder, step: stored() if folder == "base" else None,
    )
    assert pretrained.origins["num_layers"] == "checkpoint"
    alone = parse(f"{words} {MODEL}".split(), stored_config=lambda folder, step: None)
    assert alone.config.model.num_layers == 3
    assert any("no checkpoint" in line for line in alone.reports)
    with pytest.raises(UserError, match="--num-layers"):
        parse(words.split(), stored_config=lambda folder, step: None)


def test_the_weight_of_further_tokens_follows_the_flag_and_is_said() -> None:
    checkpoint = stored("--position-embedding-type rope --mtp-num-layers 1")
    run = resume("--mtp-loss-scaling-factor 0.3", checkpoint)
    assert run.config.model.mtp.mtp_loss_scaling_factor == 0.3
    line = "--mtp-loss-scaling-factor 0.3 (flag) replaces the checkpoint's 0.1"
    assert line in run.reports
    kept = resume("", {**checkpoint, "mtp_loss_scaling_factor": 0.7})
    assert kept.config.model.mtp.mtp_loss_scaling_factor == 0.7


def test_a_recovery_checkpoint_in_a_folder_apart_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(folder: str, step: int | None, *, apart: str | None) -> dict[str, object] | None:
        return stored() if (folder, apart) == ("here", "apart") else None

    monkeypatch.setattr(source, "stored_config", of)
    words = f"{RUN} --load here --non-persistent-global-ckpt-dir apart --use-checkpoint-args"
    assert parse(words.split()).config.model.num_layers == 3


def test_work_beside_travelling_tokens_is_the_command_lines() -> None:
    """Else a checkpoint's overlap would refuse the dispatcher that a flag asks for."""
    experts = (
        "--num-experts 4 --moe-shared-expert-intermediate-size 16 "
        "--moe-token-dispatcher-type alltoall"
    )
    checkpoint = stored(f"{experts} --moe-shared-expert-overlap")
    assert checkpoint["moe_shared_expert_overlap"] is True
    moe = resume("--moe-token-dispatcher-type allgather", checkpoint).config.model.moe
    assert moe.moe_shared_expert_intermediate_size == 16
    assert moe.moe_token_dispatcher_type == "allgather" and not moe.moe_shared_expert_overlap
    assert not resume("", checkpoint).config.model.moe.moe_shared_expert_overlap
    again = resume("--moe-shared-expert-overlap", checkpoint).config.model.moe
    assert again.moe_token_dispatcher_type == "alltoall" and again.moe_shared_expert_overlap
