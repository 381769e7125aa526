"""Say what becomes of a launch that was written for Megatron-LM, without starting anything.

    tools/explain_launch.py my_job.sh
    tools/explain_launch.py my_job.sh --set NNODES=4 SEQ_LEN=4096 -- ARGUMENTS OF THE SCRIPT
    tools/explain_launch.py -- torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 ...

The script is read, not executed: variables, arrays, conditions on known values, functions, eval
and bash -c are followed. Each flag is the same here, renamed, without effect or refused (with the
reason and what to use), and the run's plan is printed for the number of processes that the launcher
asks for. What the script takes from elsewhere is shown as $NAME; it does as a path, and numbers are
asked for by name, as is what a command, a file or the keyboard may set to flags. A command is
given as --set '$(command)=VALUE'.

Exit code: 0 if the launch gives the same results here, 1 if it would be refused or results would
differ, 2 if the script cannot be read or a value is missing. Random numbers (initial values,
dropout) are never those of Megatron-LM and are not counted as a difference.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, check_at_least, option, specs
from megatron.core.utils import UserError
from megatron.training import explain, rules
from megatron.training.arguments import Invocation, parse, parse_tool, run_main
from megatron.training.config import RunConfig
from megatron.training.explain import Finding
from megatron.training.flags import flag_status
from megatron.training.flags.command_line import Vocabulary, normalise
from megatron.training.plan import report as plan_report
from megatron.training.program_defaults import PROGRAM_DEFAULTS
from megatron.training.shell.launch_command import NO_LAUNCHER, Launch, find, mentions
from megatron.training.shell.script import Script, read, slurm
from megatron.training.shell.syntax import closing
from tools import preprocess_data

PROGRAM = "explain_launch"
SAME, DIFFERS, UNREADABLE = 0, 1, 2

TITLES: Mapping[explain.Kind, str] = {
    "refused": "refused",
    "unknown": "unknown",
    "malformed": "wrong",
    "open": "a value is missing",
    "empty": "not set anywhere, taken as nothing",
    "renamed": "renamed",
    "no effect": "no effect",
    "same": "same",
}


class ExplainConfig(Config):
    """What to explain."""

    script: tuple[str, ...] = option(())
    """Launch script, and its own arguments; comes first, without the flag. Arguments that start
    with a hyphen, or a command line without a script, stand at the end, after a lone ``--``."""

    values: tuple[str, ...] = option((), flag="--set", metavar="NAME=VALUE")
    """Values of the script's variables; they win over the script's own."""

    world_size: int | None = option(None)
    """Processes to plan for, instead of those that the launcher asks for."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "world_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    options = parse_tool(gathered(words), ExplainConfig, PROGRAM, leading="script").config
    given = dict(assignment(text) for text in options.values)
    script, text = Script(), ""
    if command and not options.script:
        launches = [find(command)]
    elif not options.script:
        raise UserError("give a launch script, or a command line after --")
    else:
        path, *arguments = options.script
        text = read_text(path)
        script = read(text, given, [*arguments, *command], Path(path).parent)
        batch = {**slurm(text), **given}
        launches = [find(c.words, c.line, c.environment, batch) for c in script.commands]
    found = list(dict.fromkeys(launch for launch in launches if launch is not None))
    if not found:
        name = options.script[0] if options.script else "the command"
        raise UserError(
            f"{name} starts no program that trains or preprocesses (such as pretrain_gpt.py); give "
            "the command that does after --"
        )
    unread = [
        f"line {c.line}: not read as a launch: {' '.join(c.words)}"
        for c in script.commands
        if find(c.words) is None and mentions(c.words)
    ]
    for note in dict.fromkeys([*script.notes, *unread]):
        print(f"note: {note}")
    codes = [explained(launch, options.world_size, script.unknown) for launch in found]
    return max(codes, key=severity)


def gathered(words: Sequence[str]) -> list[str]:
    """Return the words with the values of a repeated --set behind one of them."""
    kept: list[str] = []
    values: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--set":
            if not rest or "=" not in rest[0]:
                raise UserError("--set takes NAME=VALUE")
            while rest and "=" in rest[0] and not rest[0].startswith("--"):
                values.append(rest.pop(0))
        elif word.startswith("--set="):
            values.append(word.removeprefix("--set="))
        else:
            kept.append(word)
    return [*kept, "--set", *values] if values else kept


def assignment(text: str) -> tuple[str, str]:
    """Return the name and the value of --set; the name of a command is all of ``$(command)``."""
    end = closing(text, 1) + 1 if text.startswith("$(") else 0
    name, equals, value = text[end:].partition("=")
    if not equals or bool(name) == bool(end):
        raise UserError(f"--set {text}: give NAME=VALUE, or '$(command)=VALUE'")
    return f"$({' '.join(text[2 : end - 1].split())})" if end else name.lstrip("$"), value


def read_text(path: str) -> str:
    """Return the text of a script."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def severity(code: int) -> int:
    """Order exit codes: what is certain to differ comes before what is not known."""
    return (SAME, UNREADABLE, DIFFERS).index(code)


def explained(launch: Launch, world_size: int | None, unknown: Mapping[str, str]) -> int:
    """Print what becomes of one launch and return the exit code for it.

    Args:
        launch: what is started.
        world_size: number of processes, if the user says it.
        unknown: what something unread sets (`explain.findings`).
    """
    place = f"line {launch.line}: " if launch.line else ""
    sizes = " x ".join(map(str, launch.sizes))
    world = world_size or launch.world_size
    count = sizes if world is None else str(world)
    if len(launch.sizes) > 1 and world is not None and not world_size:
        count = f"{sizes} = {world}"
    print(f"\n{place}{launch.path} on {count} process{'es' * (world != 1)} ({launch.launcher})")
    if launch.program == "preprocess_data.py":
        tool = preprocess_data
        vocabulary = Vocabulary(specs(tool.ToolConfig), {row.flag: row for row in tool.OTHERS})
    else:
        declared = {**specs(RunConfig), **specs(Invocation)}
        vocabulary = Vocabulary(declared, flag_status.load())
    found = explain.findings(launch.flags, vocabulary, unknown)
    if launch.program == "preprocess_data.py":
        told, (problems, missing) = found, checked_tool(found)
        plan = ""
    else:
        told, plan, problems, missing = planned(launch, found, world, unknown)
    for line in listed(told):
        print(line)
    if plan:
        print(f"\n{plan}")
    return concluded(told, problems, missing)


def listed(found: Sequence[Finding]) -> Iterator[str]:
    """Yield the flags by verdict."""
    for kind, items in explain.as_table(found).items():
        if not items:
            continue
        yield f"\n{TITLES[kind]} ({len(items)}):"
        if kind == "same":
            yield from wrapped([item.text for item in items])
            continue
        # A reason is said once for all the flags that share it.
        reasons: dict[str, list[Finding]] = {}
        for item in items:
            reasons.setdefault(item.note, []).append(item)
        for note, sharing in reasons.items():
            if len(sharing) > 1 and note:
                yield from wrapped([item.text for item in sharing])
                yield f"      {note}"
            else:
                yield from (f"  {item.text}" + f"\n      {note}" * bool(note) for item in sharing)


def wrapped(texts: Sequence[str], width: int = 98) -> Iterator[str]:
    """Yield texts as lines, several in one, none torn apart."""
    line = " "
    for place, text in enumerate(texts):
        piece = f" {text}" + "," * (place + 1 < len(texts))
        if len(line) + len(piece) > width and line.strip():
            yield line
            line = " "
        line += piece
    yield line


def planned(
    launch: Launch, found: list[Finding], world: int | None, unknown: Mapping[str, str]
) -> tuple[list[Finding], str, list[str], list[str]]:
    """Return what becomes of each flag, the plan, what would differ and what is missing."""
    problems: list[str] = []
    missing: list[str] = []
    program = launch.program.removesuffix(".py")
    if program not in PROGRAM_DEFAULTS:
        program = "pretrain_gpt"
        problems.append(f"{launch.program} is not here; its flags are judged as pretrain_gpt.py's")
    outside = launch.launcher == NO_LAUNCHER and world == 1 and explain.replica(found) > 1
    if outside:
        missing.append("the number of processes, which something else starts: --world-size N")
    if world is None:
        give = explain.ways([str(size) for size in launch.sizes], unknown)
        missing.append(f"the number of processes: {f'{give} or ' * bool(give)}--world-size N")
    if missing or any(item.kind in ("open", "malformed") for item in found):
        return found, "", problems, missing
    words = [*explain.plannable(found), "--dry-run", "--dry-run-world-size", str(world)]
    try:
        run = parse(words, program)
        # What the flags became stands beside them already.
        told = {normalise(item.words[0]) for item in found if item.kind == "no effect"}
        rest = tuple(note for note in run.no_effect if note.split()[0] not in told)
        shown = dataclasses.replace(run, no_effect=rest, renamed=())
        plan = plan_report.report(shown, program)
    except UserError as error:
        return explain.blamed(found, str(error)), "", [*problems, f"no plan: {error}"], missing
    problems += explain.differences(run)
    try:
        rules.check_built(run.config)
    except UserError as error:
        problems.append(f"a run would stop: {error}")
    return found, plan, problems, missing


def checked_tool(found: Sequence[Finding]) -> tuple[list[str], list[str]]:
    """Check the flags of preprocess_data.py together."""
    tool = preprocess_data
    kept = [w for item in found if item.kind in ("same", "renamed") for w in item.words]
    try:
        parse_tool(kept, tool.ToolConfig, tool.PROGRAM, dry_run=True, others=tool.OTHERS)
    except UserError as error:
        if not any(item.kind == "open" for item in found):
            return [str(error)], []
    return [], []


def concluded(found: Sequence[Finding], problems: Sequence[str], missing: Sequence[str]) -> int:
    """Print the verdict and return the exit code."""
    stopping = [item for item in found if item.stops]
    opened = [f"{item.text}: {item.note}" for item in found if item.kind == "open"]
    print("\nverdict:")
    if stopping:
        names = ", ".join(dict.fromkeys(item.words[0] for item in stopping))
        print(f"  a run would stop at {names}")
    for problem in problems:
        print(f"  {problem}")
    for text in [*missing, *opened]:
        print(f"  missing: {text}")
    if stopping or problems:
        return DIFFERS
    if missing or opened:
        return UNREADABLE
    print("  this launch gives the same results here")
    return SAME


if __name__ == "__main__":
    run_main(main, PROGRAM)
