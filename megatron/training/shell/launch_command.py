"""A command that starts a program of ours: what starts it, on how many processes, which flags.

Launchers understood are torchrun, torch.distributed.run and .launch, accelerate, deepspeed, srun,
mpirun, msrun and plain python. Whatever else stands before the program (containers, profilers,
numactl) is passed over.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROGRAM = re.compile(r"(?:^|.*/)([\w.-]+\.py)$")
PROGRAMS = ("pretrain_gpt.py", "pretrain_bert.py", "preprocess_data.py")
"""Those whose flags are known here."""

OTHERS = re.compile(r"pretrain_|finetune|train|preprocess")
"""Names of programs that are launches too, though of other programs."""

SILENT = (
    "echo",
    "printf",
    "cat",
    "ls",
    "cp",
    "mv",
    "rm",
    "mkdir",
    "git",
    "pip",
    "tee",
    "grep",
    "sed",
)
"""Commands that start nothing, whatever stands in their words."""

NO_LAUNCHER = "no launcher"
TORCH = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MPI = ("mpirun", "mpiexec", "orterun")

SSH_OPTIONS = [f"-{letter}" for letter in "bcDEeFIiJLlmOopQRSWw"]
"""Those that take a value."""
SHELLS = ("bash", "sh", "zsh", "dash")

Size = int | str
"""A number, or a text with the variables it hangs on."""


@dataclass(frozen=True)
class Launch:
    """One start of a program."""

    program: str
    path: str
    flags: tuple[str, ...]
    launcher: str
    """What starts the processes."""
    sizes: tuple[Size, ...]
    """Their number as factors: machines and processes on each."""
    line: int

    @property
    def world_size(self) -> int | None:
        """Return the number of processes, None if a factor is not known."""
        total = 1
        for size in self.sizes:
            if not isinstance(size, int):
                return None
            total *= size
        return total


def find(
    words: Sequence[str],
    line: int = 0,
    environment: Mapping[str, str] | None = None,
    batch: Mapping[str, str] | None = None,
) -> Launch | None:
    """Return the launch that a command is, None if it is none.

    Args:
        words: the command, expanded.
        line: where it stands.
        environment: variables that are set for it.
        batch: variables that Slurm sets for the job.
    """
    if not words or words[0].rpartition("/")[2] in SILENT:
        return None
    place = _program(words)
    if place is None:
        return None
    name = PROGRAM.match(words[place])
    assert name is not None
    before = words[:place]
    launcher, sizes = _processes(before, environment or {}, batch or {})
    flags = tuple(words[place + 1 :])
    given = _option(flags, ("--world-size", "--world_size"))
    if launcher == NO_LAUNCHER and given:  # each process is told its place, as under mpirun
        launcher, sizes = "--world-size", (_size(given),)
    return Launch(name[1], words[place], flags, launcher, sizes, line)


def inner_script(words: Sequence[str]) -> tuple[int, str]:
    """Return the script that a shell is started with, as in ``srun bash -c '...'``, and its place.

    ``sbatch --wrap`` and ``ssh host`` are such too.
    """
    name = words[0].rpartition("/")[2]
    if name == "ssh":
        at = 1
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in SSH_OPTIONS else 1
        return at + 1, " ".join(words[at + 1 :])
    for place, word in enumerate(words):
        if name == "sbatch" and word.startswith("--wrap"):
            _, equals, text = word.partition("=")
            return place, text if equals else " ".join(words[place + 1 : place + 2])
        if not place or place + 1 == len(words):
            continue
        is_shell = words[place - 1].rpartition("/")[2] in SHELLS
        if re.fullmatch(r"-[a-z]*c", word) and (is_shell or words[place - 1].startswith("-")):
            return place + 1, words[place + 1]
    return 0, ""


def mentions(words: Sequence[str]) -> bool:
    """Return whether a command that is no launch may hide one in the text of a word."""
    silent = not words or words[0].rpartition("/")[2] in SILENT
    return not silent and any(re.search(rf"\b{re.escape(p)}", w) for p in PROGRAMS for w in words)


def _program(words: Sequence[str]) -> int | None:
    """Return where the program stands: a known one, else the first that trains."""
    places = [i for i, word in enumerate(words) if PROGRAM.match(word) and word[:1] != "-"]
    names = {i: words[i].rpartition("/")[2] for i in places}
    known = [i for i in places if names[i] in PROGRAMS]
    others = [i for i in places if OTHERS.search(names[i])]
    return next(iter([*known, *others]), None)


def _processes(
    words: Sequence[str], environment: Mapping[str, str], batch: Mapping[str, str]
) -> tuple[str, tuple[Size, ...]]:
    """Return the launcher and the factors of the number of processes."""
    names = [word.rpartition("/")[2] for word in words]
    torch = next((name for name in TORCH if name in names), None)
    if torch:
        per_machine = _option(words, ("--nproc_per_node", "--nproc-per-node"))
        machines = _option(words, ("--nnodes",))
        return torch, (_size(machines, largest=True), _size(per_machine))
    if "deepspeed" in names:
        options = [_option(words, (name,)) for name in ("--num_nodes", "--num_gpus")]
        if options == [None, None]:
            return "deepspeed", ("the devices of the hostfile",)
        return "deepspeed", tuple(_size(option) for option in options)
    if "accelerate" in names:
        number = _option(words, ("--num_processes", "--num-processes"))
        return "accelerate", (
            _size(number) if number else "the processes of accelerate's settings",
        )
    if "msrun" in names:
        return "msrun", (_size(_option(words, ("--worker_num",))),)
    mpi = next((name for name in MPI if name in names), None)
    if mpi:
        number = _option(words, ("-n", "-np", "--n", "--np", "-c"))
        return mpi, (_size(number) if number else "the slots of mpirun",)
    if "srun" in names:
        return "srun", _srun(words, batch)
    if "WORLD_SIZE" in environment:
        return "WORLD_SIZE", (_size(environment["WORLD_SIZE"]),)
    return NO_LAUNCHER, (1,)


def _srun(words: Sequence[str], batch: Mapping[str, str]) -> tuple[Size, ...]:
    tasks = _option(words, ("-n", "--ntasks")) or batch.get("SLURM_NTASKS")
    nodes = _option(words, ("-N", "--nodes")) or batch.get("SLURM_NNODES")
    each = _option(words, ("--ntasks-per-node",)) or batch.get("SLURM_NTASKS_PER_NODE")
    if tasks:
        return (_size(tasks),)
    if nodes or each:
        return (_size(nodes), _size(each))
    return ("$SLURM_NTASKS",)


def _option(words: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of a launcher's option."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in names:
            return value if equals else (words[place + 1] if place + 1 < len(words) else None)
        short = re.match(r"(-[nN])(\d+)$", word)
        if short and short[1] in names:
            return short[2]
    return None


def _size(text: str | None, largest: bool = False) -> Size:
    """Return a number, or the text that hides it; an elastic ``1:4`` is its larger end."""
    if text is None:
        return 1
    if largest and ":" in text:
        text = text.rpartition(":")[2]
    return int(text) if text.isdigit() else text
