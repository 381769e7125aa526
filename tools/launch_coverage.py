"""Count how many launches out there parse, which flags they are refused for, and how many plan.

    python tools/launch_coverage.py launches.jsonl [--details] [--markdown]

A line of the file is a launch as found in a script of a public repository: ``id``, ``program``,
``launcher_flags`` and ``flags`` (a flag's words or null). Counted are those of pretrain_gpt.py,
planned as ``--dry-run`` does at their number of processes, and those of preprocess_data.py, whose
flags are checked. Data and tokenizers need not be there.

Where the file has a variable for a value that must be known (``--seq-length $SEQ``), the most
frequent value of that flag in the file stands in, an unknown global batch is left out, and an
unknown number of machines becomes the smallest that holds the layout.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.core.config import specs  # noqa: E402
from megatron.core.utils import UserError  # noqa: E402
from megatron.training import flag_status, plan_report  # noqa: E402
from megatron.training.arguments import Invocation, parse, parse_tool  # noqa: E402
from megatron.training.command_line import Vocabulary, arity, normalise  # noqa: E402
from megatron.training.config import RunConfig  # noqa: E402
from megatron.training.explain import Finding, findings, is_open, plannable  # noqa: E402
from tools import preprocess_data  # noqa: E402

PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--worker_num")
MACHINES = ("--nnodes", "--num_nodes")
TENSOR = ("--tensor-model-parallel-size", "--model-parallel-size")
PIPELINE = ("--pipeline-model-parallel-size",)
CONTEXT = ("--context-parallel-size",)
EXPERT = ("--expert-model-parallel-size",)
EXPERT_TENSOR = ("--expert-tensor-parallel-size", *TENSOR)
MOST_MACHINES = 64
REDIRECTION = re.compile(r"^\d*&?>{1,2}&?\d*$|^\|$")
CANNOT_HOLD = re.compile(r"process(es)? cannot hold")


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
        if item.kind == "open":
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
    """Judge a launch of pretrain_gpt.py and plan it."""
    outcome, found = judged(launch, vocabulary, typical)
    if outcome.parses and not outcome.blocking:
        outcome.error = why_no_plan(plannable(found), launch["launcher_flags"])
    return outcome


def why_no_plan(words: Sequence[str], launcher: Mapping[str, str]) -> str:
    """Return why there is no plan, empty if there is one."""
    message = ""
    for world in worlds(launcher, replica(words)):
        try:
            run = parse([*words, "--dry-run", "--dry-run-world-size", str(world)])
            plan_report.report(run, "pretrain_gpt")
            return ""
        except UserError as error:
            message = str(error)
            if not CANNOT_HOLD.search(message):
                return message
    return message


def replica(words: Sequence[str]) -> int:
    """Return the least processes that the dense and the expert layout fill."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    given = {normalise(flag): value for flag, value in pairs if flag[:2] == "--"}

    def size(flags: Sequence[str]) -> int:
        return number(given, flags) or 1

    dense = size(TENSOR) * size(PIPELINE) * size(CONTEXT)
    return math.lcm(dense, size(EXPERT) * size(EXPERT_TENSOR) * size(PIPELINE))


def worlds(launcher: Mapping[str, str], model: int) -> Iterator[int]:
    """Yield the numbers of processes that a launch may have: one where it is known.

    Args:
        launcher: the launcher's flags.
        model: processes that hold one replica.
    """
    per_machine, machines = number(launcher, PROCESSES), number(launcher, MACHINES)
    if machines is None and per_machine is not None and not set(MACHINES) & set(launcher):
        machines = 1
    if per_machine is not None and machines is not None:
        yield per_machine * machines
        return
    unit = math.lcm(per_machine or machines or 1, model)
    for count in range(1, MOST_MACHINES + 1):
        yield unit * count


def number(given: Mapping[str, str], flags: Sequence[str]) -> int | None:
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


def summary(outcomes: Sequence[Outcome]) -> list[tuple[str, int]]:
    """Return the counts, each launch in one of those below the first two."""
    planned = [o for o in outcomes if o.plans]
    blocked = [o for o in outcomes if o.blocking]
    rest = [o for o in outcomes if not o.plans and not o.blocking]
    contradictions = [o for o in rest if o.parses and CANNOT_HOLD.search(o.error)]
    return [
        ("launches", len(outcomes)),
        ("every flag is known and well-formed", sum(o.parses for o in outcomes)),
        ("plan", len(planned)),
        ("- of these, without any refused flag", sum(not o.refused for o in planned)),
        ("- of these, with values put in for variables", sum(bool(o.substituted) for o in planned)),
        ("no plan: flags of other frameworks and forks", len(blocked)),
        ("no plan: their processes cannot hold their layout", len(contradictions)),
        ("no plan: unknown flags", sum(bool(o.unknown) for o in rest)),
        ("no plan: values are missing", sum(bool(o.malformed) and not o.unknown for o in rest)),
        (
            "no plan: other contradictions",
            sum(o.parses and o not in contradictions for o in rest),
        ),
    ]


def tables(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield a title with flags and how many launches have them."""
    yield (
        "stop a plan too (other frameworks and forks)",
        Counter(f for o in outcomes for f in dict.fromkeys(o.blocking)).most_common(),
    )
    planned = [o for o in outcomes if o.plans]
    yield (
        "left out of plans, refused in a run",
        Counter(f for o in planned for f in dict.fromkeys(o.refused)).most_common(),
    )
    yield (
        "unknown",
        Counter(f for o in outcomes for f in dict.fromkeys(o.unknown)).most_common(),
    )


def main() -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("launches", type=Path)
    parser.add_argument("--details", action="store_true", help="name each launch without a plan")
    arguments = parser.parse_args()
    lines = arguments.launches.read_text(encoding="utf-8").splitlines()
    launches = [json.loads(line) for line in lines if line.strip()]
    typical = Typical(launches)
    tool = {**specs(preprocess_data.ToolConfig)}
    others = {row.flag: row for row in preprocess_data.OTHERS}
    for program, judge, vocabulary in (
        (
            "pretrain_gpt.py",
            training,
            Vocabulary({**specs(RunConfig), **specs(Invocation)}, flag_status.load()),
        ),
        ("preprocess_data.py", preprocessing, Vocabulary(tool, others)),
    ):
        chosen = [x for x in launches if Path(x["program"]).name == program]
        outcomes = [judge(launch, vocabulary, typical) for launch in chosen]
        print(f"{program}:")
        for text, count in summary(outcomes):
            print(f"  {count:4} {text}")
        for title, counts in tables(outcomes):
            if counts:
                print(f"  {title}: {', '.join(f'{flag} {n}' for flag, n in counts)}")
        for o in outcomes if arguments.details else ():
            if not o.plans:
                reasons = [*o.blocking, *o.unknown, *o.malformed, *([o.error] if o.error else [])]
                print(f"    {o.name}: {'; '.join(reasons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
