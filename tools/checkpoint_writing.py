"""What `checkpoint.py` writes: copies in large boxes, and other formats (a part of that tool)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.progress import Bar
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError, check_folder, human_bytes
from megatron.training.arguments import parse_tool
from tools.checkpoint_flags import ANY_OF_MEGATRON, OTHERS, ConvertConfig, ReshardConfig

if TYPE_CHECKING:  # torch is imported when the flags are in order: --help does without
    from megatron.core.dist_checkpointing.catalog import Name
    from megatron.core.dist_checkpointing.reader import Checkpoint
    from megatron.training.checkpoints.remade import View

PROGRAM = "checkpoint"


def reshard(words: Sequence[str]) -> int:
    """Copy a checkpoint into large boxes."""
    config = parse_tool(words, ReshardConfig, f"{PROGRAM} reshard").config
    check_folder("--save", config.save)
    from megatron.core.dist_checkpointing.format import FORMAT
    from megatron.training.checkpoints import remade
    from tools.checkpoint_reading import open_checkpoint, say

    if config.optim and config.params_dtype is None:
        say("no layout needs this: a checkpoint in this project's format is read by any as it is")
    dtype = None if config.params_dtype is None else remade.PRECISIONS[config.params_dtype]
    with open_checkpoint(config.load, config.ckpt_step) as source:
        if source.format != FORMAT:
            raise UserError(f"{source.folder} is in the format {source.format}; convert reads it")
        _not_in_place(source.folder, config.save)
        facts = remade.copied(source.facts, dtype=dtype, with_optimizer=config.optim)
        view = remade.View(source, facts, dtype=dtype, with_optimizer=config.optim)
        write_ours(config.save, _name_of(source), view.shapes, view.read, facts, config.files)
    return 0


def convert(words: Sequence[str]) -> int:
    """Bring a checkpoint into another format."""
    config = parse_tool(words, ConvertConfig, f"{PROGRAM} convert", others=OTHERS).config
    from tools.checkpoint_reading import is_hub_folder, say

    _refuse_targets(config, say)
    _tell_rows(config.tokenizer, say)
    check_folder("--save", config.save)
    folder = Path(config.load)
    theirs = config.source == "hf" or (config.source is None and is_hub_folder(folder))
    if theirs and config.target == "hf":
        raise UserError(
            f"--load ({config.load}) is in the format hf, and so is --to; nothing to do"
        )
    if theirs or config.target == "hf":
        from tools import checkpoint_hub

        if theirs:
            return checkpoint_hub.import_model(config, folder)
        return checkpoint_hub.export_model(config)
    return _convert_ours(config)


def _tell_rows(given: TokenizerConfig, say: Any) -> None:
    """Say that a null tokenizer has one row more than its flag says, where it has."""
    if given.tokenizer_type != "NullTokenizer" or given.vocab_size is None:
        return
    if given.null_tokenizer_eod_id is None:
        say(
            f"--tokenizer-type NullTokenizer: --vocab-size {given.vocab_size} and one more row, "
            "for the end of document (--null-tokenizer-eod-id chooses one of the others)"
        )


def _refuse_targets(config: ConvertConfig, say: Any) -> None:
    """Say what becomes of a wanted layout, and refuse a format that nobody writes here."""
    if config.target == "torch":
        raise UserError(
            "--to torch: Megatron-LM's older format, which is cut for one layout, is not written "
            "here; Megatron-LM reads --to torch_dist on any layout"
        )
    for flag, size in (
        ("--target-tensor-parallel-size", config.target_tensor_parallel_size),
        ("--target-pipeline-parallel-size", config.target_pipeline_parallel_size),
    ):
        if size is not None:
            say(f"{flag} {size} has no effect: the result is read by any layout")


def _name_of(source: "Checkpoint") -> "Name":
    """Return the name that a copy of a checkpoint has among others."""
    is_release = source.folder.name == "release"
    return "release" if is_release else int(source.facts.get("iteration", 0))


def _not_in_place(source: Path, save: str) -> None:
    if source.parent.resolve() == Path(save).resolve():
        raise UserError(f"--save ({save}) holds the checkpoint itself; give another folder")


def write_ours(
    save: str, name: "Name", shapes: Mapping[str, Any], read: Any, facts: Any, files: int
) -> None:
    """Write a checkpoint of ours and, in a folder without one, the tracker."""
    from megatron.core.dist_checkpointing import stream

    final = _new_folder(save, name)
    with Bar(sum(shape.bytes for shape in shapes.values()), "wrote") as bar:
        index = stream.write(final, shapes, read, facts, files=files, told=bar)
    _track(Path(save), name)
    print(
        f"wrote {final}: {len(index.tensors)} tensors, {human_bytes(index.bytes)} in "
        f"{len(index.files)} file(s), hash {index.hash}"
    )


def _new_folder(save: str, name: "Name") -> Path:
    """Return the folder of a checkpoint that is not there yet."""
    from megatron.core.dist_checkpointing import catalog

    final = Path(save) / catalog.folder_name(name)
    if final.exists():
        raise UserError(f"{final} exists already; give another --save, or remove it")
    return final


def _track(root: Path, name: "Name") -> None:
    """Let the tracker name a checkpoint, unless it names another one."""
    from megatron.core.dist_checkpointing import catalog
    from tools.checkpoint_reading import say

    tracked = catalog.read_tracker(root)
    if tracked is None:
        catalog.write_tracker(root, name)
    else:
        say(f"{root / catalog.TRACKER} still names {tracked}")


def _convert_ours(config: ConvertConfig) -> int:
    """Convert between formats that hold our tensors."""
    from megatron.core.dist_checkpointing.format import FORMAT
    from megatron.core.dist_checkpointing.megatron_formats.export import check_exported_kind
    from megatron.training.checkpoints import remade
    from tools.checkpoint_reading import open_checkpoint

    dtype = None if config.params_dtype is None else remade.PRECISIONS[config.params_dtype]
    with open_checkpoint(config.load, config.ckpt_step) as source:
        found = "megatron" if source.format == FORMAT else source.format
        if config.source not in (None, ANY_OF_MEGATRON, found):
            raise UserError(
                f"{source.folder} is in the format {found}, but --from (or --loader) says "
                f"{config.source}; leave it out, the files say what they are"
            )
        _not_in_place(source.folder, config.save)
        if config.target == "torch_dist":
            check_exported_kind(source.facts, source.folder, "--to torch_dist")
        with_optimizer = config.optim and source.facts.get("parts", {}).get("optimizer", False)
        facts = remade.copied(source.facts, dtype=dtype, with_optimizer=with_optimizer)
        facts = remade.with_vocabulary(facts, source, config.tokenizer)
        if config.target == "megatron":  # the other's lengths of schedules go by the batch
            facts = remade.without_layout(facts)
        view = remade.View(source, facts, dtype=dtype, with_optimizer=with_optimizer)
        if config.target == "torch_dist":
            write_torch_dist(config.save, _name_of(source), view)
        else:
            write_ours(config.save, _name_of(source), view.shapes, view.read, facts, config.files)
    return 0


def write_torch_dist(save: str, name: "Name", view: "View") -> None:
    """Write a checkpoint of Megatron-core's and, in a folder without one, the tracker."""
    from megatron.core.dist_checkpointing.megatron_formats.export import (
        export_torch_dist,
        left_out,
    )
    from tools.checkpoint_reading import say

    final = _new_folder(save, name)
    if without := left_out(view):
        say(f"torch_dist has no place for {without}")
    with Bar(sum(shape.bytes for shape in view.shapes.values()), "wrote") as bar:
        export_torch_dist(view, final, bar)
    _track(Path(save), name)
    size = sum(path.stat().st_size for path in final.iterdir())
    print(f"wrote {final}: {len(view.shapes)} tensors, {human_bytes(size)}, as torch_dist")
