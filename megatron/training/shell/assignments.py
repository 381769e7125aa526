"""Assignments of bash: texts, arrays, single elements, and what ``declare`` and ``local`` say."""

import re
from collections.abc import Sequence

from megatron.training.shell.arithmetic import Unknown
from megatron.training.shell.conditions import ASSIGNMENT
from megatron.training.shell.words import ATOM, Value, Variables, arithmetic, array, joined, table

NAME = re.compile(r"[A-Za-z_]\w*")


class Assignments:
    """Sets variables, and remembers what is local to a function."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.locals: list[dict[str, Value | None]] = []
        """Values outside, of variables that are local to each function being run."""

    def declare(self, raw: Sequence[str]) -> None:
        """Follow ``declare``, ``local`` or ``export``, which may assign."""
        kind, *words = raw
        options = "".join(word for word in words if word[:1] == "-")
        for word in words:
            match = ASSIGNMENT.fullmatch(word)
            name = match[1] if match else word
            if not NAME.fullmatch(name):
                continue
            if self.locals and kind != "export" and "g" not in options:
                self.locals[-1].setdefault(name, self.variables.get(name))
            if "A" in options:
                self.variables.set(name, {})
            if match:
                self.assign(match)

    def assign(self, match: re.Match[str]) -> None:
        """Follow ``name=value``, as `ASSIGNMENT` takes it apart."""
        name, index, more, raw = match.groups()
        variables = self.variables
        appends = bool(more) or re.match(rf'"?\s*\${{?{name}}}?\s', raw) is not None
        variables.assigned[name] += not appends
        if index is not None:
            self._assign_element(name, index[1:-1], joined(raw, variables))
            return
        if raw.startswith("(") and raw.endswith(")"):
            self._assign_array(name, raw, bool(more), appends)
        else:
            self._assign_text(name, raw, bool(more), appends)

    def _assign_text(self, name: str, raw: str, more: bool, appends: bool) -> None:
        variables, before = self.variables, self.variables.get(name)
        if before is None and appends and not self._absent(name):
            variables.set(name, "")  # ARGS="$ARGS --more" starts from nothing
        text = joined(raw, variables)
        atom = ATOM.fullmatch(text.strip())
        if atom and variables.show(atom[0]).startswith("$("):
            variables.unknown.setdefault(variables.show(atom[0]), name)
        if more and isinstance(before, list):
            variables.set(name, [(before[0] if before else "") + text, *before[1:]])
        elif more and not isinstance(before, dict):
            old = before if isinstance(before, str) else "".join(self._absent(name))
            variables.set(name, old + text, appends=True)
        else:
            variables.set(name, text, appends=appends)

    def _assign_array(self, name: str, raw: str, more: bool, appends: bool) -> None:
        variables, before = self.variables, self.variables.get(name)
        if isinstance(before, dict):
            old = before if more else {}
            variables.set(name, {**old, **table(raw, variables)}, appends=appends)
            return
        items = array(raw, variables)
        if more and before is None:
            items = [*self._absent(name), *items]
        elif more and isinstance(before, str) and name in variables.fixed:
            items = [*before.split(), *items]  # given as text
        elif more:
            items = [*([before] if isinstance(before, str) else before or []), *items]
        variables.set(name, items, appends=appends)

    def _absent(self, name: str) -> list[str]:
        """Return what a variable holds that has no value here: nothing, or what is not known."""
        atom = self.variables.absent(name, f"${name}")
        return [atom] if name in self.variables.unknown else []

    def _assign_element(self, name: str, index: str, text: str) -> None:
        variables = self.variables
        value = variables.get(name)
        if isinstance(value, dict):
            variables.set(name, {**value, joined(index, variables): text})
            return
        items = [value] if isinstance(value, str) else list(value or [])
        try:
            place = arithmetic(index, variables)
        except Unknown:
            place = -1
        if not 0 <= place <= len(items):
            variables.set_unknown(name, is_array=True)
        else:
            variables.set(name, [*items[:place], text, *items[place + 1 :]])
