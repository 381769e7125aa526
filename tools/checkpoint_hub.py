"""What `checkpoint.py` does with models of the transformers library (a part of that tool)."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.bridge.hugging_face import TOKEN_IDS, Import, export, main_dtype
from megatron.bridge.writing import write_weights
from megatron.core.dist_checkpointing.format import DTYPES
from megatron.core.dist_checkpointing.stream import Shape
from megatron.core.progress import Bar
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError, human_bytes
from megatron.training.checkpoints import remade
from megatron.training.checkpoints.contents import WEIGHTS
from tools.checkpoint_flags import ConvertConfig
from tools.checkpoint_reading import open_checkpoint, say
from tools.checkpoint_writing import write_ours

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What `--copy-tokenizer` copies: what turns text into ids and back. generation_config.json, which
chooses how their library samples, is none of it."""


def import_model(config: ConvertConfig, folder: Path) -> int:
    """Make a checkpoint of ours of a model of the transformers library."""
    if config.target != "megatron":
        raise UserError(f"--to {config.target}: convert to this project's format first, then on")
    with Import(folder) as model:
        dtype = config.params_dtype and remade.PRECISIONS[config.params_dtype]
        shapes = {
            f"{WEIGHTS}{name}": Shape(dtype or tensor.dtype, tensor.shape)
            for name, tensor in model.tensors.items()
        }
        tokenizer_config, tokenizer = _tokenizer(config, folder, say)
        facts = remade.imported(
            model.config,
            model.rows,
            dtype or main_dtype(model.tensors),
            tokenizer_config,
            tokenizer,
        )
        facts["config"] |= model.family.run_settings
        facts["hugging_face"] = {"architecture": model.family.architecture, **model.token_ids}

        def read(key: str, box: Any) -> Any:
            values = model.read(key.removeprefix(WEIGHTS), box)
            return values if dtype is None else values.to(DTYPES[dtype])

        write_ours(config.save, "release", shapes, read, facts, config.files)
    return 0


def _tokenizer(
    config: ConvertConfig, folder: Path, say: Any
) -> "tuple[TokenizerConfig, Tokenizer | None]":
    """Return the tokenizer of a folder of theirs: that of the flags, or what lies beside."""
    place = folder
    if config.copy_tokenizer:
        place = Path(config.save) / "tokenizer"
        copied = _copy_tokenizer(folder, place)
        say(f"copied {', '.join(copied) or 'no file of a tokenizer'} to {place}")
    chosen = config.tokenizer
    if chosen.tokenizer_type is None:
        found = _beside(place.resolve())
        if found is None:
            say(
                f"{folder} has no tokenizer that is known here; whoever loads the weights must "
                "name one (--tokenizer-type ...)"
            )
            return chosen, None
        chosen = dataclasses.replace(chosen, **found)
    return chosen, build_tokenizer(chosen)


def _beside(folder: Path) -> dict[str, str] | None:
    """Return the settings of the tokenizer in a folder; None if there is none."""
    if (folder / "tokenizer.json").exists():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.exists() and merges.exists():
        files = {"vocab_file": str(vocab), "merge_file": str(merges)}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    if (folder / "tokenizer.model").exists():
        model = str(folder / "tokenizer.model")
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": model}
    return None


def _copy_tokenizer(source: Path, target: Path) -> list[str]:
    there = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if there:
        target.mkdir(parents=True, exist_ok=True)
    for name in there:
        shutil.copyfile(source / name, target / name)
    return there


def export_model(config: ConvertConfig) -> int:
    """Write the weights of a checkpoint as a model of the transformers library."""
    target = Path(config.save)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"--save ({target}) is not empty; give another folder")
    with open_checkpoint(config.load, config.ckpt_step) as source:
        facts = remade.with_vocabulary(source.facts, source, config.tokenizer)
        if "num_layers" not in facts.get("config", {}):
            raise UserError(f"{source.folder} does not say what model it is of; nothing to convert")
        dtype = config.params_dtype and remade.PRECISIONS[config.params_dtype]
        view = remade.View(source, facts, dtype=dtype, weights_only=True)
        if remade.EMBEDDING not in view.tensors:
            raise UserError(f"{source.folder} holds no weights of a language model")
        known = facts.get("hugging_face", {})
        made = export(
            remade.part_of(TransformerConfig, facts),
            view.tensors[remade.EMBEDDING].shape[0],
            {key.removeprefix(WEIGHTS): shape for key, shape in view.shapes.items()},
            lambda name, box: view.read(WEIGHTS + name, box),
            token_ids={name: known[name] for name in TOKEN_IDS if name in known},
        )
        architecture = made.settings["architectures"][0]
        if made.left_out:
            say(
                f"{architecture} has no {'; '.join(made.left_out)}: left out, it changes nothing "
                "but training; give the flags again to whoever trains on"
            )
        if target.exists():
            target.rmdir()
        with Bar(sum(shape.bytes for shape in made.tensors.values()), "wrote") as bar:
            files = write_weights(
                target,
                made.tensors,
                made.read,
                made.settings,
                most_bytes=int(config.max_shard_size * 2**30),
                told=bar,
            )
        if config.copy_tokenizer:
            say(_copy_known_tokenizer(facts.get("config", {}), target))
    size = sum((target / name).stat().st_size for name in files)
    print(
        f"wrote {target}: {architecture}, {len(made.tensors)} tensors, "
        f"{human_bytes(size)} in {len(files)} file(s)"
    )
    return 0


def _copy_known_tokenizer(settings: Mapping[str, Any], target: Path) -> str:
    """Copy the files that a run's settings name, and those beside a tokenizer.json; say which."""
    if settings.get("tokenizer_type") == "NullTokenizer":
        return (
            "--copy-tokenizer: NullTokenizer, which the checkpoint names, has no files: its texts "
            "are ids, and so is what the exported model is given"
        )
    copied: list[str] = []
    for name, as_name in (
        ("vocab_file", "vocab.json"),
        ("merge_file", "merges.txt"),
        ("tokenizer_model", None),
    ):
        path = settings.get(name)
        if path is None:
            continue
        source = Path(path)
        if source.is_dir() or source.name == "tokenizer.json":
            copied += _copy_tokenizer(source if source.is_dir() else source.parent, target)
        elif source.exists():
            shutil.copyfile(source, target / (as_name or source.name))
            copied.append(as_name or source.name)
        else:
            raise UserError(f"--copy-tokenizer: {path}, which the checkpoint names, is not there")
    return f"copied {', '.join(copied) or 'no file of a tokenizer'} to {target}"
