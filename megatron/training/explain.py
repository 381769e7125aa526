"""What becomes of a launch written for Megatron-LM: each flag's verdict, and what would differ.

Words may hold parts that nobody knows: variables (``$NAME``, ``$((A * B))``, ``$(command)``) that
a script takes from elsewhere. They do as text; where a number is needed, or where they may be
flags, the verdict names them.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron.core.config import Spec
from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun
from megatron.training.config import RunConfig
from megatron.training.flags.command_line import (
    Given,
    Vocabulary,
    arity,
    normalise,
    read_command_line,
)
from megatron.training.flags.flag_status import Row
from megatron.training.flags.verdicts import judge
from megatron.training.shell.syntax import closing

Kind = Literal["same", "renamed", "no effect", "refused", "unknown", "malformed", "open", "empty"]

NAME = re.compile(r"\$(?:\{[#!]?)?([A-Za-z_]\w*|[0-9]+)")
FROM_LAUNCHERS = ("local_rank", "rank", "launched_world_size")
"""Fields that a launcher's variables fill, and that no plan hangs on."""

WRITE_OUT = "write the value out"
IN_ARITHMETIC = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Finding:
    """One flag of a launch, or words that belong to none.

    Kinds beside those of a verdict: ``unknown`` (no such flag), ``malformed`` (wrong number of
    values or a wrong value), ``open`` (the value hangs on a variable) and ``empty`` (a variable
    that nothing sets, which the shell drops).
    """

    words: tuple[str, ...]
    kind: Kind
    note: str = ""
    row: Row | None = None

    @property
    def text(self) -> str:
        """Return the flag and its values as given."""
        return " ".join(
            f'"{word}"' if re.search(r"\s", word) and not is_open(word) else word
            for word in self.words
        )

    @property
    def stops(self) -> bool:
        """Return whether a run would end at this flag."""
        return self.kind in ("refused", "unknown", "malformed")


def findings(
    words: Sequence[str], vocabulary: Vocabulary, unknown: Mapping[str, str] | None = None
) -> list[Finding]:
    """Return what becomes of each flag of a command line, in order.

    Args:
        words: program's words, in which ``$NAME`` and ``$(command)`` are not known.
        vocabulary: the program's flags.
        unknown: variables and commands that something unread sets, with the name to give each by;
            other variables are set by nothing.
    """
    unknown = unknown or {}
    found: list[Finding] = []
    for flag, values in _groups(words):
        if flag == "":
            found += [
                _left_over(v, unknown) if is_open(v) else Finding((v,), "malformed", "no flag")
                for v in values
            ]
            continue
        found += _finding(flag, values, vocabulary, unknown)
    return found


def plannable(found: Sequence[Finding]) -> list[str]:
    """Return the words of the flags that a dry run can take."""
    kept: list[str] = []
    for item in found:
        left_out = item.kind == "refused" and item.row is not None and item.row.dry_run
        idle = item.kind == "no effect" and not any(map(is_open, item.words))
        if item.kind in ("same", "renamed") or idle or left_out:
            kept += item.words
    return kept


def blamed(found: Sequence[Finding], message: str) -> list[Finding]:
    """Return the findings, with the flag and value that an error begins with as refused by it."""
    return [
        replace(item, kind="refused", note=message.removeprefix(item.text).strip())
        if item.kind == "same" and len(item.words) > 1 and message.startswith(f"{item.text} ")
        else item
        for item in found
    ]


def replica(found: Sequence[Finding]) -> int:
    """Return the least number of processes that the given parallel sizes fill, as far as known."""
    given = {normalise(f.words[0]): f.words[1] for f in found if len(f.words) == 2}

    def size(*names: str) -> int:
        known = [given[name] for name in names if given.get(name, "").isdigit()]
        return int(known[0]) if known else 1

    tensor = ("--tensor-model-parallel-size", "--model-parallel-size")
    stages = size("--pipeline-model-parallel-size")
    dense = size(*tensor) * stages * size("--context-parallel-size")
    experts = size("--expert-model-parallel-size", "--moe-expert-parallel-size")
    return math.lcm(dense, experts * size("--expert-tensor-parallel-size", *tensor) * stages)


def is_open(word: str) -> bool:
    """Return whether a word hangs on something that is not known."""
    return "$" in word or "`" in word


def variables(word: str) -> list[str]:
    """Return the variables that a word hangs on, and the commands as they stand.

    >>> variables("$((NODES * $(nproc)))/$TAG")
    ['$(nproc)', 'NODES', 'TAG']
    """
    names: list[str] = []
    at = word.find("$")
    while at >= 0:
        end = at
        if word.startswith(("$(", "${"), at):
            try:
                end = closing(word, at + 1)
            except UserError:
                end = len(word)
        inside = word[at : end + 1]
        if inside.startswith("$(("):
            inner = variables(inside[3:])
            names += inner
            for name in inner:
                inside = inside.replace(name, "")
            names += IN_ARITHMETIC.findall(inside)
        elif inside.startswith("$("):
            names.append(inside)
        elif match := NAME.match(word, at):
            names.append(match[1])
        at = word.find("$", end + 1)
    return list(dict.fromkeys(names))


def ways(words: Sequence[str], unknown: Mapping[str, str]) -> str:
    """Return the ``--set`` options that give what words hang on; empty if none can."""
    names = [unknown.get(name, name) for word in words for name in variables(word)]
    given = [shlex.quote(f"{name}=VALUE") for name in dict.fromkeys(names)]
    return " ".join(f"--set {text}" for text in given)


def differences(run: ParsedRun[RunConfig]) -> Iterator[str]:
    """Yield where Megatron-LM would compute something else from the same flags."""
    config, origins = run.config, run.origins
    uneven = config.data.uneven_masks
    if origins["calculate_per_token_loss"] == "default" and uneven:
        yield (
            "loss: Megatron-LM averages the means of microbatches, which differs where masks are "
            f"uneven ({uneven}); add --no-calculate-per-token-loss for that"
        )
    training = config.training
    if training.rampup_batch_size is not None and training.train_iters is not None:
        yield (
            "learning rate: while the batch ramps up Megatron-LM counts iterations of the schedule "
            "in samples of the final batch; here they are iterations (lengths in samples, from "
            "--train-samples on, are the same in both)"
        )
    is_sharded = "--no-data-sharding" not in run.no_effect
    if config.data.dataloader_type == "cyclic" and config.data_parallel_size > 1 and is_sharded:
        yield (
            "data: --dataloader-type cyclic is shuffled as with --no-data-sharding, over all "
            "replicas at once; Megatron-LM without that flag shuffles a share for each replica"
        )


def _groups(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that follow it; words before any flag come with ''."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if flag or values:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if flag or values:
        yield flag, values


def _left_over(word: str, unknown: Mapping[str, str]) -> Finding:
    """Return what becomes of a word without a flag: nothing, or flags that nobody knows."""
    only_variables = not re.sub(r"\$\w+|\$\{[^{}]*\}|\$[@*]", "", word)
    if only_variables and not any(name in unknown for name in variables(word)):
        return Finding((word,), "empty")
    give = ways([word], unknown)
    return Finding((word,), "open", f"needs {give}" if give else WRITE_OUT)


def _is_trailing(values: Sequence[str], unknown: Mapping[str, str]) -> bool:
    """Return whether the last of a flag's many values may be further flags that nobody knows."""
    if not values:
        return False
    last = values[-1]
    names = variables(last)
    is_unknown = is_open(last) and any(n in unknown or n.startswith("$(") for n in names)
    is_whole = re.fullmatch(r"\$\w+|\$[({].*", last) is not None
    weighted = len(values) > 1 and re.fullmatch(r"[\d.]+(e-?\d+)?", values[-2]) is not None
    return is_unknown and is_whole and len(values) > 1 and not weighted


def _finding(
    flag: str, values: list[str], vocabulary: Vocabulary, unknown: Mapping[str, str]
) -> Iterator[Finding]:
    target = vocabulary.targets.get(normalise(flag))
    if target is None:
        yield Finding((flag, *values), "unknown", str(vocabulary.unknown([flag])))
        return
    rest: list[str] = []
    count = arity(target, normalise(flag))
    most = {"switch": 0, "?": 1}.get(count, int(count) if count.isdigit() else len(values))
    while len(values) > most and is_open(values[-1]):
        rest.insert(0, values.pop())  # a variable with further flags, after the flag's own value
    while count in ("+", "*") and _is_trailing(values, unknown):
        rest.insert(0, values.pop())
    words = (flag, *values)
    hanging = [value for value in values if is_open(value)]
    if hanging and isinstance(target, Spec) and target.name in FROM_LAUNCHERS:
        yield Finding(words, "no effect", "ranks come from the launcher's environment")
        return
    if hanging and _needs_value(target, vocabulary):
        give = ways(hanging, unknown)
        yield Finding(words, "open", f"needs {give}" if give else WRITE_OUT)
    else:
        yield _judged(words, vocabulary)
    for word in rest:
        yield _left_over(word, unknown)


def _needs_value(target: Spec | Row, vocabulary: Vocabulary) -> bool:
    """Return whether text will not do: the plan or the verdict hangs on the value."""
    if isinstance(target, Row):
        if target.status == "successor" and target.alternatives:
            return True
        if target.status != "successor":
            return False
        flag = next((word for word in target.instead.strip("[]").split()), "")
        successor = vocabulary.targets.get(normalise(flag))
        return successor is not None and _needs_value(successor, vocabulary)
    return target.base in (int, float) or bool(target.choices) or target.parse is not None


def _judged(words: tuple[str, ...], vocabulary: Vocabulary) -> Finding:
    try:
        (given,) = read_command_line(words, vocabulary)
        verdict = judge(given, vocabulary)
        if verdict.kind == "same":
            _check_value(given)
            return Finding(words, "same", _spelling(given))
        row = verdict.row
        assert row is not None
        if verdict.kind == "refused":
            return Finding(words, "refused", verdict.refusal.partition(": ")[2], row)
        note = f"-> {' '.join(verdict.tokens)}" if verdict.kind == "renamed" else row.why
        if row.status == "refused":
            note = "asks for nothing"
        if verdict.kind == "renamed" and row.is_fallback:
            note += ", unless another flag says otherwise"
        return Finding(words, verdict.kind, note, row)
    except UserError as error:
        return Finding(words, "malformed", str(error))


def _check_value(given: Given) -> None:
    """Raise if a field does not take the value."""
    spec = given.target
    assert isinstance(spec, Spec)
    if not given.values or (spec.base is bool and spec.count == "one" and spec.parse is None):
        return
    try:
        spec.convert(given.values[0] if spec.count == "one" else list(given.values))
    except ValueError as error:
        raise UserError(str(error)) from None


def _spelling(given: Given) -> str:
    """Return the main flag where another spelling was given."""
    spec = given.target
    assert isinstance(spec, Spec)
    return f"an alias of {spec.flag}" if given.flag in map(normalise, spec.aliases) else ""


def as_table(found: Sequence[Finding]) -> Mapping[Kind, list[Finding]]:
    """Return the findings by kind, those that stop a run first."""
    order: tuple[Kind, ...] = (
        "refused",
        "unknown",
        "malformed",
        "open",
        "empty",
        "renamed",
        "no effect",
        "same",
    )
    return {kind: [f for f in found if f.kind == kind] for kind in order}
