"""Count how many launches out there parse, which flags they are refused for, and how many plan.

    python tools/launch_coverage.py launches.jsonl [--details] [--output docs/launch_coverage.json]

A line of the file is a launch as found in a script of a public repository: ``id``, ``program``,
``launcher_flags`` and ``flags`` (a flag's words or null). Counted are those of programs that train,
planned as ``--dry-run`` does at their number of processes, and those of preprocess_data.py, whose
flags are checked. Data and tokenizers need not be there.

Where the file has a variable for a value that must be known (``--seq-length $SEQ``), or lacks the
value, the most frequent value of that flag in the file stands in, an unknown global batch is left
out, and an unknown number of machines becomes the smallest that holds the layout.

``--output`` keeps the counts, and why each other launch has no plan, for docs/flags.md
(tools/generate_flag_docs.py).
"""

import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, option, specs
from megatron.core.utils import UserError, atomic_path, check_file
from megatron.training.arguments import Invocation, parse, parse_tool, run_main
from megatron.training.config import RunConfig
from megatron.training.explain import Finding, findings, is_open, plannable, replica
from megatron.training.flags import flag_status
from megatron.training.flags.command_line import Vocabulary, arity, normalise
from megatron.training.plan import report as plan_report
from megatron.training.program_defaults import PROGRAM_DEFAULTS
from tools import preprocess_data

PROGRAM = "launch_coverage"
PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--worker_num")
MACHINES = ("--nnodes", "--num_nodes")
MOST_MACHINES = 64
REDIRECTION = re.compile(r"^\d*&?>{1,2}&?\d*$|^\|$")
CANNOT_HOLD = re.compile(r"process(es)? cannot hold")
FORMER_NAMES = {"pretrain_t5_core.py": "pretrain_t5.py"}
"""Programs that Megatron-LM has joined with another one since."""


@dataclass
class Outcome:
    """What became of one launch."""

    name: str
    unknown: list[str] = field(default_factory=list)
    """Flags that nobody knows."""
    malformed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Flags that a run refuses."""
    blocking: list[str] = field(default_factory=list)
    """Of these, the flags that a dry run refuses too."""
    why: list[str] = field(default_factory=list)
    """The reasons of the blocking flags."""
    substituted: list[str] = field(default_factory=list)
    """Flags whose value was not in the file."""
    error: str = ""
    """Why flags that are all in order make no plan."""

    @property
    def parses(self) -> bool:
        """Every flag is known and has values as it takes them."""
        return not (self.unknown or self.malformed)

    @property
    def plans(self) -> bool:
        """There is a plan."""
        return self.parses and not self.blocking and not self.error


class Typical:
    """The most frequent known value of each flag."""

    def __init__(self, launches: Iterable[Mapping[str, Any]]) -> None:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for launch in launches:
            for flag, value in launch["flags"].items():
                if value and not is_open(value):
                    counts[normalise(flag)][value] += 1
        self._values = {flag: seen.most_common(1)[0][0] for flag, seen in counts.items()}

    def __getitem__(self, flag: str) -> str:
        return self._values.get(normalise(flag), "1")


def words_of(launch: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[str]:
    """Yield a launch's words; redirections go, and placeholders of several words become one."""
    for flag, value in launch["flags"].items():
        yield flag
        words: list[str] = []
        for word in (value or "").split():
            if REDIRECTION.match(word):
                break
            words.append(word)
        target = vocabulary.targets.get(normalise(flag))
        takes_one = target is not None and arity(target, normalise(flag)) == "1"
        if takes_one and len(words) > 1 and not any(is_open(w) or w[:2] == "--" for w in words):
            words = [" ".join(words)]
        yield from words


def judged(
    launch: Mapping[str, Any], vocabulary: Vocabulary, typical: Typical
) -> tuple[Outcome, list[Finding]]:
    """Return a launch's flags, with values for those that must be known."""
    outcome = Outcome(launch["id"])
    found = []
    for item in findings(list(words_of(launch, vocabulary)), vocabulary):
        lacks = item.kind == "malformed" and len(item.words) == 1
        if item.kind == "open" or lacks:
            outcome.substituted.append(item.words[0])
            if normalise(item.words[0]) == "--global-batch-size":
                continue
            (item,) = findings([item.words[0], typical[item.words[0]]], vocabulary)
        found.append(item)
        flag = normalise(item.words[0])
        if item.kind in ("unknown", "malformed"):
            getattr(outcome, item.kind).append(item.text if item.kind == "malformed" else flag)
        elif item.kind == "refused" and item.row is not None:
            outcome.refused.append(item.row.flag)
            if not item.row.dry_run:
                outcome.blocking.append(item.row.flag)
                outcome.why.append(item.row.why)
    return outcome, found


def training(launch: Mapping[str, Any], vocabulary: Vocabulary, typical: Typical) -> Outcome:
    """Judge a launch of a program that trains and plan it."""
    outcome, found = judged(launch, vocabulary, typical)
    if outcome.parses and not outcome.blocking:
        program = Path(program_of(launch)).stem
        outcome.error = why_no_plan(found, launch["launcher_flags"], program)
    return outcome


def program_of(launch: Mapping[str, Any]) -> str:
    """Return the file name of a launch's program, as it is called today."""
    name = Path(launch["program"]).name
    return FORMER_NAMES.get(name, name)


def why_no_plan(found: Sequence[Finding], launcher: Mapping[str, str], program: str) -> str:
    """Return why there is no plan, empty if there is one."""
    words = plannable(found)
    message = ""
    for world in worlds(launcher, replica(found)):
        try:
            run = parse([*words, "--dry-run", "--dry-run-world-size", str(world)], program)
            plan_report.report(run, program)
            return ""
        except UserError as error:
            message = str(error)
            if not CANNOT_HOLD.search(message):
                return message
    return message


def worlds(launcher: Mapping[str, str], model: int) -> Iterator[int]:
    """Yield the numbers of processes that a launch may have: one where it is known.

    Args:
        launcher: the launcher's flags.
        model: processes that hold one replica.
    """
    per_machine, machines = known_number(launcher, PROCESSES), known_number(launcher, MACHINES)
    if machines is None and per_machine is not None and not set(MACHINES) & set(launcher):
        machines = 1
    if per_machine is not None and machines is not None:
        yield per_machine * machines
        return
    unit = math.lcm(per_machine or machines or 1, model)
    for count in range(1, MOST_MACHINES + 1):
        yield unit * count


def known_number(given: Mapping[str, str], flags: Sequence[str]) -> int | None:
    """Return the number that the first of some flags gives."""
    for flag in flags:
        value = given.get(flag) or ""
        if value.isdigit():
            return int(value)
    return None


def preprocessing(launch: Mapping[str, Any], vocabulary: Vocabulary, typical: Typical) -> Outcome:
    """Check the flags of a launch of preprocess_data.py."""
    outcome, found = judged(launch, vocabulary, typical)
    tool = preprocess_data
    if outcome.parses and not outcome.blocking:
        words = [word for item in found if item.kind != "empty" for word in item.words]
        try:
            parse_tool(words, tool.ToolConfig, tool.PROGRAM, dry_run=True, others=tool.OTHERS)
        except UserError as error:
            outcome.error = str(error)
    return outcome


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return the counts; a launch is in one of those that begin with ``plan`` or ``no plan``."""
    planned = [o for o in outcomes if o.plans]
    rest = [o for o in outcomes if not o.plans and not o.blocking]
    cannot_hold = [o for o in rest if o.parses and CANNOT_HOLD.search(o.error)]
    return {
        "launches": len(outcomes),
        "every flag has a status and well-formed values": sum(o.parses for o in outcomes),
        "plan": len(planned),
        "(of these, with no flag that a run refuses)": sum(not o.refused for o in planned),
        "(of these, with a value put in)": sum(bool(o.substituted) for o in planned),
        "no plan: made for another framework": sum(bool(o.blocking) for o in outcomes),
        "no plan: its processes cannot hold its layout": len(cannot_hold),
        "no plan: an unknown flag": sum(bool(o.unknown) for o in rest),
        "no plan: a malformed value": sum(bool(o.malformed) and not o.unknown for o in rest),
        "no plan: contradicts itself otherwise": sum(
            o.parses and o not in cannot_hold for o in rest
        ),
    }


def tables(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Return, by title, how many launches have a flag or a reason."""
    planned = [o for o in outcomes if o.plans]
    found = {
        "made for another framework, by reason": [o.why for o in outcomes],
        "refused in a plan too, by flag": [o.blocking for o in outcomes],
        "refused in a run and left out of a plan, by flag": [o.refused for o in planned],
        "unknown": [o.unknown for o in outcomes],
    }
    return {
        title: dict(Counter(x for row in rows for x in dict.fromkeys(row)).most_common())
        for title, rows in found.items()
    }


def reasons(outcome: Outcome) -> str:
    """Return why a launch has no plan."""
    blocking = [f"{f} ({why})" for f, why in zip(outcome.blocking, outcome.why, strict=True)]
    found = [*blocking, *outcome.unknown, *outcome.malformed, outcome.error]
    return "; ".join(reason for reason in found if reason)


class CoverageConfig(Config):
    """What to count."""

    launches: str = option(metavar="FILE")
    """The launches, one as JSON a line; may also come first, without the flag."""

    details: bool = option(False)
    """Name each launch without a plan, with the reason."""

    output: str | None = option(None, metavar="FILE")
    """Write the counts to this JSON file."""


def read(path: str) -> list[dict[str, Any]]:
    """Return the launches of a file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    config = parse_tool(argv, CoverageConfig, PROGRAM, leading="launches").config
    if config.output:
        check_file("--output", config.output)
    launches = read(config.launches)
    typical = Typical(launches)
    others = {row.flag: row for row in preprocess_data.OTHERS}
    declared = {**specs(RunConfig), **specs(Invocation)}
    vocabularies = {
        **{f"{name}.py": Vocabulary(declared, flag_status.load()) for name in PROGRAM_DEFAULTS},
        "preprocess_data.py": Vocabulary(specs(preprocess_data.ToolConfig), others),
    }
    judges = dict.fromkeys(vocabularies, training) | {"preprocess_data.py": preprocessing}
    content = {}
    for program, vocabulary in vocabularies.items():
        chosen = [x for x in launches if program_of(x) == program]
        outcomes = [judges[program](launch, vocabulary, typical) for launch in chosen]
        content[program] = {
            "counts": counts(outcomes),
            "tables": tables(outcomes),
            "no plan, and why": {o.name: reasons(o) for o in outcomes if not o.plans},
        }
        for line in listed(program, outcomes, config.details):
            print(line)
    if config.output:
        with atomic_path(config.output) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def listed(program: str, outcomes: Sequence[Outcome], details: bool) -> Iterator[str]:
    """Yield the counts of a program as lines."""
    yield f"{program}:"
    for text, number in counts(outcomes).items():
        yield f"  {number:4} {text}"
    for title, rows in tables(outcomes).items():
        if rows:
            yield f"  {title}: {', '.join(f'{name} {number}' for name, number in rows.items())}"
    for outcome in outcomes if details else ():
        if not outcome.plans:
            yield f"    {outcome.name}: {reasons(outcome)}"


if __name__ == "__main__":
    run_main(main, PROGRAM)
