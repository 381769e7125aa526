"""Configs: what can be set is declared once, in a frozen dataclass beside the code it configures.

A field of a `Config` gives its default, its type and, in the docstring below it, its help. From
that follow the command-line flag (Megatron's name by default: ``ffn_hidden_size`` is
``--ffn-hidden-size``), the key in a JSON or YAML file, ``--help`` and the dump of a resolved run.
Configs nest; field names are unique in a tree, so flags and file keys stay flat.

    class MLPConfig(Config):
        ffn_hidden_size: int = option(derived="4 x --hidden-size")
        '''Width of the inner layer.'''

        add_bias_linear: bool = option(True, aliases={"--disable-bias-linear": False})
        '''Add a bias to every linear layer.'''

`resolve` builds a tree from flat values: defaults first, then what each class's ``derive`` says
of the values that nobody gave. Nothing here imports torch, so parsing and ``--help`` stay quick.
"""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

from megatron.core.utils import UserError

T = TypeVar("T", bound="Config")
LARGEST = 2**63 - 1
"""What a 64-bit integer holds, such as the numbers of samples in an index."""
Origin = Literal["flag", "file", "checkpoint", "derived", "default"]


def option(
    default: Any = dataclasses.MISSING,
    *,
    flag: str | None = None,
    aliases: Sequence[str] | Mapping[str, Any] = (),
    choices: Sequence[Any] | None = None,
    derived: str | None = None,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    may_be_empty: bool = False,
) -> Any:
    """Declare a field of a config.

    Args:
        default: value when nobody gives one; absent makes the field required.
        flag: spelling of the flag when it is not the field's name with hyphens.
        aliases: further spellings; a mapping gives switches that store a constant,
            such as ``{"--disable-bias-linear": False}``.
        choices: allowed values; a ``Literal`` type gives them too.
        derived: how the value follows from others when it is not given (for people to read);
            the class's ``derive`` computes it.
        parse: turn the command-line or file string into the value, for values that are no plain
            number or string; raises ``ValueError`` on a bad one.
        metavar: placeholder in ``--help``.
        may_be_empty: an empty string is a value, not a shell variable that nobody set.
    """
    if derived is not None and default is dataclasses.MISSING:
        default = None
    metadata = {
        "flag": flag,
        "aliases": aliases,
        "choices": choices,
        "derived": derived,
        "parse": parse,
        "metavar": metavar,
        "may_be_empty": may_be_empty,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
class Config:
    """Base of every config: a subclass is a frozen, keyword-only dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values for fields that nobody gave, from the flat ``values`` of the whole tree."""
        return {}

    @classmethod
    def resolve(cls, **given: Any) -> Self:
        """Return a config built from flat values: given ones, then derived, then defaults."""
        return resolve(cls, given)[0]

    def flatten(self) -> dict[str, Any]:
        """Return every leaf value of the tree by its name."""
        flat: dict[str, Any] = {}
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            flat.update(value.flatten() if isinstance(value, Config) else {item.name: value})
        return flat


def flag_of(cls: type[Config], name: str) -> str:
    """Return the flag of a field of a config tree, for messages.

    Raises:
        KeyError: no config of the tree has such a field.
    """
    for owner in (cls, *_classes(cls)):
        if name in owner.__dataclass_fields__:
            return _flag(owner.__dataclass_fields__[name])
    raise KeyError(name)


def check_at_least(config: Config, bound: int, *names: str) -> None:
    """Refuse fields of ``config`` whose value is below ``bound``; None passes.

    Raises:
        UserError: the first one that is.
    """
    limit = "must not be negative" if bound == 0 else f"must be at least {bound}"
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= bound:  # NaN fails too
            raise UserError(f"{flag_of(type(config), name)} ({value}) {limit}")


def check_at_most(config: Config, bound: int, *names: str) -> None:
    """Refuse fields of ``config`` whose value is above ``bound``; None passes.

    Raises:
        UserError: the first one that is.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value > bound:
            raise UserError(f"{flag_of(type(config), name)} ({value}) must be at most {bound:,}")


def check_above(config: Config, bound: float, *names: str) -> None:
    """Refuse fields of ``config`` whose value is not above ``bound``; None passes.

    Raises:
        UserError: the first one that is not.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > bound:  # NaN fails too
            raise UserError(f"{flag_of(type(config), name)} ({value}) must be above {bound}")


def check_not_zero(config: Config, *names: str) -> None:
    """Refuse factors of ``config`` that are zero; None passes.

    Raises:
        UserError: the first one that is.
    """
    for name in names:
        if getattr(config, name) == 0:
            raise UserError(f"{flag_of(type(config), name)} (0) must not be zero")


def as_json(value: Any) -> Any:
    """Return a value as JSON gives it back: tuples are lists."""
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def as_words(value: Any) -> str:
    """Return a value as one writes it on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What is known of one field: everything that flags, files and help need."""

    name: str
    owner: type[Config]
    base: type
    """Type of one value: bool, int, float or str."""
    optional: bool
    """None is allowed, or the value may be derived."""
    count: int | Literal["one", "many"]
    """How many values the flag takes."""
    choices: tuple[Any, ...] | None
    default: Any
    required: bool
    help: str
    flag: str
    negative: str | None
    """For a bool: the spelling that stores False."""
    aliases: tuple[str, ...]
    """Other spellings that take the same value."""
    constants: Mapping[str, Any]
    """Switches that store a constant."""
    derived: str | None
    parse: Callable[[str], Any] | None
    metavar: str | None
    may_be_empty: bool

    def convert(self, value: Any) -> Any:
        """Return a file's or a checkpoint's ``value`` as this field holds it.

        Raises:
            ValueError: the value has another type, is none of the choices, is empty, or is a number
                that is not finite or does not fit into 64 bits.
        """
        if value is None:
            if not self.optional:
                raise ValueError(f"{self.flag} may not be null")
            return None
        if isinstance(value, str) and value == "" and not self.may_be_empty:
            raise ValueError(f"{self.flag} is empty (an unset shell variable?)")
        if self.parse is not None:
            parsed = self._parsed(value) if isinstance(value, str) else _tupled(value)
            self._check_bits(parsed)
            return parsed
        if self.count == "one":
            return self._convert_one(value)
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(self.count, int) and len(items) != self.count:
            raise ValueError(f"{self.flag} takes {self.count} values, not {len(items)}")
        return tuple(self._convert_one(item) for item in items)

    def _parsed(self, text: str) -> Any:
        """Return what a text of this field's own form says; a message names the flag."""
        assert self.parse is not None, self.name
        try:
            return self.parse(text)
        except UserError as error:
            if self.flag in str(error):
                raise
            raise UserError(f"{self.flag}: {error}") from None

    def _convert_one(self, value: Any) -> Any:
        if isinstance(value, str) and value == "" and not self.may_be_empty:
            raise ValueError(f"{self.flag} holds an empty word (an unset shell variable?)")
        if self.base is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{self.flag} is true or false, not {value!r}")
        elif isinstance(value, bool):
            raise ValueError(f"{self.flag} takes {self.base.__name__}, not {value!r}")
        elif self.base is str:
            value = str(value)
        else:
            value = self._number(str(value).replace("_", ""))
        if self.choices is not None and value not in self.choices:
            listed = ", ".join(map(str, self.choices))
            raise ValueError(f"{self.flag} is one of {listed}; not {value!r}")
        return value

    def _number(self, text: str) -> int | float:
        number: int | float
        try:
            if self.base is float:
                number = float(text)
            else:  # 1e6 in a YAML file is a whole number; plain digits keep all of theirs.
                number = int(text) if text.lstrip("+-").isdigit() else _whole(float(text))
        except (ValueError, OverflowError):
            raise ValueError(f"{self.flag} takes {self.base.__name__}, not {text!r}") from None
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{self.flag} ({text}) must be a finite number")
        self._check_bits(number)
        return number

    def _check_bits(self, value: Any) -> None:
        """Refuse whole numbers of more than 64 bits, wherever they stand in a value."""
        if isinstance(value, tuple):
            for item in value:
                self._check_bits(item)
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{self.flag} ({value}) does not fit into 64 bits")


def specs(cls: type[Config]) -> dict[str, Spec]:
    """Return the fields of a config tree by name.

    Raises:
        TypeError: two fields share a name or a flag, or a type cannot be read from a flag.
    """
    return dict(_specs(cls))  # type: ignore[arg-type]  # classes hash by identity


@functools.cache
def _specs(cls: type[Config]) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    spelled: dict[str, str] = {}
    for spec in _walk(cls):
        if spec.name in found:
            raise TypeError(f"{spec.name} is declared in {found[spec.name].owner} and {spec.owner}")
        found[spec.name] = spec
        for flag in spellings(spec):
            if flag in spelled:
                raise TypeError(f"{flag} belongs to {spelled[flag]} and to {spec.name}")
            spelled[flag] = spec.name
    return found


def spellings(spec: Spec) -> list[str]:
    """Return every flag that sets this field."""
    negative = [spec.negative] if spec.negative else []
    return [spec.flag, *spec.aliases, *negative, *spec.constants]


def resolve(
    cls: type[T], given: Mapping[str, Any], called: Mapping[str, str] | None = None
) -> tuple[T, dict[str, Any], set[str]]:
    """Build a config tree from flat values.

    Args:
        cls: the tree's class.
        given: values by name.
        called: other flags by which messages name what is missing, by name.

    Returns:
        The config, its flat values, and the names whose value was derived.

    Raises:
        ValueError: a name is unknown, a required one is missing, or a class refuses its values.
    """
    declared = specs(cls)
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise ValueError(f"unknown config names: {', '.join(unknown)}")
    names = [spec.name for spec in declared.values() if spec.required and spec.name not in given]
    missing = [(called or {}).get(name, declared[name].flag) for name in names]
    if missing:
        raise ValueError(f"required but not given: {', '.join(missing)}")
    values = {name: given.get(name, spec.default) for name, spec in declared.items()}
    # A derived field given as None asks for the derivation.
    free = {n for n, s in declared.items() if n not in given or (s.derived and given[n] is None)}
    derived: set[str] = set()
    for owner in _classes(cls):
        for name, value in owner.derive(values).items():
            if name in free and value != values[name]:
                values[name] = value
                derived.add(name)
    return _construct(cls, values), values, derived


def _construct(cls: type[T], values: Mapping[str, Any]) -> T:
    arguments = {}
    for name, (nested, _) in _fields(cls).items():
        arguments[name] = _construct(nested, values) if nested else values[name]
    return cls(**arguments)


def _classes(cls: type[Config]) -> Iterator[type[Config]]:
    """Yield the tree's classes, children before parents, each once."""
    for nested, _ in _fields(cls).values():
        if nested:
            yield from _classes(nested)
    yield cls


def _fields(cls: type[Config]) -> Mapping[str, tuple[type[Config] | None, Any]]:
    """Return name -> (nested config class or None, resolved type)."""
    return _resolved(cls)  # type: ignore[arg-type]  # classes hash by identity


@functools.cache
def _resolved(cls: type[Config]) -> Mapping[str, tuple[type[Config] | None, Any]]:
    hints = typing.get_type_hints(cls)
    result: dict[str, tuple[type[Config] | None, Any]] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[item.name]
        nested = hint if isinstance(hint, type) and issubclass(hint, Config) else None
        result[item.name] = (nested, hint)
    return result


def _walk(cls: type[Config]) -> Iterator[Spec]:
    docs = _field_docs(cls)  # type: ignore[arg-type]  # classes hash by identity
    declared = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, (nested, hint) in _fields(cls).items():
        if nested:
            yield from _walk(nested)
        else:
            yield _spec(cls, declared[name], hint, docs.get(name, ""))


def _spec(owner: type[Config], item: dataclasses.Field[Any], hint: Any, help_text: str) -> Spec:
    meta = item.metadata
    base, optional, count, literal = _read_type(owner, item.name, hint, meta.get("parse"))
    flag = _flag(item)
    aliases = meta.get("aliases") or ()
    constants = dict(aliases) if isinstance(aliases, Mapping) else {}
    negative = "--no-" + flag.removeprefix("--") if base is bool and count == "one" else None
    choices = meta.get("choices") or literal
    required = item.default is dataclasses.MISSING
    return Spec(
        name=item.name,
        owner=owner,
        base=base,
        optional=optional or meta.get("derived") is not None,
        count=count,
        choices=tuple(choices) if choices else None,
        default=None if required else item.default,
        required=required,
        help=help_text,
        flag=flag,
        negative=None if negative in constants else negative,
        aliases=() if constants else tuple(aliases),
        constants=constants,
        derived=meta.get("derived"),
        parse=meta.get("parse"),
        metavar=meta.get("metavar"),
        may_be_empty=bool(meta.get("may_be_empty")),
    )


def _flag(item: dataclasses.Field[Any]) -> str:
    return item.metadata.get("flag") or "--" + item.name.replace("_", "-")


def _read_type(
    owner: type[Config], name: str, hint: Any, parse: Callable[[str], Any] | None
) -> tuple[type, bool, int | Literal["one", "many"], tuple[Any, ...] | None]:
    """Return (base type, optional, count, choices) of an annotation."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 or parse else hint
    if parse is not None:
        return str, optional, "one", None
    count: int | Literal["one", "many"] = "one"
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        count = "many" if parts[-1] is Ellipsis else len(parts)
        hint = parts[0]
    choices = None
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        hint = type(choices[0])
    if hint not in (bool, int, float, str):
        raise TypeError(f"{owner.__name__}.{name}: {hint} cannot be read from a flag; give parse=")
    return hint, optional, count, choices


@functools.cache  # a class's source does not change, and parsing it is most of parsing a command
def _field_docs(cls: type[Config]) -> dict[str, str]:
    """Return the docstring that stands below each field in the source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # no source at hand, as in a frozen build: help stays empty
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for node, following in zip(body, body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[node.target.id] = inspect.cleandoc(str(following.value.value)).replace("\n", " ")
    return docs


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"{number} is not whole")
    return int(number)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
