"""Launch scripts are read as bash would run them, without running anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from megatron.training.shell.launch_command import find
from megatron.training.shell.script import read

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
    "choices": """
NL=32
: "${PP:=$(( NL > 40 ? 8 : 2 ))}" ${VPP:=$((NL>16?PP>1?4:2:1))}
M=1
G=$((M*PP))
torchrun pretrain_gpt.py $PP $VPP $G $((0 ? 1/0 : 5)) $((NL == 32 ? 7 : 9, 3)) $((!NL ? 1 : -1))
""",
    "operators": """
A=6 B=3
torchrun pretrain_gpt.py $((A & B)) $((A | B)) $((A ^ B)) $((~A)) $((-A ** 2)) $((2 ** 3 ** 2)) \\
    $((1 << 4 >> 2)) $((A > B == 1)) $((010 + 0x1F)) $((10#08 + 16#ff)) $((-7 % 3)) $((7 / -2)) \\
    $((1 < 2 < 3)) $((A || 0 && 0)) $((2 ** 64 + 5)) $((9223372036854775807 + 1)) $((A-B-1)) \\
    $((2 ** 999999999)) $((3 ** 999999999)) $((1 + 2 * 3 - (4 - 5) * 6)) $((!A + !!B))
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
    "what the script itself gives to read": """
DATA=$(cat <<'YY'
--data-path $literal "x"
  it's two
YY
)
N=3
read -r -d '' MORE <<YY
    --n $N
    --m \\$N
YY
read A B <<< "one two three"
IFS=, read -ra PARTS <<< "x,y z"
mapfile -t LINES <<< "l 1
l 2"
printf -v SEED -- '--seed %d --name %s%%' 5 "$A"
while read -r key value; do ALL="$ALL --$key $value"; done <<EOT
first 1
second 2 3

EOT
while IFS= read -r line || [ -n "$line" ]; do ROWS+=("$line"); done <<< "  kept
$N"
torchrun pretrain_gpt.py $DATA $MORE "$A" "$B" "${PARTS[@]}" "${LINES[@]}" $SEED $ALL "${ROWS[@]}"
""",
    "functions that print": """
X=outside
mk() { local n=$1; X=inside; shift; printf '%s ' --n "$n"; echo "$@"; }
size() {
    if [ "$1" = big ]; then echo 24; return; fi
    case $1 in small) echo 2 ;; *) echo "?" >&2; echo 7 ;; esac
}
torchrun pretrain_gpt.py $(mk 100 --bf16) "$(mk 1)" $(size big) $(size small) $(size x) \\
    $X ${n:-none} \\
    `echo -n a; echo b` \\
    "$(printf '%s\\n' p q)" $(echo -e 'a\\tb') $(dirname /a/b) $(echo $((1 + 2)))
""",
    "slices and joins": """
A=(--x 1 "two words" last)
f() { local args=("${@:2}"); torchrun pretrain_gpt.py "${args[@]}" "${@:1:1}" ${#args[@]} "$*"; }
f "${A[@]}"
unset 'A[-1]'
OFF=1
torchrun pretrain_gpt.py "${A[@]:0:2}" "${A[@]: -1}" "${A[@]:OFF}" "${A[@]:9}" "${A[*]}" end
bash -c "torchrun pretrain_gpt.py ${A[*]} $1"
J=$(IFS=,; echo "${A[*]}")
torchrun pretrain_gpt.py "$J" "${J: -2}" "${J:0:3}" ${#J}
A[1]=5; A[3]=new
torchrun pretrain_gpt.py "${A[@]}" "${!A[@]}"
""",
    "options": """
while getopts "n:t:vh" opt -v -n4 -t five -hv rest; do
    case $opt in
        \\?) ALL="$ALL wrong" ;;
        n) N=$OPTARG ;;
        t) T=$OPTARG ;;
        h|v) ALL="$ALL $opt" ;;
    esac
done
torchrun pretrain_gpt.py $N $T $ALL $OPTIND
set -- -a 1 -b after
OPTIND=1
while getopts ":a:b" o; do ALL="$ALL $o=$OPTARG"; done
shift $((OPTIND - 1))
torchrun pretrain_gpt.py $ALL "$@"
""",
    "tables": """
declare -A CFG=([hid]=64 ["b c"]=d)
CFG[new]=$((1 + 1))
S=hid
REF=S
declare -A EMPTY
torchrun pretrain_gpt.py ${CFG[hid]} ${CFG[$S]} "${CFG[b c]}" ${CFG[new]} ${#CFG[@]} \\
    ${CFG[none]:-default} ${EMPTY[hid]:-0} ${!REF}
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


def test_a_value_hangs_on_what_decides_it() -> None:
    text = "torchrun a.py $((0 ? N : 3)) $((N && 0)) $((N ? 1 : 2)) $((1 / 0)) $((2 +)) $((N + 1))"
    words = read(text).commands[0].words
    assert words[2:4] == ("3", "0")
    assert words[4:] == ("$((N ? 1 : 2))", "$((1 / 0))", "$((2 +))", "$((N + 1))")


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
        ("A=1\nB=$((" + 5000 * "(" + "1" + 5000 * ")" + "))\n", "line 2: brackets or blocks"),
        ("A=1\n" + 3000 * "if true; then " + "true" + 3000 * "; fi", "line 2: brackets or blocks"),
        ("A=1\nB=" + 400 * "${X:-" + "1" + 400 * "}" + "\n", "line 2: brackets or blocks"),
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
        ("accelerate launch --num_processes 4 pretrain_gpt.py", "accelerate", 4),
        ("accelerate launch pretrain_gpt.py", "accelerate", None),
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


def test_added_flags_stay_behind_a_given_value() -> None:
    text = 'source x.sh\nA="$A --b"\nA+=" --c"\nB=own\nB+=more\npython pretrain_gpt.py $A $B'
    assert words_of(text, A="--a", B="given") == ["--a", "--b", "--c", "given"]


def test_a_loop_over_what_is_not_known_is_followed_once() -> None:
    text = """
while IFS=, read -r host; do
    if grep -q x y; then F=1; fi
    ssh -p 22 $host "torchrun --nproc_per_node 2 pretrain_gpt.py --bf16"
done < hosts
"""
    script = read(text)
    launches = [x for x in (find(c.words) for c in script.commands) if x]
    assert [(x.sizes, x.flags) for x in launches] == [((1, 2), ("--bf16",))]
    assert len(script.notes) == 2
    assert script.notes[1].startswith("line 2: what this loop reads is not known")
    assert script.notes[1].endswith("round; host, F may be given by --set")


@pytest.mark.parametrize(
    "command",
    [
        'sbatch --wrap "torchrun pretrain_gpt.py --b c"',
        "sbatch -N 1 --wrap='torchrun pretrain_gpt.py --b c'",
        "ssh -i key host torchrun pretrain_gpt.py --b c",
        "ssh host 'cd /x && torchrun pretrain_gpt.py --b c'",
    ],
)
def test_commands_for_another_machine_are_launches(command: str) -> None:
    assert words_of(command) == ["--b", "c"]


def test_a_command_is_given_as_it_stands_or_by_its_bare_text() -> None:
    text = "python pretrain_gpt.py $(( $( nproc ) * 2 )) `cat x.txt`"
    assert words_of(text, **{"$(nproc)": "8", "$(cat x.txt)": "--a b"}) == ["16", "--a", "b"]
    assert words_of(text, nproc="8")[0] == "16"
