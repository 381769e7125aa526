"""How configs are declared: flags, conversions, derivation."""

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from megatron.core.config import (
    Config,
    check_at_least,
    flag_of,
    option,
    resolve,
    specs,
    spellings,
)
from megatron.core.utils import UserError


class Inner(Config):
    width: int = option(derived="4 x --size")
    """Width of it."""

    bias: bool = option(True, aliases={"--disable-bias": False})
    """Add a bias."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"width": 4 * values["size"]}


class Outer(Config):
    size: int = option(aliases=("--old-size",))
    """Size
    of all."""

    inner: Inner
    kind: Literal["a", "b"] = option("a")
    betas: tuple[float, float] = option((0.9, 0.95))
    paths: tuple[str, ...] | None = option(None)
    rate: float | None = option(None)


def test_flags_and_help_follow_from_the_declaration() -> None:
    found = specs(Outer)
    assert spellings(found["size"]) == ["--size", "--old-size"]
    assert spellings(found["bias"]) == ["--bias", "--no-bias", "--disable-bias"]
    assert found["size"].help == "Size of all."
    assert found["size"].required and not found["width"].required
    assert found["betas"].count == 2 and found["paths"].count == "many"
    assert found["kind"].choices == ("a", "b")


def test_resolution_derives_what_nobody_gave() -> None:
    config, values, derived = resolve(Outer, {"size": 3})
    assert (config.inner.width, derived) == (12, {"width"})
    assert values["bias"] is True
    config, _, derived = resolve(Outer, {"size": 3, "width": 5})
    assert (config.inner.width, derived) == (5, set())


def test_none_asks_for_the_derivation() -> None:
    assert resolve(Outer, {"size": 2, "width": None})[0].inner.width == 8


def test_a_tree_flattens_to_what_builds_it() -> None:
    config = Outer.resolve(size=3, kind="b", bias=False)
    assert Outer.resolve(**config.flatten()) == config


def test_missing_and_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match="--size"):
        Outer.resolve()
    with pytest.raises(ValueError, match="sizes"):
        Outer.resolve(size=1, sizes=2)


def test_a_name_or_a_flag_declared_twice_is_a_bug() -> None:
    class Twice(Config):
        outer: Outer
        size: int = option(1)

    class SameFlag(Config):
        first: int = option(1)
        second: int = option(1, flag="--first")

    with pytest.raises(TypeError, match="size is declared in"):
        specs(Twice)
    with pytest.raises(TypeError, match="--first belongs to"):
        specs(SameFlag)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("size", "220_000", 220000),
        ("size", "1e6", 1000000),
        ("rate", "3", 3.0),
        ("rate", None, None),
        ("betas", [1, 2], (1.0, 2.0)),
        ("paths", "one", ("one",)),
        ("bias", False, False),
        ("kind", "b", "b"),
    ],
)
def test_conversion(name: str, value: Any, expected: Any) -> None:
    converted = specs(Outer)[name].convert(value)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", "many", "--size takes int, not 'many'"),
        ("size", "1.5", "--size takes int"),
        ("size", True, "--size takes int"),
        ("size", None, "may not be null"),
        ("bias", "yes", "true or false"),
        ("kind", "c", "one of a, b; not 'c'"),
        ("betas", [1], "takes 2 values, not 1"),
    ],
)
def test_bad_values_name_the_flag(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specs(Outer)[name].convert(value)


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Outer.resolve(size=1).size = 2  # type: ignore[misc]


class Named(Config):
    inner: Inner
    size: int = option()
    world_size: int | None = option(None, flag="--dry-run-world-size")


def test_a_message_names_the_flag_that_a_field_has() -> None:
    assert flag_of(Named, "world_size") == "--dry-run-world-size"
    assert flag_of(Named, "width") == "--width"
    with pytest.raises(KeyError):
        flag_of(Named, "depth")


def test_a_bound_is_checked_field_by_field() -> None:
    config = Named.resolve(size=1, world_size=0)
    check_at_least(config, 1, "size")
    check_at_least(config, 0, "size", "world_size")
    check_at_least(Named.resolve(size=1), 1, "world_size")
    with pytest.raises(UserError, match=r"^--dry-run-world-size \(0\) must be at least 1$"):
        check_at_least(config, 1, "size", "world_size")
    with pytest.raises(UserError, match=r"^--size \(-1\) must not be negative$"):
        check_at_least(Named.resolve(size=-1), 0, "size")
