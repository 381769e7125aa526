"""From a command line or a file to (flag, values) pairs: spelling and number of values only.

Flags are spelled as configs declare them or as the table of other flags lists them; underscores may
stand for hyphens, and ``--flag=value`` for ``--flag value``. What the values mean is `arguments`'s.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.core.config import Spec, spellings
from megatron.core.utils import UserError, nearest
from megatron.training.flag_status import Row

Place = Literal["flag", "file"]


@dataclass(frozen=True)
class Given:
    """One flag as somebody gave it."""

    flag: str
    """Normalised spelling."""
    values: tuple[Any, ...]
    """Strings from a command line; a file's values keep their type. A switch has none or a bool."""
    place: Place
    target: Spec | Row

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
            close = nearest(name, self.working) or nearest(name, self.targets)
            parts.append(f"{flag} (did you mean {' or '.join(close)}?)" if close else flag)
        return UserError(f"unknown flag{'s' * (len(parts) > 1)}: {', '.join(parts)}; see --help")


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
        UserError: the file cannot be read, or holds an unknown name.
    """
    found: list[Given] = []
    unknown: list[str] = []
    for key, value in _leaves(load_file(path), vocabulary):
        flag = normalise(str(key))
        target = vocabulary.targets.get(flag)
        if target is None:
            unknown.append(str(key))
        elif value is not None:
            found += _from_file(flag, value, target)
    if unknown:
        raise UserError(f"{path}: {vocabulary.unknown(unknown)}")
    return found


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
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--config {path}: not YAML: {error}") from None
    elif Path(path).suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"--config {path}: not JSON: {error}") from None
    else:
        raise UserError(f"--config {path}: the name must end in .json, .yaml or .yml")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: must hold names and values, not a {type(content)}")
    return content


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
