"""Look into checkpoints, check, copy, compare and convert them, on a machine of any size.

    tools/checkpoint.py inspect CHECKPOINT                  # what is in it
    tools/checkpoint.py inspect CHECKPOINT --tensor NAME    # the values of a tensor
    tools/checkpoint.py verify CHECKPOINT                   # every byte against its checksum
    tools/checkpoint.py diff ONE OTHER                      # where they differ
    tools/checkpoint.py reshard --load A --save B           # a copy in large boxes
    tools/checkpoint.py convert --from hf --load MODEL --save B     # other formats
    tools/checkpoint.py VERB --help

A checkpoint is named by its own folder, or by the folder that holds several: then the newest
complete one is taken, or --ckpt-step. Nothing is ever held whole in memory. Exit codes: 0 as it
should be, 1 damaged or different, 2 wrong flags.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.progress import Bar
from megatron.core.utils import UserError, human_bytes, human_count, nearest
from megatron.training.arguments import parse_tool, run_main
from tools.checkpoint_flags import DiffConfig, InspectConfig, VerifyConfig

PROGRAM = "checkpoint"


def one_folder(load: Sequence[str], verb: str) -> str:
    """Return the folder that a verb is about.

    Raises:
        UserError: none was named, or several.
    """
    if len(load) != 1:
        raise UserError(f"{verb} takes one checkpoint, not {len(load)}: {PROGRAM}.py {verb} FOLDER")
    return load[0]


def inspect(words: Sequence[str]) -> int:
    """Say what is in a checkpoint."""
    config = parse_tool(words, InspectConfig, f"{PROGRAM} inspect", leading="load").config
    from tools.checkpoint_reading import described, open_checkpoint

    with open_checkpoint(one_folder(config.load, "inspect"), config.ckpt_step) as source:
        found = described(source)
        unknown = [name for name in config.tensor if name not in source.tensors]
        if unknown:
            meant = nearest(f"model.{unknown[0].removeprefix('model.')}", source.tensors)
            raise UserError(
                f"--tensor {unknown[0]}: {source.folder} has no such tensor"
                + (
                    f"; did you mean {' or '.join(meant)}?"
                    if meant
                    else f"; {PROGRAM}.py inspect {config.load[0]} lists them"
                )
            )
        if config.tensor:
            from megatron.core.dist_checkpointing.statistics import statistics

            size = sum(found["tensors"][name]["bytes"] for name in config.tensor)
            with Bar(size, "read") as bar:
                found["statistics"] = {
                    name: statistics(name, source.tensors[name].shape, source.read, bar).to_json()
                    for name in config.tensor
                }
    if config.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(inspect_lines(found, config)))
    return 0


def inspect_lines(found: Mapping[str, Any], config: InspectConfig) -> list[str]:
    """Return what was found as a person reads it."""
    if config.tensor:
        lines = []
        for name, values in found["statistics"].items():
            kind = found["tensors"][name]
            lines.append(f"{name}  {kind['dtype']} {kind['shape']}")
            lines += [f"  {word:9} {value}" for word, value in values.items()]
        return lines
    lines = [
        f"{found['folder']}: format {found['format']}, {human_bytes(found['bytes'])} in "
        f"{found['files']} file(s), hash {found['hash']}"
    ]
    facts = found["facts"]
    published = facts.get("published")
    told = {
        "iteration": facts.get("iteration"),
        "consumed samples": facts.get("progress", {}).get("consumed_samples"),
        "written": datetime.fromtimestamp(published).isoformat(" ", "seconds")
        if published
        else None,
        **{f"by {name}": value for name, value in facts.get("environment", {}).items()},
        "objective": facts.get("objective"),
        "vocabulary": facts.get("vocabulary_rows"),
        "tokenizer": facts.get("tokenizer"),
    }
    lines += [f"  {name:17} {value}" for name, value in told.items() if value is not None]
    settings = facts.get("config", {})
    lines.append(
        f"  {'settings':17} {len(settings)}" + (":" if config.settings else " (--settings)")
    )
    if config.settings:
        lines += [f"    {name} = {value}" for name, value in sorted(settings.items())]
    lines.append("parts")
    for name, part in found["parts"].items():
        lines.append(
            f"  {name:25} {part['tensors']:5} tensors {human_count(part['elements']):>9} elements "
            f"{human_bytes(part['bytes']):>11}"
        )
    width = max((len(name) for name in found["tensors"]), default=0)
    lines.append("tensors")
    for name, tensor in found["tensors"].items():
        boxes = f"{tensor['boxes']} boxes" if tensor["boxes"] != 1 else "1 box"
        lines.append(
            f"  {name:{width}}  {tensor['dtype']:9} {str(tensor['shape']):16} "
            f"{human_bytes(tensor['bytes']):>11}  {boxes}"
        )
    return lines


def verify(words: Sequence[str]) -> int:
    """Compare every byte with its checksum; return 1 and list what is damaged."""
    config = parse_tool(words, VerifyConfig, f"{PROGRAM} verify", leading="load").config
    from tools.checkpoint_reading import claimed, has_checksums

    folder = one_folder(config.load, "verify")
    sources, damages = claimed(folder, config.ckpt_step, everything=config.all)
    size, tensors = 0, 0
    for source in sources:
        with source, Bar(sum(source.files.values()), "checked") as bar:
            damages += [f"{source.folder}: {text}" for text in source.damages(None, bar)]
        size += sum(source.files.values())
        tensors += len(source.tensors)
    if damages:
        print("\n".join(damages))
        print(f"{folder}: {len(damages)} damage(s)")
        return 1
    names = ", ".join(source.folder.name for source in sources)
    only = "" if all(map(has_checksums, sources)) else "; sizes alone: there are no checksums"
    print(f"{folder}: {names} sound: {tensors} tensors, {human_bytes(size)}{only}")
    return 0


def diff(words: Sequence[str]) -> int:
    """Say where two checkpoints differ; return 1 if they do."""
    config = parse_tool(words, DiffConfig, f"{PROGRAM} diff", leading="load").config
    if len(config.load) != 2:
        raise UserError(f"diff takes two checkpoints, not {len(config.load)}: diff ONE OTHER")
    from tools.checkpoint_comparing import compared
    from tools.checkpoint_reading import is_hub_folder, open_checkpoint

    one, other = config.load
    theirs = [folder for folder in config.load if is_hub_folder(Path(folder))]
    if len(theirs) == 1:
        raise UserError(
            f"{theirs[0]} is in the format of the transformers library, whose tensors have other "
            f"names and shapes; convert it first: {PROGRAM}.py convert --load {theirs[0]} "
            "--save FOLDER"
        )
    with (
        open_checkpoint(one, config.ckpt_step) as left,
        open_checkpoint(other, config.ckpt_step) as right,
    ):
        names = {*left.tensors, *right.tensors}
        for flag, beginnings in (("--only", config.only), ("--ignore", config.ignore)):
            for beginning in beginnings:
                if not any(name.startswith(beginning) for name in names):
                    raise UserError(
                        f"{flag} {beginning}: neither has a tensor whose name begins so"
                    )
        found = compared(left, right, config.tolerance, only=config.only, ignore=config.ignore)
    if config.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(diff_lines(found, one, other)))
    return 0 if found["equal"] else 1


def diff_lines(found: Mapping[str, Any], one: str, other: str) -> list[str]:
    """Return the differences as a person reads them."""
    lines = []
    for name, entry in found["tensors"].items():
        where = {"left": f"only in {one}", "right": f"only in {other}"}.get(entry.get("only"))
        if where:
            lines.append(f"{name}: {where}")
        for word in ("shape", "dtype"):
            if word in entry:
                lines.append(f"{name}: {word} {entry[word][0]} and {entry[word][1]}")
        if "different" in entry:
            at = ", ".join(map(str, entry["first"]))
            a, b = entry["first_values"]
            lines.append(
                f"{name}: {entry['different']} of {entry['elements']} values differ, by "
                f"{entry['max_absolute']:.6g} at most (relative {entry['max_relative']:.3g}), "
                f"first at [{at}]: {a!r} and {b!r}"
            )
    for name, (a, b) in found["facts"].items():
        lines.append(f"fact {name}: {a!r} and {b!r}")
    verdict = "equal" if found["equal"] else "different"
    noted = len(found["tensors"]) - found["different"]
    lines.append(
        f"{found['compared']} tensors compared, {found['different']} different"
        + f" ({noted} more named that do not count)" * bool(noted)
        + f", {found['different_facts']} facts different" * bool(found["different_facts"])
        + f": {verdict}"
    )
    return lines


def reshard(words: Sequence[str]) -> int:
    """Copy a checkpoint into large boxes."""
    from tools import checkpoint_writing

    return checkpoint_writing.reshard(words)


def convert(words: Sequence[str]) -> int:
    """Bring a checkpoint into another format."""
    from tools import checkpoint_writing

    return checkpoint_writing.convert(words)


VERBS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "reshard": reshard,
    "convert": convert,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    verb = words[0]
    if verb in VERBS:
        return VERBS[verb](words[1:])
    if "--loader" in words or "--saver" in words:
        return convert(words)  # as the old tool was called: flags alone
    raise UserError(f"{verb}: the first word is one of {', '.join(VERBS)}")


if __name__ == "__main__":
    run_main(main, PROGRAM)
