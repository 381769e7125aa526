"""Every flag of a launch gets its verdict, and what cannot be read is said to be missing."""

from pathlib import Path

import pytest

from megatron.core.utils import UserError
from megatron.training import explain as explain_module
from tools import explain_launch, launch_coverage

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
BASE = f"{MODEL} --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = explain_launch.main(words)
    return code, capsys.readouterr().out


def test_a_launch_that_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE}".split())
    assert code == 0 and "same (8)" in text and "the same results" in text
    assert "10 iterations = 20 samples" in text


def test_verdicts_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--use-flash-attn --DDP-impl local --fp8-format hybrid --mlp-type residual "
        "--no-such-flag 3 --zero-stage 0"
    )
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE} {flags}".split())
    assert code == 1
    assert "refused (2):\n  --fp8-format hybrid\n" in text and "use --bf16" in text
    assert "unknown (1):\n  --no-such-flag 3" in text
    assert "renamed (1):\n  --use-flash-attn\n      -> --attention-backend flash" in text
    assert "there is one implementation of data parallelism" in text
    assert "--zero-stage 0\n      asks for nothing" in text
    assert "left out of this plan: --mlp-type residual (every layer is counted as dense)" in text
    assert "a run would stop at --fp8-format, --mlp-type, --no-such-flag" in text


def test_a_value_that_is_not_built_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8"
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE} {flags}".split())
    assert code == 1 and "refused (1):\n  --exp-avg-dtype fp8\n      is not built" in text
    assert "a run would stop at --exp-avg-dtype" in text


def test_a_script_with_its_own_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"torchrun --nproc_per_node $2 pretrain_gpt.py {BASE} --save $1\n")
    for words in (["/out", "2"], ["--", "/out", "2"]):
        _, text = explain(capsys, str(script), *words)
        assert "1 x 2 = 2 processes (torchrun)" in text and "--save /out" in text


def test_missing_numbers_are_asked_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        f"torchrun --nnodes $NODES pretrain_gpt.py {BASE} --global-batch-size $((GBS * 2)) $MORE\n"
    )
    code, text = explain(capsys, str(script))
    assert code == 2
    assert "--global-batch-size $((GBS * 2)): needs --set GBS=VALUE" in text
    assert "--set NODES=VALUE or --world-size N" in text
    assert "taken as nothing (1):\n  $MORE" in text and "plan of" not in text
    code, text = explain(capsys, str(script), "--set", "GBS=2", "--set", "NODES=1")
    assert code == 0 and "global batch 4" in text


def test_paths_need_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{BASE} --save $OUT/x --tokenizer-model $TOK --rank $RANK --local-rank $LOCAL_RANK"
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {flags}".split())
    assert code == 0 and "--save $OUT/x" in text


def test_a_layout_without_a_launcher_asks_for_the_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"python pretrain_gpt.py {BASE} --tensor-model-parallel-size 2"
    code, text = explain(capsys, "--", *command.split())
    assert code == 2 and "--world-size N" in text
    code, text = explain(capsys, "--world-size", "2", "--", *command.split())
    assert code == 0 and "tensor 2 x" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eod-mask-loss", "--no-calculate-per-token-loss"),
        (
            "--rampup-batch-size 2 2 8 --global-batch-size 4",
            "while the batch ramps up Megatron-LM counts iterations",
        ),
        ("--num-layers 0", "no plan: "),
        ("--lr", "--lr takes one value"),
        ("--seq-length many", "--seq-length takes int, not 'many'"),
    ],
)
def test_what_would_differ_or_stop(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE} {flags}".split())
    assert code == 1 and message in text


def test_a_program_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explain(capsys, "--", *f"python pretrain_ict.py {BASE}".split())
    assert code == 1 and "pretrain_ict.py is not here" in text


def test_an_encoder_alone_is_planned_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = explain(capsys, "--", *f"python pretrain_bert.py {BASE}".split())
    assert "is not here" not in text and "head of masked words" in text
    assert "masks are uneven (--masked-words); add --no-calculate-per-token-loss" in text


def test_preprocessing_is_judged_by_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--input a.jsonl --output-prefix b --tokenizer-type ByteLevelTokenizer --workers 4"
    command = f"python tools/preprocess_data.py {flags} --chunk-size 32 --append-eod"
    code, text = explain(capsys, "--", *command.split())
    assert code == 0 and "no effect (1):\n  --chunk-size 32" in text
    code, text = explain(capsys, "--", *f"{command} --patch-tokenizer-type x".split())
    assert code == 1 and "Pai-Megatron-Patch" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a launch script"),
        (["absent.sh"], "absent.sh: cannot be read"),
        (["--", "echo", "pretrain_gpt.py"], "starts no program"),
        (["--set", "N", "--", "python", "pretrain_gpt.py"], "--set takes NAME=VALUE"),
    ],
)
def test_wrong_use_is_an_error_of_the_user(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        explain_launch.main(words)
    assert message in str(caught.value)


def test_former_values_and_values_that_come_later(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--position-embedding-type rotary --normalization rmsnorm --attention-head-type multiquery"
        " --glu-activation swiglu --optimizer soap"
    )
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE} {flags}".split())
    assert code == 1 and "refused (1):\n  --optimizer soap" in text
    for new in (
        "-> --position-embedding-type rope",
        "-> --normalization RMSNorm",
        "-> --group-query-attention --num-query-groups 1",
        "-> --swiglu",
        "--optimizer soap (Adam's states are counted)",
    ):
        assert new in text


def test_coverage_counts_each_launch_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "--num-layers": "2",
        "--hidden-size": "64",
        "--num-attention-heads": "4",
        "--seq-length": "32",
        "--micro-batch-size": "2",
        "--train-iters": "10",
        "--lr": "1e-3",
        "--mock-data": None,
    }
    launches = [
        launch("plain", flags),
        launch("later", {**flags, "--fp8-format": "hybrid"}),
        launch("foreign", {**flags, "--zero-stage": "1", "--whatever": "1"}),
        launch("engine", {**flags, "--deepspeed": None, "--deepspeed_config": "$FILE"}),
        launch("unknown", {**flags, "--whatever": "1"}),
        launch("variable", {**flags, "--seq-length": "$SEQ $MORE"}),
        launch("glued", {**flags, "--save": "some path &> log", "--lr": "1e-3 --bf16"}),
        launch("small", {**flags, "--tensor-model-parallel-size": "4"}, {"--nproc_per_node": "2"}),
        launch("open", {**flags, "--tensor-model-parallel-size": "4"}, {"--nnodes": "$N"}),
    ]
    path = tmp_path / "launches.jsonl"
    path.write_text("".join(launch_coverage.json.dumps(x) + "\n" for x in launches))
    assert launch_coverage.main([str(path), "--output", str(tmp_path / "counts.json")]) == 0
    capsys.readouterr()
    content = launch_coverage.json.loads((tmp_path / "counts.json").read_text())
    found = content["pretrain_gpt.py"]
    assert found["counts"] == {
        "launches": 9,
        "every flag has a status and well-formed values": 7,
        "plan": 6,
        "(of these, with no flag that a run refuses)": 4,
        "(of these, with a value put in)": 1,
        "no plan: made for another framework": 1,
        "no plan: its processes cannot hold its layout": 1,
        "no plan: an unknown flag": 1,
        "no plan: a malformed value": 0,
        "no plan: contradicts itself otherwise": 0,
    }
    assert found["tables"]["refused in a run and left out of a plan, by flag"] == {
        "--fp8-format": 1,
        "--deepspeed": 1,
        "--deepspeed_config": 1,
    }
    assert list(found["no plan, and why"]) == ["foreign", "unknown", "small"]
    assert "2 processes cannot hold" in found["no plan, and why"]["small"]
    assert content["preprocess_data.py"]["counts"]["launches"] == 0


def test_coverage_of_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-core's own T5 program is today's; a BERT's table says how long its texts are."""
    common = {"--num-layers": "2", "--hidden-size": "64", "--num-attention-heads": "4"}
    common |= {"--micro-batch-size": "2", "--train-iters": "10", "--lr": "1e-3"}
    common |= {"--data-path": "$DATA", "--vocab-file": "vocab.txt"}
    common |= {"--max-position-embeddings": "32"}
    lengths = {"--encoder-seq-length": "32", "--decoder-seq-length": "16"}
    launches = [
        {**launch("core", common | lengths), "program": "pretrain_t5_core.py"},
        {**launch("bert", common), "program": "pretrain_bert.py"},
    ]
    path = tmp_path / "launches.jsonl"
    path.write_text("".join(launch_coverage.json.dumps(x) + "\n" for x in launches))
    assert launch_coverage.main([str(path), "--output", str(tmp_path / "counts.json")]) == 0
    capsys.readouterr()
    content = launch_coverage.json.loads((tmp_path / "counts.json").read_text())
    for program in ("pretrain_bert.py", "pretrain_t5.py"):
        counted = content[program]["counts"]
        assert (counted["launches"], counted["plan"]) == (1, 1), content[program]


def launch(
    name: str, flags: dict[str, str | None], launcher: dict[str, str] | None = None
) -> dict[str, object]:
    """Return a launch as the file of launches has it."""
    program = {"id": name, "program": "pretrain_gpt.py"}
    return {**program, "flags": flags, "launcher_flags": launcher or {}}


def explain_script(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """Explain a script in which ``BASE`` stands for the flags of a small run."""
    script = tmp_path / "job.sh"
    script.write_text(text.replace("BASE", BASE))
    return explain(capsys, str(script), *words)


@pytest.mark.parametrize(
    ("text", "give"),
    [
        ("EXTRA=$(get_flags)\npython pretrain_gpt.py BASE $EXTRA", "EXTRA"),
        ("python pretrain_gpt.py BASE $(cat flags.txt)", "$(cat flags.txt)"),
        ("X=$(a); X=$(b)\npython pretrain_gpt.py BASE $X", "$(b)"),
        ("mk() { other; }\npython pretrain_gpt.py BASE $(mk 100)", "$(mk 100)"),
        ("mk() { [ -f x ] && echo y; }\npython pretrain_gpt.py BASE $(mk)", "$(mk)"),
        ("mk() { echo y | tr y z; }\npython pretrain_gpt.py BASE $(mk)", "$(mk)"),
        ("mapfile -t A < flags.txt\npython pretrain_gpt.py BASE ${A[@]}", "A"),
        ('mapfile -t A < <(ls)\npython pretrain_gpt.py BASE "${A[@]}"', "A"),
        ("read -p 'More? ' B\npython pretrain_gpt.py BASE $B", "B"),
        ("source unknown_env.sh\npython pretrain_gpt.py BASE $FROM_FILE", "FROM_FILE"),
        ("source x.sh\npython pretrain_gpt.py BASE ${FROM_FILE:-}", "FROM_FILE"),
        ('source x.sh\nA="$A --bf16"\npython pretrain_gpt.py BASE $A', "A"),
        ('eval "$(settings)"\npython pretrain_gpt.py BASE $FROM_COMMAND', "FROM_COMMAND"),
        ("if [ -f x ]; then F=--bf16; fi\npython pretrain_gpt.py BASE $F", "F"),
        ("case $(uname) in x) F=1;; esac\npython pretrain_gpt.py BASE $F", "F"),
        ("python pretrain_gpt.py BASE --cp-comm-type p2p $(cat flags.txt)", "$(cat flags.txt)"),
        (
            'while read -r x; do F="$F $x"; done < flags.txt\npython pretrain_gpt.py BASE $F',
            "F",
        ),
        (
            "while getopts a: o $(args); do F=$OPTARG; done\npython pretrain_gpt.py BASE $F",
            "F",
        ),
        ("printf -v F '%q' x\npython pretrain_gpt.py BASE $F", "F"),
        (
            "python pretrain_gpt.py BASE --micro-batch-size $(( $(nproc) * 1 ))",
            "$(nproc)",
        ),
    ],
)
def test_flags_that_cannot_be_read_are_missing_until_they_are_given(
    text: str, give: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = explain_script(text, tmp_path, capsys)
    quoted = f"'{give}=VALUE'" if give.startswith("$(") else f"{give}=VALUE"
    assert code == 2 and f"needs --set {quoted}" in said
    value = "2" if "nproc" in give else "--weight-decay 0.25"
    code, said = explain_script(text, tmp_path, capsys, "--set", f"{give}={value}")
    assert code == 0 and f"{'micro-batch-size' if value == '2' else ''} {value}" in said


def test_nothing_is_what_nothing_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'A="$A --bf16"\npython pretrain_gpt.py BASE $A $MORE ${OTHER} "$@"'
    code, said = explain_script(text, tmp_path, capsys)
    assert code == 0 and "--bf16" in said and "taken as nothing (2)" in said


def test_a_launch_that_is_not_understood_is_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "python pretrain_gpt.py BASE\nscreen -X stuff 'python pretrain_gpt.py --bf16'\n"
    code, said = explain_script(text, tmp_path, capsys)
    assert code == 0 and "note: line 2: not read as a launch: screen -X stuff" in said


def test_no_processes_are_refused() -> None:
    with pytest.raises(UserError, match=r"--world-size \(0\) must be at least 1"):
        explain_launch.main(["--world-size", "0", "--", "python", "pretrain_gpt.py"])


def test_a_flag_of_many_values_may_have_none() -> None:
    assert not explain_module._is_trailing([], {})
