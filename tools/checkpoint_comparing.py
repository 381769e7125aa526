"""Where two checkpoints differ, for `checkpoint.py diff` (a part of that tool)."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.core.dist_checkpointing.format import StoredTensor
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.statistics import difference
from megatron.core.optimizer.schedule import Schedule, differences
from megatron.core.progress import Bar
from megatron.training.checkpoints.contents import RANDOM
from megatron.training.checkpoints.facts import completed_schedule
from tools.checkpoint_reading import tensor_bytes

# Facts that say when, where and by how many ranks a checkpoint was written, and the run's settings:
# they are listed where they differ, but two checkpoints are not different for it.
ASIDE = ("environment", "config", "parts.random")
# Facts that say nothing where a checkpoint lacks them.
OPTIONAL = (*ASIDE, "vocabulary", "tokenizer", "objective", "hugging_face")


def compared(
    left: Checkpoint,
    right: Checkpoint,
    tolerance: float,
    *,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Return where two checkpoints differ, as JSON has it.

    Rows that pad one of them are left out. Facts count, but for those of `ASIDE`; where ``only``
    chooses tensors they are left out. A tensor whose entry has ``decides`` false is only noted.
    """
    keys = sorted(left.tensors.keys() | right.tensors.keys())
    keys = [key for key in keys if not only or key.startswith(tuple(only))]
    keys = [key for key in keys if not key.startswith(tuple(ignore))]
    both = [key for key in keys if key in left.tensors and key in right.tensors]
    total = sum(tensor_bytes(side.tensors[key]) for side in (left, right) for key in both)
    tensors: dict[str, Any] = {}
    with Bar(total, "compared") as bar:
        for key in keys:
            entry = _compared(key, left, right, tolerance, bar)
            if entry:
                tensors[key] = {**entry, "decides": _decides(key, entry, tolerance)}
    facts = {} if only else _unequal_facts(left.facts, right.facts)
    found = {
        "compared": len(both),
        "different": sum(entry["decides"] for entry in tensors.values()),
        "different_facts": sum(not name.startswith(ASIDE) for name in facts),
    }
    equal = not found["different"] and not found["different_facts"]
    return {"equal": equal, **found, "tensors": tensors, "facts": facts}


def _decides(key: str, entry: Mapping[str, Any], tolerance: float) -> bool:
    """Return whether two checkpoints are different for what was found of one tensor.

    Layouts of more ranks have more generators, and a tolerance is asked for where dtypes differ.
    """
    if "only" in entry:
        return not key.startswith(RANDOM)
    return not (tolerance and entry.keys() == {"dtype"})


def _compared(
    key: str, left: Checkpoint, right: Checkpoint, tolerance: float, bar: Bar
) -> dict[str, Any]:
    """Return what differs of one tensor; nothing if it is equal."""
    a, b = left.tensors.get(key), right.tensors.get(key)
    if a is None or b is None:
        return {"only": "left" if b is None else "right"}
    entry: dict[str, Any] = {}
    if a.dtype != b.dtype:
        entry["dtype"] = [a.dtype, b.dtype]
    shape = _common_shape(a, b)
    if shape is None:
        return {**entry, "shape": [list(tensor.shape) for tensor in (a, b)]}
    found = difference(key, shape, left.read, right.read, tolerance, bar)
    if found.different:
        entry |= {
            "elements": found.elements,
            "different": found.different,
            "max_absolute": found.max_absolute,
            "max_relative": found.max_relative,
            "first": list(found.first or ()),
            "first_values": list(found.first_values or ()),
        }
    return entry


def _common_shape(a: StoredTensor, b: StoredTensor) -> tuple[int, ...] | None:
    """Return the shape of two tensors, without rows that pad one of them; None if they differ."""
    if a.shape == b.shape:
        return a.shape
    if not a.shape or a.shape[1:] != b.shape[1:]:
        return None
    less, more = sorted((a, b), key=lambda tensor: tensor.shape[0])
    return less.shape if more.shape[0] - less.shape[0] < more.padded_to else None


def _unequal_facts(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return which facts differ; some say nothing where a checkpoint lacks them."""
    a, b = _flat(left), _flat(right)
    names = sorted((a.keys() | b.keys()) - {"published"})
    if _have_one_schedule(left, right):
        names = [name for name in names if not name.startswith("schedule.")]
    return {
        name: [a.get(name), b.get(name)]
        for name in names
        if a.get(name) != b.get(name)
        and not (name.startswith(OPTIONAL) and not _says_something(name, a, b))
    }


def _have_one_schedule(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether two schedules have the same curves, as far as both say.

    Megatron-LM's counts in samples, and does not say all that ours does.
    """
    pair = [facts.get("schedule") for facts in (left, right)]
    if not all(pair):
        return False
    whole = [one for one in pair if {item.name for item in fields(Schedule)} <= one.keys()]
    if not whole:
        return False
    config = {**right.get("config", {}), **left.get("config", {})}
    base = Schedule.from_json(whole[0])
    a, b = (completed_schedule(one, base, config) for one in pair)
    return not differences(a, b)


def _says_something(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether both have a fact; a setting may be None, others of that value are absent."""
    if name.startswith("config."):
        return name in a and name in b
    return None not in (a.get(name), b.get(name))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
