"""From a command line or a file to (flag, values) pairs: spelling and number of values only.

Flags are spelled as configs declare them or as the table of other flags lists them; underscores may
stand for hyphens, and ``--flag=value`` for ``--flag value``. What the values mean is `arguments`'s.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

from megatron.core.config import Spec, spellings
from megatron.core.utils import UserError, nearest
from megatron.training.flags.flag_status import Row

LEAST_LIKENESS = 0.75
"""Of a spelling that is worth naming; two words have 1 if they are the same."""
MOST_LONGER = 3
"""Flags named that begin with all of an unknown one, as --cpu-offloading-num-layers does."""

Place = Literal["flag", "file"]

OTHER_NAMES = {
    "--learning-rate": "--lr",
    "--min-learning-rate": "--min-lr",
    "--warmup-steps": "--lr-warmup-iters",
    "--warmup-iters": "--lr-warmup-iters",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--lr-scheduler-type": "--lr-decay-style",
    "--batch-size": "--global-batch-size",
    "--train-batch-size": "--global-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--max-steps": "--train-iters",
    "--num-steps": "--train-iters",
    "--train-steps": "--train-iters",
    "--steps": "--train-iters",
    "--n-layer": "--num-layers",
    "--num-hidden-layers": "--num-layers",
    "--n-head": "--num-attention-heads",
    "--num-heads": "--num-attention-heads",
    "--num-key-value-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--head-dim": "--kv-channels",
    "--n-embd": "--hidden-size",
    "--d-model": "--hidden-size",
    "--intermediate-size": "--ffn-hidden-size",
    "--max-seq-len": "--seq-length",
    "--max-seq-length": "--seq-length",
    "--context-length": "--seq-length",
    "--block-size": "--seq-length",
    "--dropout": "--hidden-dropout",
    "--max-grad-norm": "--clip-grad",
    "--grad-clip": "--clip-grad",
    "--beta1": "--adam-beta1",
    "--beta2": "--adam-beta2",
    "--eps": "--adam-eps",
    "--wd": "--weight-decay",
    "--output-dir": "--save",
    "--checkpoint-dir": "--save",
    "--save-dir": "--save",
    "--resume": "--load",
    "--resume-from-checkpoint": "--load",
    "--save-steps": "--save-interval",
    "--eval-steps": "--eval-interval",
    "--logging-steps": "--log-interval",
    "--data": "--data-path",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
}
"""What other programs call our flags, where the spelling alone leads nowhere."""


@dataclass(frozen=True)
class Given:
    """One flag as somebody gave it."""

    flag: str
    """Normalised spelling."""
    values: tuple[Any, ...]
    """Strings from a command line; a file's values keep their type. A switch has none or a bool."""
    place: Place
    target: Spec | Row
    file: str = ""
    """Where it stands, if in a file."""

    @property
    def text(self) -> str:
        """Return the flag and its values as one would write them."""
        return " ".join([self.flag, *map(str, self.values)])


class Vocabulary:
    """Every spelling that is understood."""

    def __init__(self, specs: Mapping[str, Spec], table: Mapping[str, Row]) -> None:
        self.targets: dict[str, Spec | Row] = {normalise(f): row for f, row in table.items()}
        declared = {normalise(f): spec for spec in specs.values() for f in spellings(spec)}
        # A config that declares a flag wins over the table.
        self.targets |= declared
        self.flag_of_field = {name: spec.flag for name, spec in specs.items()}
        self.working = [
            *declared,
            *(f for f, row in table.items() if row.status == "successor" and " " not in f),
        ]

    def unknown(self, flags: Sequence[str]) -> UserError:
        """Return one error for all unknown flags, with spellings near to each."""
        parts = []
        for flag in flags:
            name = normalise(flag)
            other = OTHER_NAMES.get(name)
            close = [other] if other in self.targets else _close(name, self.working)
            close = close or _close(name, self.targets)
            parts.append(f"{flag} (did you mean {' or '.join(close)}?)" if close else flag)
        return UserError(f"unknown flag{'s' * (len(parts) > 1)}: {', '.join(parts)}; see --help")


def _close(name: str, choices: Iterable[str]) -> list[str]:
    """Return the flags spelled like ``name``, as far as one may have mistyped it or cut it off."""
    bare = [choice.removeprefix("--") for choice in choices]
    word = name.removeprefix("--")
    alike = [
        choice
        for choice in nearest(word, bare)
        if SequenceMatcher(None, choice, word).ratio() >= LEAST_LIKENESS
    ]
    longer = sorted((choice for choice in bare if choice.startswith(f"{word}-")), key=len)
    return [f"--{choice}" for choice in alike or longer[:MOST_LONGER]]


def normalise(flag: str) -> str:
    """Return a flag with hyphens for underscores."""
    return "--" + flag.removeprefix("--").replace("_", "-")


def read_command_line(argv: Sequence[str], vocabulary: Vocabulary) -> list[Given]:
    """Return the flags of a command line, in order.

    Raises:
        UserError: a flag is unknown, has too few or too many values, or a word belongs to no flag.
    """
    found: list[Given] = []
    unknown: list[str] = []
    for word, values in _words(argv):
        flag = normalise(word)
        target = vocabulary.targets.get(flag)
        if target is None:
            unknown.append(word)
        else:
            found.append(Given(flag, _counted(word, values, arity(target, flag)), "flag", target))
    if unknown:
        raise vocabulary.unknown(unknown)
    return found


def read_file(path: str, vocabulary: Vocabulary) -> list[Given]:
    """Return the settings of a JSON or YAML file as if they were flags.

    Keys are names of flags without the leading hyphens; sections may nest and their names are free.
    A file that ``--dump-config`` wrote gives what was chosen, not what was derived from it.

    Raises:
        UserError: the file cannot be read, holds an unknown name, names a file of its own, or gives
            two values to one setting.
    """
    found: list[Given] = []
    unknown: list[str] = []
    for key, value in _leaves(load_file(path), vocabulary):
        flag = normalise(str(key))
        target = vocabulary.targets.get(flag)
        if target is None:
            unknown.append(str(key))
        elif isinstance(target, Spec) and target.name == "config":
            raise UserError(
                f"--config {path}: {key} would name another file, which is not read; write its "
                "settings into this one"
            )
        elif value is not None:
            try:
                found += _from_file(flag, value, target)
                _check_once(found)
            except UserError as error:
                raise UserError(f"--config {path}: {error}") from None
    if unknown:
        raise UserError(f"--config {path}: {vocabulary.unknown(unknown)}")
    return [replace(item, file=path) for item in found]


def _check_once(found: Sequence[Given]) -> None:
    """Refuse a last setting that an earlier one gives another value."""
    if not found:
        return
    *earlier, last = found
    for item in earlier:
        if item.target is last.target and _meaning(item) != _meaning(last):
            raise UserError(
                f"{item.text} and {last.text} are the same setting with different values; "
                "leave one out"
            )


def _meaning(item: Given) -> tuple[str, tuple[str, ...]]:
    """Return what a setting asks for, whatever alias it is spelled by."""
    spec = item.target
    switches = () if isinstance(spec, Row) else (spec.negative or "", *spec.constants)
    return item.flag if item.flag in map(normalise, switches) else "", tuple(map(str, item.values))


def arity(target: Spec | Row, flag: str) -> str:
    """Return how many values a flag takes, as the table of flags writes it."""
    if isinstance(target, Row):
        return target.values
    if flag in map(normalise, target.constants):
        return "0"
    if target.base is bool and target.count == "one":
        return "switch"
    return {"one": "1", "many": "+"}.get(str(target.count), str(target.count))


def _words(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that follow it."""
    flag: str | None = None
    values: list[str] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            if flag is not None:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        elif flag is None:
            raise UserError(f"{word!r} comes before any flag; flags start with --")
        else:
            values.append(word)
    if flag is not None:
        yield flag, values


def _counted(flag: str, values: list[str], count: str) -> tuple[str, ...]:
    """Return the values, if there are as many as the flag takes."""
    if count.isdigit() and int(count) > 1 and len(values) == 1:
        values = values[0].split()  # quoted as one word, as in "$RAMPUP"
    allowed = {
        "switch": len(values) <= 1,
        "?": len(values) <= 1,
        "*": True,
        "+": len(values) >= 1,
    }
    if count in allowed and allowed[count]:
        return tuple(values)
    if count.isdigit() and len(values) == int(count):
        return tuple(values)
    if count == "1" and len(values) > 1:
        extra = " ".join(values[1:])
        raise UserError(f"{flag} {values[0]}: {extra!r} is unexpected; {flag} takes one value")
    shown = f", not {' '.join(values)!r}" if values else ""
    takes = {
        "0": "no value",
        "1": "one value",
        "switch": "no value",
        "?": "at most one value",
        "+": "one or more values",
    }
    raise UserError(f"{flag} takes {takes.get(count, f'{count} values')}{shown}")


def _from_file(flag: str, value: Any, target: Spec | Row) -> list[Given]:
    switch = isinstance(target, Row) or arity(target, flag) in ("0", "switch")
    if isinstance(value, bool) and switch:
        is_constant = isinstance(target, Spec) and flag in map(normalise, target.constants)
        if value or not (isinstance(target, Row) or is_constant):
            return [Given(flag, () if value else (False,), "file", target)]
        if isinstance(target, Spec) and target.base is bool:
            # disable_bias_linear: false asks for what the switch would turn off.
            opposite = next(v for f, v in target.constants.items() if normalise(f) == flag)
            return [Given(target.flag, (not opposite,), "file", target)]
        return []
    if isinstance(target, Spec) and target.parse is not None:
        return [Given(flag, (value,), "file", target)]
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if arity(target, flag) == "1" and len(values) != 1:
        raise UserError(f"{flag} takes one value, not {value!r}")
    return [Given(flag, values, "file", target)]


def load_file(path: str) -> Mapping[str, Any]:
    """Return what a JSON or YAML file of --config holds.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read: {error}") from None
    if Path(path).suffix in (".yaml", ".yml"):
        import yaml

        try:
            content = yaml.load(text, Loader=_yaml_loader(path))
        except yaml.YAMLError as error:
            raise UserError(f"--config {path}: not YAML: {error}") from None
    elif Path(path).suffix == ".json":
        try:
            content = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
        except json.JSONDecodeError as error:
            raise UserError(f"--config {path}: not JSON: {error}") from None
    else:
        raise UserError(f"--config {path}: the name must end in .json, .yaml or .yml")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(
            f"--config {path}: must hold names and values, not a {type(content).__name__}"
        )
    return content


def _yaml_loader(path: str) -> Any:
    """Return a safe loader that refuses numbers with a leading zero, which YAML takes as octal."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Numbers as people write them, and each name once."""

    def whole_number(loader: Any, node: Any) -> int:
        digits = node.value.lstrip("+-").replace("_", "")
        if len(digits) > 1 and digits[0] == "0" and digits.isdigit():
            raise yaml.YAMLError(
                f"line {node.start_mark.line + 1}: {node.value} would be octal; write it without "
                "the leading zero"
            )
        return int(loader.construct_yaml_int(node))

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        own = [pair for pair in node.value if pair[0].tag != "tag:yaml.org,2002:merge"]
        content: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        _once(path, [tuple(loader.construct_object(part) for part in pair) for pair in own])
        return content

    Loader.add_constructor("tag:yaml.org,2002:int", whole_number)
    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    return Loader


def _once(path: str, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return names and values as a dict; a name with two values is refused."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            raise UserError(
                f"--config {path}: {name} stands there twice, with different values: "
                f"{found[name]} and {value}; leave one out"
            )
        found[name] = value
    return found


def _leaves(content: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[tuple[str, Any]]:
    """Yield names and values, from sections too."""
    origins = content.get("origins")
    if isinstance(origins, dict) and isinstance(content.get("config"), dict):
        for field, value in content["config"].items():
            if origins.get(field) != "derived":
                yield vocabulary.flag_of_field.get(field, field), value
        return
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, vocabulary)
        else:
            yield key, value
