"""The examples' scripts: each is run, and plans its layout; how a Slurm job goes on after a run.

What a script would start is seen by an interpreter of the test's own (`PYTHON`), Slurm's commands
are played by small scripts; the plans are made by the real program.
"""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.example_scripts import ROOT, run_script, write_recorder

# tests/distributed/test_moe_examples.py and test_encoder_examples.py have the tiny ones.
SCRIPTS = {
    str(path.relative_to(ROOT / "examples"))
    for path in ROOT.glob("examples/*/*.sh")
    if path.name != "tiny.sh"
}


def gpt_size(layers: int, hidden: int, positions: int) -> int:
    """Return the parameters of a GPT-2 as its papers count them: 12 L H^2 and the small change."""
    layer = 12 * hidden**2 + 13 * hidden
    return layers * layer + (50257 + positions) * hidden + 2 * hidden


# Parameters (of all but GPT-3: those of the published weights), ranks by axis, tokens of a batch.
PLANS = {
    "gpt3/345m.sh": (gpt_size(24, 1024, 1024), {"data": 8}, 512 * 1024),
    "gpt3/175b.sh": (
        gpt_size(96, 12288, 2048),
        {"tensor": 8, "pipeline": 8, "data": 16},
        1536 * 2048,
    ),
    # With BERT's 30,522 pieces, and two that are added.
    "bert/336m.sh": (336_228_158, {"data": 8}, 1024 * 512),
    "bert/3.9b.sh": (3_869_086_526, {"tensor": 2, "data": 32}, 1024 * 512),
    "t5/220m.sh": (222_903_552, {"data": 8}, 128 * 512),
    "t5/11b.sh": (11_307_321_344, {"tensor": 8, "data": 16}, 2048 * 512),
    "llama3/8b.sh": (8_030_261_248, {"tensor": 4, "data": 2}, 4 * 2**20),
    "llama3/70b.sh": (70_553_706_496, {"tensor": 8, "pipeline": 4, "data": 16}, 4 * 2**20),
    "llama3/405b.sh": (
        405_853_388_800,
        {"tensor": 8, "pipeline": 16, "context": 8, "data": 16},
        16 * 2**20,
    ),
    "mixtral/8x7b.sh": (
        46_702_792_704,
        {"context": 8, "pipeline": 2, "data": 4, "expert": 8},
        4 * 2**20,
    ),
    "mixtral/8x22b.sh": (
        140_620_634_112,
        {"tensor": 2, "context": 4, "pipeline": 4, "data": 8, "expert": 8},
        4 * 2**20,
    ),
    "qwen3_moe/30b-a3b.sh": (30_532_122_624, {"data": 8, "expert": 8}, 4 * 2**20),
    "qwen3_moe/235b-a22b.sh": (
        235_093_634_560,
        {"tensor": 4, "pipeline": 4, "data": 16, "expert": 16},
        4 * 2**20,
    ),
}
SEQUENCES = {
    "gpt3/345m.sh": 1024,
    "gpt3/175b.sh": 2048,
    "llama3": 8192,
    "mixtral": 32768,
    "qwen3_moe": 4096,
    "bert": 512,
    "t5": 512,
}
"""Tokens of a sample, by script or folder."""
PUBLISHED = {
    "mixtral/8x7b.sh": (46.7, 12.9),
    "mixtral/8x22b.sh": (141, 39),
    "qwen3_moe/30b-a3b.sh": (30.5, 3.3),
    "qwen3_moe/235b-a22b.sh": (235, 22),
}
"""Billions of parameters, and of those that work on a token, as authors round them."""


def axes(plan: str) -> tuple[int, dict[str, int]]:
    """Return the processes of a plan, and the axes of several ranks (experts' too)."""
    layout = re.search(r"^  processes (\d+) = (.*)$", plan, re.MULTILINE)
    assert layout, plan
    found = {name: int(size) for name, size in re.findall(r"(\w+) (\d+)", layout[2])}
    experts = re.search(r"^  ranks of a process group: .*\bep (\d+)", plan, re.MULTILINE)
    if experts:
        found["expert"] = int(experts[1])
    return int(layout[1]), {name: size for name, size in found.items() if size > 1}


def test_every_script_has_its_plan_here() -> None:
    assert set(PLANS) == SCRIPTS


@pytest.mark.parametrize("script", PLANS)
def test_a_script_plans_its_layout_at_its_real_size(script: str) -> None:
    parameters, sizes, tokens = PLANS[script]
    planned = run_script(script, DRY_RUN="1")
    assert planned.returncode == 0, planned.stderr
    plan = planned.stdout
    total = re.search(r"^  total ([\d,]+)", plan, re.MULTILINE)
    assert total and int(total[1].replace(",", "")) == parameters
    world, found = axes(plan)
    assert found == sizes
    batch = re.search(r"micro-batch (\d+) x .* = global batch (\d+)$", plan, re.MULTILINE)
    length = re.search(r"^  .* = ([\d,]+) samples = .* tokens$", plan, re.MULTILINE)
    assert batch and length
    folder, name = script.split("/")
    sequence = SEQUENCES.get(script) or SEQUENCES[folder]
    assert int(batch[2]) * sequence == tokens
    # It fits an 80 GB device without anything that is not built.
    largest = re.search(r"largest micro-batch that fits 80 GiB .*: about (\d+)", plan)
    assert largest and int(largest[1]) >= int(batch[1])
    assert "not built" not in plan
    # The README says what the plan says: the fullest rank, rounded up.
    totals = re.findall(r"^ +\d+(?:-\d+)? +[\d,]+ .* ([\d.]+) GiB$", plan, re.MULTILINE)
    assert totals
    readme = (ROOT / "examples" / folder / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[-1] == f"{math.ceil(max(map(float, totals)))} GiB"
    assert cells[2] == str(world)
    assert {axis: int(n) for axis, n in re.findall(r"(\w+) (\d+)(?!\d* stages)", row)} == sizes


@pytest.mark.parametrize("script", PUBLISHED)
def test_parameters_that_work_on_a_token_are_as_many_as_authors_say(script: str) -> None:
    plan = run_script(script, DRY_RUN="1").stdout
    counted = re.search(r"^  total ([\d,]+) .* of which ([\d.]+)B work on a token", plan, re.M)
    assert counted
    total, active = PUBLISHED[script]
    assert int(counted[1].replace(",", "")) / 1e9 == pytest.approx(total, rel=0.005)
    # Embeddings are counted by some and not by others.
    assert float(counted[2]) == pytest.approx(active, rel=0.02)


def test_mixtral_fits_one_machine() -> None:
    plan = run_script("mixtral/8x7b.sh", DRY_RUN="1", NODES="1").stdout
    assert axes(plan) == (8, {"context": 8, "expert": 8})
    assert re.search(r"largest micro-batch that fits 80 GiB .*: about [1-9]", plan), plan


def test_flags_after_the_script_override_its_own() -> None:
    planned = run_script("llama3/8b.sh", "--num-layers", "16", DRY_RUN="1", NODES="4")
    assert "layers per stage: 16 = 16" in planned.stdout
    assert axes(planned.stdout) == (32, {"tensor": 4, "data": 8})
    wrong = run_script("llama3/8b.sh", "--num-layers", "0", DRY_RUN="1")
    assert wrong.returncode == 2 and "--num-layers" in wrong.stderr


def test_mock_data_needs_no_tokenizer_and_has_the_models_vocabulary() -> None:
    for script, rows in (("gpt3/345m.sh", "50,257"), ("llama3/70b.sh", "128,256")):
        plan = run_script(script, DRY_RUN="1", DATA="mock").stdout
        assert f"vocabulary {rows} rows" in plan and "guess" not in plan


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """Return an interpreter that prints what it is given, a word a line."""
    return write_recorder(tmp_path)


def test_one_machine_is_started_by_torchrun_without_an_address(recorder: str) -> None:
    ran = run_script("gpt3/345m.sh", "--seed", "7", PYTHON=recorder, DATA="corpus", GPUS="4")
    words = ran.stdout.split("\n")[:-1]
    program = words.index("pretrain_gpt.py")
    assert words[: program - 4] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    assert words[program - 4 : program - 2] == ["--max-restarts", "0"]
    assert words[words.index("--data-path") + 1] == "corpus" and words[-2:] == ["--seed", "7"]


def test_several_machines_meet_where_they_are_told_to(recorder: str) -> None:
    told = {"PYTHON": recorder, "DATA": "mock", "RENDEZVOUS": "node1:15017", "RUN_ID": "17"}
    words = run_script("gpt3/175b.sh", **told).stdout.split("\n")
    options = dict(zip(words, words[1:], strict=False))
    assert options["--nnodes"] == "128" and options["--rdzv-endpoint"] == "node1:15017"
    assert options["--rdzv-backend"] == "c10d" and options["--rdzv-id"] == "17"
    alone = run_script("gpt3/175b.sh", PYTHON=recorder, DATA="mock")
    assert alone.returncode == 2 and "RENDEZVOUS" in alone.stderr and alone.stdout == ""


@pytest.mark.parametrize("script", PLANS)
def test_a_run_needs_data(script: str, recorder: str) -> None:
    ran = run_script(script, PYTHON=recorder)
    assert ran.returncode == 2 and "set DATA" in ran.stderr and ran.stdout == ""


# Slurm's srun runs the command once, as the machine with number 0; options before it are its own.
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$LOG"
[[ $1 == show ]] && printf 'node7\\nnode8\\n'
exit 0
"""
# An interpreter: a plan ends with PLAN, runs one after the other with the codes in RUNS; one that
# ends with 2 leaves what torchrun then leaves, and torchrun itself ends with 1.
FAKE = """#!/bin/bash
echo "python $*" >> "$LOG"
if [[ $* == *--dry-run* ]]; then exit "${PLAN:-0}"; fi
read -r code rest <<<"$(cat "$RUNS")"
echo "$rest" > "$RUNS"
[[ $code == 0 ]] || exec 3>"$TORCHELASTIC_ERROR_FILE"
case $code in
    0) [[ ${RESUBMIT:-false} == none ]] ||
        echo "{\\"resubmit\\": ${RESUBMIT:-false}}" > "${WRITES:-$SAVE}/run_status.json" ;;
    2) echo '{"message": {"message": "UserError: no such file", "errorCode": 2}}' >&3; exit 1 ;;
    *) echo '{"message": {"message": "RuntimeError: link down", "errorCode": 1}}' >&3; exit 1 ;;
esac
"""


class Job:
    """A Slurm job of two machines, played."""

    def __init__(self, folder: Path) -> None:
        self.log, self.runs, self.save = folder / "log", folder / "runs", folder / "save"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", FAKE)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def submit(self, runs: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the job; the program's runs in it end with the codes ``runs``."""
        self.runs.write_text(runs + "\n")
        return run_script(
            "slurm/job.sbatch",
            "examples/gpt3/345m.sh",
            *flags,
            **{
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "PYTHON": str(self.bin / "python"),
                "LOG": str(self.log),
                "RUNS": str(self.runs),
                "SAVE": str(self.save),
                "DATA": "corpus",
                "SLURM_SUBMIT_DIR": str(ROOT),
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NODELIST": "node[7-8]",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_END_TIME": "2000000000",
                **variables,
            },
        )

    def lines(self, start: str) -> list[str]:
        """Return the logged calls that begin with ``start``."""
        return [x for x in self.log.read_text().splitlines() if x.startswith(start)]

    @property
    def tries(self) -> list[str]:
        """Return the runs that were started, without the plan."""
        return [line for line in self.lines("python") if "--dry-run" not in line]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_complete_run_ends_the_job(job: Job) -> None:
    ran = job.submit("0", "--seed", "7")
    assert ran.returncode == 0, ran.stderr
    (run,) = job.tries
    # Two machines of eight, which meet at the first one; the clock and a signal stop it cleanly.
    for words in (
        "--nnodes 2",
        "--nproc-per-node 8",
        "--rdzv-endpoint node7:19711 --rdzv-id 4711.0",
        f"--save {job.save}",
        "--exit-signal-handler --exit-duration-in-mins auto --seed 7",
    ):
        assert words in run
    assert job.lines("scontrol requeue") == []
    # The plan came first, as one task, for all ranks.
    first = job.lines("srun")[0]
    assert "--nodes=1 --ntasks=1" in first
    assert job.lines("python")[0].endswith("--dry-run --dry-run-world-size 16")


def test_a_run_that_stopped_in_time_goes_back_into_the_queue(job: Job) -> None:
    assert job.submit("0", RESUBMIT="true").returncode == 0
    assert job.lines("scontrol requeue") == ["scontrol requeue 4711"]


def test_a_status_from_before_the_try_says_nothing(job: Job) -> None:
    job.save.mkdir()
    status = job.save / "run_status.json"
    status.write_text('{"resubmit": true}')
    assert job.submit("0", "--skip-train", RESUBMIT="none").returncode == 0
    assert job.lines("scontrol requeue") == [] and status.exists()


@pytest.mark.parametrize("spelling", ["--save {}", "--save={}", "--save elsewhere --save {}"])
def test_the_status_is_read_where_the_flags_save(job: Job, tmp_path: Path, spelling: str) -> None:
    folder = tmp_path / "flagged"
    flags = spelling.format(folder).split()
    assert job.submit("0", *flags, RESUBMIT="true", WRITES=str(folder)).returncode == 0
    assert job.lines("scontrol requeue") == ["scontrol requeue 4711"]
    assert not job.save.exists()
    (run,) = job.tries
    assert f"--load {folder}" in run


def test_a_plan_that_is_refused_starts_nothing(job: Job) -> None:
    ran = job.submit("0", PLAN="2")
    assert ran.returncode == 2 and job.tries == [] and job.lines("scontrol") == []


def test_what_the_user_must_mend_is_not_tried_again(job: Job) -> None:
    ran = job.submit("2 0")
    assert ran.returncode == 2 and len(job.tries) == 1
    assert job.lines("scontrol requeue") == []


def test_other_failures_are_tried_again_at_another_place(job: Job) -> None:
    assert job.submit("1 1 0").returncode == 0
    places = [re.findall(r"--rdzv-endpoint (\S+) --rdzv-id (\S+)", run)[0] for run in job.tries]
    assert places == [
        ("node7:19711", "4711.0"),
        ("node7:19712", "4711.1"),
        ("node7:19713", "4711.2"),
    ]


def test_a_run_that_keeps_failing_ends_the_job(job: Job) -> None:
    ran = job.submit("1 1 1 1 1", RESTARTS="1")
    assert ran.returncode == 1 and len(job.tries) == 2
    assert job.lines("scontrol requeue") == []


def test_a_job_needs_data_and_a_script(job: Job) -> None:
    ran = job.submit("0", DATA="")
    assert ran.returncode == 2 and "DATA" in ran.stderr
    assert run_script("slurm/job.sbatch", DATA="mock").returncode != 0
