"""Launch scripts are read as bash would run them, and every flag gets its verdict."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from megatron.training.launch_command import find
from megatron.training.shell_script import read
from tools import explain_launch, launch_coverage

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
BASE = f"{MODEL} --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"

# Scripts whose every value is known: bash itself says what the words are.
KNOWN = {
    "groups of flags in variables": """
GPUS=4
DISTRIBUTED="
    --nproc_per_node $GPUS \\
    --nnodes 1
"
GPT_ARGS=" \\
    --num-layers 24 \\
    --hidden-size $((64 * 16)) \\
    "
torchrun $DISTRIBUTED pretrain_gpt.py $GPT_ARGS --lr 1e-4
""",
    "arrays": """
ARGS=(
    --num-layers 24   # not 48, don't ask
    --data-path "a path with blanks" 'and $another'
    "--fp8-format hybrid"
)
NONE=()
MORE=(--lr 1 "two words")
ARGS+=(--bf16 "${NONE[@]}" "${MORE[@]}")
torchrun pretrain_gpt.py "${ARGS[@]}" --count ${#ARGS[@]} ${ARGS[1]} ${ARGS[*]}
""",
    "defaults and cuts": """
SIZE=${SIZE:-13B}
NAME=run-${SIZE}_${TAG:-none}${OTHER:+-other}
FILE=/data/corpus.json.gz
torchrun pretrain_gpt.py --save ${NAME} ${FILE##*/} ${FILE%.gz} ${FILE%%.*} ${FILE/json/txt} \\
    ${SIZE,,} ${FILE#/data/} ${FILE//a/b} ${#SIZE} ${SIZE:0:2} "${EMPTY-}" "$(basename $FILE .gz)"
""",
    "arithmetic": """
N=4; G=8
W=$((N*G))
((STEPS = 1000 / 3))
let "TWICE = STEPS * 2"
(( STEPS += 1 ))
torchrun pretrain_gpt.py $W $((W % 5)) $((2**10)) $(( (N + G) * 2 - 1 )) $STEPS $TWICE \\
    $((W > 3 && N != 8)) $((-7 / 2)) $(expr $N + 1)
""",
    "conditions": """
TP=2
if [ "$TP" -gt 1 ] && [[ $MODE != slow ]]; then EXTRA="--sequence-parallel"; else EXTRA=wrong; fi
if [ -z "$SOMETHING" ]; then A=unset; elif [ 1 = 1 ]; then A=elif; fi
if [[ ! "$TP" == "3" || -n "" ]]; then B=yes; fi
[ $TP = 2 ] && C=and || C=or
[[ abc == a* ]] && D=glob
case $TP in
    1) E=one ;;
    2|3) E=few
        F=more ;;
    *) E=many ;;
esac
torchrun pretrain_gpt.py $EXTRA $A $B $C $D $E $F
""",
    "loops and functions": """
add() { local x=$1; ALL="$ALL --item $x"; }
for i in 1 2 "three four"; do add "$i"; done
for name in ${LIST}; do ALL=none; done
for ((i = 2; i < 7; i += 2)); do ALL="$ALL $i"; done
n=0
while [ $n -lt 3 ]; do n=$((n + 1)); done
function launch {
    torchrun pretrain_gpt.py "$@" --count $# --first "$1"
}
launch $ALL $n "last one"
""",
    "eval and shells": """
CMD="torchrun pretrain_gpt.py --pp 'type:a|b' \\
    --save \\"some where\\""
eval "$CMD"
bash -c "$CMD --rank \\$((3 + 4))"
eval ${CMD} --third
""",
    "what surrounds a launch": """
set -euo pipefail
export A=1 B="two words"
cat <<EOT > config.json
{ "a": $A, don't }
EOT
# torchrun pretrain_gpt.py --commented
echo torchrun pretrain_gpt.py --echoed > /dev/null
mkdir -p logs && cd logs; { true; }
NCCL=x torchrun pretrain_gpt.py --a "$B" --b=$A 2>&1 | tee log.txt &
wait
torchrun pretrain_gpt.py "it's" 'say "hi"' back\\ slash \\$5 "tab\\\\n" &>> log.txt || exit 1
""",
    "positional": """
DIR=$1; shift
torchrun pretrain_gpt.py $DIR "$@" ${2:-none} $#
set -- x "y z"
torchrun pretrain_gpt.py "$@" $*
""",
}


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """Return a folder with a torchrun that only writes its words down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    launcher = folder / "torchrun"
    launcher.write_text('#!/bin/bash\n{ printf "%s\\0" "$@"; printf "\\n\\0"; } >> "$RECORD"\n')
    launcher.chmod(0o755)
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash says what is right")
@pytest.mark.parametrize("name", KNOWN)
def test_words_are_those_of_bash(name: str, tmp_path: Path, bin_folder: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(KNOWN[name])
    record = tmp_path / "record"
    arguments = ["first", "second one", "third"]
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "RECORD": str(record)}
    subprocess.run(["bash", str(script), *arguments], cwd=tmp_path, env=environment, check=False)
    launches = record.read_bytes().decode().split("\n\0")[:-1]
    expected = sorted(launch.split("\0")[:-1] for launch in launches)
    commands = [list(c.words) for c in read(KNOWN[name], arguments=arguments).commands]
    found = sorted(words[words.index("torchrun") + 1 :] for words in commands if find(words))
    assert expected and found == expected


def words_of(text: str, **given: str) -> list[str]:
    """Return the words after the program of the only launch of a script."""
    (launch,) = [x for x in (find(c.words) for c in read(text, given).commands) if x]
    return list(launch.flags)


def test_what_is_not_known_stays_readable() -> None:
    text = """
OUT=$SCRATCH/run-$1
HOST=$(hostname -s)
N=$((SLURM_NNODES * 8))
python pretrain_gpt.py --save $OUT/x --host "$HOST" --n $N ${UNSET[@]} ${A:-$B} `date +%s`
"""
    expected = "--save $SCRATCH/run-$1/x --host $(hostname -s) --n $((SLURM_NNODES * 8)) $UNSET $B "
    assert " ".join(words_of(text)) == expected + "$(date +%s)"
    assert words_of(text, SLURM_NNODES="2", SCRATCH="/s")[1::4][:2] == ["/s/run-$1/x", "16"]


def test_given_values_win_over_the_scripts_own() -> None:
    text = "N=4\nM=$((N * 2))\npython pretrain_gpt.py $N $M"
    assert words_of(text, N="3") == ["3", "6"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    read(f"touch {marker}\nX=$(touch {marker})\n`touch {marker}`\npython pretrain_gpt.py $X")
    assert not marker.exists()


def test_sourced_files_are_read_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("LAYERS=7\n")
    text = "source env.sh\n. ./absent.sh\npython pretrain_gpt.py --num-layers $LAYERS"
    script = read(text, folder=tmp_path)
    assert script.commands[-1].words[-1] == "7"
    assert script.notes == ["not read: source ./absent.sh"]


def test_branches_that_cannot_be_decided_are_named() -> None:
    text = """
if [ -f "$DIR/x" ]; then LOAD="--load $DIR"; fi
if grep -q y z; then LOAD="--finetune"; fi
if [ -d logs ]; then echo nothing that matters; fi
if [ -n "$WANDB" ]; then LOAD="$LOAD --wandb-project p"; fi
python pretrain_gpt.py $LOAD --bf16
"""
    script = read(text)
    assert script.commands[-1].words[-2:] == ("$LOAD", "--bf16")
    assert script.notes == [
        'line 2: taken as false: [ -f "$DIR/x" ]',
        "line 3: taken as false: grep -q y z",
        "taken as unset in conditions: $WANDB (--set NAME=VALUE says otherwise)",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=1\nB='open\n", "line 2: ' is not closed"),
        ("if true; then\npython pretrain_gpt.py\n", "'elif' or 'else' or 'fi' is missing"),
        ("python pretrain_gpt.py ${A\n", "line 1: { is not closed"),
        ("for x in 1; do echo\n", "'done' or '}' is missing"),
    ],
)
def test_scripts_that_cannot_be_read_say_where(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        read(text)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("command", "launcher", "world"),
    [
        ("python pretrain_gpt.py", "no launcher", 1),
        ("torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py", "torchrun", 16),
        ("torchrun --nproc-per-node=4 pretrain_gpt.py", "torchrun", 4),
        ("torchrun --nnodes 1:4 --nproc_per_node 2 a/pretrain_gpt.py", "torchrun", 8),
        (
            "python -u -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py",
            "torch.distributed.launch",
            8,
        ),
        (
            "srun -N 4 singularity exec img python -m torch.distributed.run --nnodes=4 "
            "--nproc_per_node=2 pretrain_gpt.py",
            "torch.distributed.run",
            8,
        ),
        ("deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py", "deepspeed", 16),
        ("deepspeed --hostfile h pretrain_gpt.py", "deepspeed", None),
        ("mpirun -np 6 python pretrain_gpt.py", "mpirun", 6),
        ("srun -n 12 python pretrain_gpt.py", "srun", 12),
        ("srun -N3 --ntasks-per-node=4 python pretrain_gpt.py", "srun", 12),
        ("srun python pretrain_gpt.py", "srun", None),
        ("msrun --worker_num 8 pretrain_gpt.py", "msrun", 8),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py", "torchrun", None),
        ("python pretrain_gpt.py --rank 0 --world-size 4", "--world-size", 4),
    ],
)
def test_processes_follow_from_the_launcher(command: str, launcher: str, world: int | None) -> None:
    launch = find(command.split())
    assert launch is not None
    assert (launch.launcher, launch.world_size) == (launcher, world)


def test_slurms_variables_follow_from_the_header() -> None:
    text = """#!/bin/bash
#SBATCH --nodes=3   # three
#SBATCH --gres=gpu:a100:4
#SBATCH <your options> -c 16 --exclusive --ntasks-per-node=1
torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE pretrain_gpt.py
"""
    launch = find(read(text).commands[-1].words)
    assert launch is not None and launch.sizes == (3, 4)


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = explain_launch.main(words)
    return code, capsys.readouterr().out


def test_a_launch_that_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE}".split())
    assert code == 0 and "same (8)" in text and "the same results" in text
    assert "10 iterations = 20 samples" in text


def test_verdicts_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--use-flash-attn --DDP-impl local --fp16 --num-experts 8 --no-such-flag 3 --zero-stage 0"
    )
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE} {flags}".split())
    assert code == 1
    assert "refused (2):\n  --fp16\n" in text and "use --bf16" in text
    assert "unknown (1):\n  --no-such-flag 3" in text
    assert "renamed (1):\n  --use-flash-attn\n      -> --attention-backend flash" in text
    assert "there is one implementation of data parallelism" in text
    assert "--zero-stage 0\n      asks for nothing" in text
    assert "left out of this plan: --num-experts 8 (every layer is counted as dense)" in text
    assert "a run would stop at --fp16, --num-experts, --no-such-flag" in text


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
    code, text = explain(capsys, "--", *f"python pretrain_bert.py {BASE}".split())
    assert code == 1 and "pretrain_bert.py is not here" in text


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
        " --glu-activation swiglu --optimizer muon"
    )
    code, text = explain(capsys, "--", *f"python pretrain_gpt.py {BASE} {flags}".split())
    assert code == 1 and "refused (1):\n  --optimizer muon" in text
    for new in (
        "-> --position-embedding-type rope",
        "-> --normalization RMSNorm",
        "-> --group-query-attention --num-query-groups 1",
        "-> --swiglu",
        "--optimizer muon (Adam's states are counted)",
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
        launch("later", {**flags, "--fp16": None}),
        launch("foreign", {**flags, "--deepspeed": None, "--whatever": "1"}),
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
        "launches": 8,
        "every flag has a status and well-formed values": 6,
        "plan": 5,
        "(of these, with no flag that a run refuses)": 4,
        "(of these, with a value put in)": 1,
        "no plan: made for another framework": 1,
        "no plan: its processes cannot hold its layout": 1,
        "no plan: an unknown flag": 1,
        "no plan: a malformed value": 0,
        "no plan: contradicts itself otherwise": 0,
    }
    assert found["tables"]["refused in a run and left out of a plan, by flag"] == {"--fp16": 1}
    assert content["preprocess_data.py"]["counts"]["launches"] == 0


def launch(
    name: str, flags: dict[str, str | None], launcher: dict[str, str] | None = None
) -> dict[str, object]:
    """Return a launch as the file of launches has it."""
    program = {"id": name, "program": "pretrain_gpt.py"}
    return {**program, "flags": flags, "launcher_flags": launcher or {}}
