"""From words to a run: spelling, precedence, origins, errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.core.config import Config, option, specs
from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun, parse, parse_tool, run_main
from megatron.training.config import RunConfig
from megatron.training.flags import flag_status
from megatron.training.flags.command_line import Vocabulary, read_file

VOCABULARY = Vocabulary(specs(RunConfig), flag_status.load())
ROOT = Path(__file__).resolve().parents[2]
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)


def run(text: str = "", **more: object) -> ParsedRun[RunConfig]:
    return parse(f"{BASE} {text}".split(), **more)  # type: ignore[arg-type]


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        run(text)
    return str(caught.value)


def test_underscores_stand_for_hyphens_and_inside_integers() -> None:
    parsed = run("--train_iters 2_000 --lr_decay_style cosine --global-batch-size=1_0")
    assert parsed.config.training.train_iters == 2000
    assert parsed.config.schedule.lr_decay_style == "cosine"
    assert parsed.config.training.global_batch_size == 10


def test_a_repeated_flag_takes_its_last_value() -> None:
    parsed = run("--hidden-dropout 0.3 --hidden-dropout 0.2 --bf16 --no-bf16")
    assert parsed.config.model.hidden_dropout == 0.2
    assert parsed.config.precision.bf16 is False


@pytest.mark.parametrize("flag", ["--local-rank", "--local_rank", "--local-rank="])
def test_env_05_local_rank_is_accepted(flag: str) -> None:
    assert run(f"{flag}3" if flag.endswith("=") else f"{flag} 3").invocation.local_rank == 3


def test_env_05_a_misspelt_flag_is_refused_with_its_neighbour() -> None:
    message = refused("--hiden-size 3 --exit-intervall 4")
    assert "--hidden-size" in message and "--exit-interval" in message
    assert "\n" not in message


def test_abbreviations_are_unknown() -> None:
    assert "--num-lay" in refused("--num-lay 3")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--lr", "--lr takes one value"),
        ("--lr 1 2", "'2' is unexpected"),
        ("--bf16 yes", "takes no value"),
        ("--rampup-batch-size 1 2", "takes 3 values"),
        ("--train-iters ten", "takes int"),
        ("--optimizer nadam", "adam, sgd"),
        ("--exit-signal SIGNONE", "--exit-signal"),
        ("--exit-duration-in-mins soon", "auto"),
    ],
)
def test_wrong_values_name_the_flag(text: str, part: str) -> None:
    assert part in refused(text)


def test_a_word_before_any_flag_is_refused() -> None:
    with pytest.raises(UserError, match="before any flag"):
        parse(["train", *BASE.split()])


def test_missing_required_flags_are_listed_together() -> None:
    with pytest.raises(UserError) as caught:
        parse([])
    assert "--num-layers" in str(caught.value) and "--micro-batch-size" in str(caught.value)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_flag_beats_a_file_beats_a_default(tmp_path: Path, suffix: str) -> None:
    settings = {
        "language_model": {"hidden_dropout": 0.25, "attention-dropout": 0.5},
        "no_load_optim": True,
        "disable_bias_linear": True,
        "rampup_batch_size": [2, 2, 20],
        "min_lr": "1e-5",
        "eval_interval": None,
    }
    path = tmp_path / f"run.{suffix}"
    path.write_text(json.dumps(settings) if suffix == "json" else yaml.safe_dump(settings))
    flag = "--config" if suffix == "json" else "--yaml-cfg"
    parsed = run(f"{flag} {path} --attention-dropout 0 --global-batch-size 4")
    model = parsed.config.model
    assert (model.hidden_dropout, model.attention.attention_dropout) == (0.25, 0.0)
    assert parsed.config.checkpoint.load_optim is False
    assert model.add_bias_linear is False
    assert parsed.config.training.rampup_batch_size == (2, 2, 20)
    assert parsed.config.schedule.min_lr == 1e-5
    origins = parsed.origins
    assert origins["hidden_dropout"] == "file" and origins["attention_dropout"] == "flag"
    assert origins["eval_interval"] == "default" and origins["kv_channels"] == "derived"


def test_false_in_a_file_undoes_a_negative_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"disable_bias_linear": False, "no_save_rng": False, "bf16": False}))
    config = run(f"--config {path}").config
    assert config.model.add_bias_linear and config.checkpoint.save_rng and not config.precision.bf16


def test_the_table_of_other_flags_holds_for_files_too(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"override_lr_scheduler": True, "data_impl": "mmap", "fp16": False}))
    parsed = run(f"--config {path}")
    assert parsed.config.schedule.override_opt_param_scheduler
    assert "--data-impl mmap" in parsed.no_effect
    path.write_text(json.dumps({"save_tokens_per_expert_interval": 8}))
    assert "--save-tokens-per-expert-interval 8" in refused(f"--config {path}")


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("run.json", "{", "not JSON"),
        ("run.yaml", "a: [", "not YAML"),
        ("run.toml", "", "must end in"),
        ("run.json", "[]", "must hold names and values, not a list"),
        ("run.yaml", "config: other.yaml", "config would name another file, which is not read"),
        ("run.json", '{"yaml-cfg": "other.yaml"}', "yaml-cfg would name another file"),
        (
            "run.yaml",
            "num_layers: 2\nnum-layers: 3",
            "--num-layers 2 and --num-layers 3 are the same setting with different values",
        ),
        ("run.yaml", "a:\n  lr: 1\nlr: 2", "--lr 1 and --lr 2 are the same setting"),
        ("run.yaml", "lr: 1\nlr: 2", "lr stands there twice, with different values: 1 and 2"),
        ("run.json", '{"lr": 1, "lr": 2}', "lr stands there twice"),
        (
            "run.json",
            '{"add_bias_linear": true, "disable_bias_linear": true}',
            "are the same setting with different values",
        ),
        ("run.json", '{"hiden_size": 3}', "--hidden-size"),
        ("run.json", '{"hidden_size": true}', "takes int"),
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, name: str, text: str, part: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert part in refused(f"--config {path}")


def test_an_absent_file_is_named() -> None:
    assert "nowhere.json" in refused("--config nowhere.json")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_dump_gives_the_same_run_again(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"dump.{suffix}"
    options = "--swiglu --window-size 8,0 --exit-signal TERM --no-load-rng --bf16"
    first = run(f"{options} --dump-config {path}")
    content = yaml.safe_load(path.read_text())
    assert content["origins"]["swiglu"] == "flag"
    assert content["config"]["ffn_hidden_size"] == first.config.model.mlp.ffn_hidden_size
    assert parse(["--config", str(path)]).config == first.config
    # What was derived follows a changed flag.
    wider = parse(["--config", str(path), "--hidden-size", "128"]).config
    assert wider.model.attention.kv_channels == 32


def test_a_dry_run_can_be_dumped_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    dry = run(f"--dry-run --dry-run-world-size 8 --dump-config {path}")
    again = parse(["--config", str(path), "--dry-run"])
    assert again.config.process.world_size == dry.config.process.world_size == 8


def test_help_names_configs_flags_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "TrainingConfig" in text and "--eval-iters N" in text and "[default: 100]" in text


@pytest.mark.parametrize("arguments", ["--help", f"{BASE} --dry-run --dry-run-world-size 16"])
def test_help_and_dry_run_do_without_torch(arguments: str) -> None:
    code = (
        "import sys, pretrain_gpt\n"
        "try:\n    pretrain_gpt.main(sys.argv[1:])\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 20


def test_run_main_prints_one_message_for_what_a_user_can_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong() -> int:
        raise UserError("--lr is odd")

    def broken() -> int:
        raise RuntimeError("a bug")

    for main, code in ((wrong, 2), (broken, 1), (lambda: 0, 0), (lambda: 7, 7)):
        with pytest.raises(SystemExit) as caught:
            run_main(main, "pretrain_gpt")
        assert caught.value.code == code
        error = capsys.readouterr().err
        assert ("Traceback" in error) == (code == 1)
        if code == 2:
            assert error == "pretrain_gpt: error: --lr is odd\n"


def test_each_program_has_its_tokenizer() -> None:
    assert run().config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert run(program="other").config.tokenizer.tokenizer_type is None
    named = run("--tokenizer-type NullTokenizer --vocab-size 100")
    assert named.config.tokenizer.tokenizer_type == "NullTokenizer"


def test_the_launcher_gives_the_world_size() -> None:
    assert run(world_size=2).config.data_parallel_size == 2
    dry = run("--dry-run --dry-run-world-size 4", world_size=1)
    assert dry.config.data_parallel_size == 4
    assert dry.config.training.global_batch_size == 8
    assert run("--dry-run", world_size=4).config.data_parallel_size == 4
    dry = run("--dry-run --dry-run-world-size 2", world_size=4)
    assert dry.config.data_parallel_size == 2
    assert "add --dry-run" in _message([*BASE.split(), "--dry-run-world-size", "4"], world_size=1)


def test_a_script_may_pass_the_rank_that_the_launcher_says() -> None:
    plain = run(world_size=4).config
    assert run("--world-size 4 --rank 3 --dist-url tcp://head:1", world_size=4).config == plain
    assert run("--world-size 4 --rank 3 --dry-run").invocation.rank == 3


@pytest.mark.parametrize(
    ("flags", "started", "parts"),
    [
        ("--world-size 4", 1, ("--world-size (4)", "1 process was started", "torchrun", "WORLD_")),
        ("--rank 1", 1, ("--rank (1)", "1 process was started", "torchrun", "RANK")),
        ("--world-size 2", 4, ("--world-size (2)", "4 processes were started")),
        ("--rank 4 --world-size 4", 4, ("--rank (4)", "4 processes were started")),
        ("--rank -1", 1, ("--rank (-1)",)),
    ],
)
def test_a_rank_that_no_launcher_gave_starts_nothing_by_itself(
    flags: str, started: int, parts: tuple[str, ...]
) -> None:
    message = _message([*BASE.split(), *flags.split()], world_size=started)
    assert all(part in message for part in parts), message


def _message(argv: list[str], **more: int) -> str:
    with pytest.raises(UserError) as caught:
        parse(argv, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_query_groups_count_only_with_the_switch() -> None:
    idle = run("--num-query-groups 2")
    assert idle.config.model.attention.num_query_groups == 4
    assert any("--num-query-groups 2" in text for text in idle.no_effect)
    grouped = run("--num-query-groups 2 --group-query-attention")
    assert grouped.config.model.attention.num_query_groups == 2


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "1,2,3,4", "nan,1,1"])
def test_ds_06_bad_splits_are_refused(split: str) -> None:
    words = [*BASE.replace("--mock-data", "--data-path x").split(), f"--split={split}"]
    assert "--split" in _message(words)


@pytest.mark.parametrize("split", ["969, 30, 1", "90,10", "100,0,0"])
def test_ds_06_good_splits_work(split: str) -> None:
    words = [*BASE.replace("--mock-data", "--data-path x").split(), "--split", split]
    assert parse(words).config.data.split == split


class ToolConfig(Config):
    """A tool."""

    prompt: str = option("")
    """Text."""


def test_a_tool_knows_its_own_flags_only() -> None:
    parsed = parse_tool(["--prompt", "hello"], ToolConfig, "tool")
    assert parsed.config.prompt == "hello" and parsed.origins["prompt"] == "flag"
    for other in ("--data-impl", "--local-rank", "--dry-run-memory"):
        with pytest.raises(UserError, match="unknown flag"):
            parse_tool([other, "1"], ToolConfig, "tool")


def test_a_tool_without_a_dry_run_refuses_one() -> None:
    """Else it would really run, which nobody asked for."""
    with pytest.raises(UserError, match="--dry-run.*tool has no dry run"):
        parse_tool(["--dry-run"], ToolConfig, "tool")
    assert parse_tool(["--dry_run"], ToolConfig, "tool", dry_run=True).invocation.dry_run
    assert not parse_tool([], ToolConfig, "tool", dry_run=True).invocation.dry_run


def test_a_dry_run_in_a_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"dry_run": true}')
    parsed = parse_tool(["--config", str(path)], ToolConfig, "tool", dry_run=True)
    assert parsed.invocation.dry_run
    with pytest.raises(UserError, match="no dry run"):
        parse_tool(["--config", str(path)], ToolConfig, "tool")


def test_a_dry_run_that_is_turned_off_excuses_nothing() -> None:
    assert "--fp8-format" in refused("--dry-run --no-dry-run --fp8-format hybrid")


def test_a_tools_help_has_its_own_flags_only(capsys: pytest.CaptureFixture[str]) -> None:
    for dry_run in (False, True):
        with pytest.raises(SystemExit):
            parse_tool(["--help"], ToolConfig, "tool", dry_run=dry_run)
        text = capsys.readouterr().out
        assert "--prompt" in text and "--config" in text and "--local-rank" not in text
        assert ("--dry-run" in text) == dry_run


def test_words_before_the_first_flag_can_belong_to_a_field() -> None:
    parsed = parse_tool(["hello"], ToolConfig, "tool", leading="prompt")
    assert parsed.config.prompt == "hello"
    with pytest.raises(UserError, match="before any flag"):
        parse_tool(["hello"], ToolConfig, "tool")


def test_the_same_value_twice_in_a_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "lr: 0.5\nlr: 0.5\nmodel: &a {num_layers: 2, seed: 1}\nmore: {<<: *a, num-layers: 2}\n"
    )
    given = read_file(str(path), VOCABULARY)
    layers, seed = ("--num-layers", (2,)), ("--seed", (1,))
    assert sorted((item.flag, item.values) for item in given) == [
        ("--lr", (0.5,)),
        *[layers] * 3,
        *[seed] * 2,
    ]


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--hiden-size", "--hidden-size"),
        ("--pipeline-parallel-size", "--pipeline-model-parallel-size"),
        ("--seqlength", "--seq-length"),
        ("--cpu-offloading", "--cpu-offloading-num-layers"),
        ("--no-such-flag", ""),
        ("--frobnicate", ""),
        ("--fancy-new-optimizer", ""),
        ("--use-wombats", ""),
    ],
)
def test_only_spellings_that_are_near_are_named(flag: str, meant: str) -> None:
    text = str(VOCABULARY.unknown([flag]))
    assert meant in text and ("did you mean" in text) == bool(meant)
