"""The text of ``--help``: every flag under its config, with its default and meaning."""

import textwrap
from collections.abc import Iterator, Mapping

from megatron.core.config import Config, Spec

WIDTH = 100
INDENT = 6


def render(declared: Mapping[str, Spec], program: str, leading: str | None = None) -> str:
    """Return the whole help of a program with these flags.

    Args:
        declared: the flags, by field.
        program: its name, and its verb after a space.
        leading: field that takes the words before the first flag.
    """
    name, _, verb = program.partition(" ")
    first = f"[{placeholder(declared[leading])}]" if leading is not None else ""
    lines = [
        " ".join(filter(None, (f"usage: {name}.py", verb, first, "[--FLAG [VALUE ...]] ..."))),
        "",
        "Underscores may stand for hyphens, also inside integers; a repeated flag takes its last",
        "value; a switch has a negative form. docs/flags.md lists the flags of Megatron-LM that",
        "are renamed, without effect or not supported.",
    ]
    for owner, fields in by_owner(declared):
        lines += ["", title(owner)]
        for spec in fields:
            lines += entry(spec)
    return "\n".join(lines)


def entry(spec: Spec) -> list[str]:
    """Return the lines of one flag."""
    text = f"{spec.help.rstrip('.')}. [{default(spec)}]"
    wrapped = textwrap.wrap(text, WIDTH - INDENT)
    return [f"  {signature(spec)}", *(" " * INDENT + line for line in wrapped)]


def signature(spec: Spec) -> str:
    """Return the flag with its values and its other spellings."""
    first = f"{spec.flag} {placeholder(spec)}".rstrip()
    others = [*spec.aliases, *([spec.negative] if spec.negative else []), *spec.constants]
    return ", ".join([first, *others])


def placeholder(spec: Spec) -> str:
    """Return what stands for the values of a flag."""
    if spec.base is bool and spec.count == "one" and spec.parse is None:
        return ""
    if spec.metavar:
        one = spec.metavar
        return f"{one} ..." if spec.count == "many" else one
    if spec.choices:
        one = "{" + ",".join(map(str, spec.choices)) + "}"
    else:
        one = {int: "N", float: "X", str: "TEXT"}[spec.base]
    if spec.count == "many":
        return f"{one} ..."
    return " ".join([one] * spec.count) if isinstance(spec.count, int) else one


def default(spec: Spec) -> str:
    """Return what holds when a flag is not given."""
    if spec.required:
        return "required"
    if spec.derived:
        return f"derived: {spec.derived}"
    if spec.base is bool and spec.count == "one" and spec.parse is None:
        return "on" if spec.default else "off"
    if spec.default is None or spec.default == ():
        return "none"
    return f"default: {spec.default}"


def title(owner: type[Config]) -> str:
    """Return a config's name and what it is."""
    summary = (owner.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    return f"{owner.__name__}: {summary[:1].lower()}{summary[1:]}"


def by_owner(declared: Mapping[str, Spec]) -> Iterator[tuple[type[Config], list[Spec]]]:
    """Yield each config with the fields it declares itself."""
    grouped: dict[type[Config], list[Spec]] = {}
    for spec in declared.values():
        grouped.setdefault(spec.owner, []).append(spec)
    yield from grouped.items()
