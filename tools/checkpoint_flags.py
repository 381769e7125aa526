"""What may be asked of `checkpoint.py`: flags of its verbs, formats, and words of the old tool."""

from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError
from megatron.training.flags.flag_status import Row

# Names of the old tool for what is found out here, or has no meaning.
_OLD_NAMES = {
    "mcore": "megatron",
    "core": "megatron",
    "llama_mistral": "hf",
    "huggingface": "hf",
    "gpt2_hf": "hf",
}
ANY_OF_MEGATRON = "mcore"
OTHERS = tuple(
    Row(flag, values, "no effect", why=why)
    for flag, values, why in (
        ("--megatron-path", "1", "this program is all that is needed"),
        ("--max-queue-size", "1", "one process reads and writes"),
        ("--no-checking", "0", "what does not fit is always refused"),
        ("--checkpoint-type", "1", "the format is found out by the files"),
        ("--model-size", "1", "the files say it"),
        ("--loader-transformer-impl", "1", "checkpoints hold no implementation"),
        ("--saver-transformer-impl", "1", "checkpoints hold no implementation"),
        ("--position-embedding-type", "1", "the files say it"),
        ("--true-vocab-size", "1", "give --vocab-size"),
    )
)


def source_named(text: str) -> str:
    """Return the format that is to be read; the old tool's words mean any of Megatron's.

    Raises:
        UserError: there is none of this name.
    """
    return ANY_OF_MEGATRON if text.lower() in ("mcore", "core") else format_named(text)


def format_named(text: str) -> str:
    """Return the format that a word of this tool or of the old one means.

    Raises:
        UserError: it means none.
    """
    word = _OLD_NAMES.get(text.lower(), text.lower())
    known = ("megatron", "torch_dist", "torch", "hf")
    if word not in known:
        raise UserError(f"{text!r} is no format of checkpoints; there are {', '.join(known)}")
    return word


class InspectConfig(Config):
    """What to look at."""

    load: tuple[str, ...] = option((), metavar="FOLDER")
    """The checkpoint; may also come first, without the flag."""

    ckpt_step: int | None = option(None)
    """Iteration to take of a folder of checkpoints; the newest when absent."""

    tensor: tuple[str, ...] = option((), metavar="NAME")
    """Say which values these tensors have: least, largest, mean, norm, NaN."""

    settings: bool = option(False)
    """List all settings of the run."""

    json: bool = option(False)
    """Print one JSON object."""


class VerifyConfig(Config):
    """What to check."""

    load: tuple[str, ...] = option((), metavar="FOLDER")
    """The checkpoint; may also come first, without the flag."""

    ckpt_step: int | None = option(None)
    """Iteration to take of a folder of checkpoints; when absent, the one that a run would
    start from, and then what such a run would pass over counts as damage."""

    all: bool = option(False)
    """Check every checkpoint of the folder."""


class DiffConfig(Config):
    """What to compare."""

    load: tuple[str, ...] = option((), metavar="FOLDER")
    """Two checkpoints; may also come first, without the flag."""

    ckpt_step: int | None = option(None)
    """Iteration to take where a folder of checkpoints is given; the newest when absent."""

    only: tuple[str, ...] = option((), metavar="BEGINNING")
    """Compare only tensors whose names begin so, such as model. or optimizer.exp_avg."""

    ignore: tuple[str, ...] = option((), metavar="BEGINNING")
    """Leave out tensors whose names begin so, such as random. (generators)."""

    tolerance: float = option(0.0)
    """Values as far apart as this, or by this share of the larger one, count as equal; then
    another dtype is no difference either. 0 is exact, but for the sign of zero."""

    json: bool = option(False)
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise UserError(f"--tolerance ({self.tolerance}) must not be negative")


class ReshardConfig(Config):
    """What to copy."""

    load: str = option(metavar="FOLDER")
    """The checkpoint, or a folder of checkpoints."""

    save: str = option(metavar="FOLDER")
    """Folder of checkpoints to write to; it gets a tracker if it has none."""

    ckpt_step: int | None = option(None)
    """Iteration to take of a folder of checkpoints; the newest when absent."""

    files: int = option(1)
    """Files to write. No layout needs a certain number: every rank reads the boxes it needs."""

    params_dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = option(None)
    """Dtype of the weights in the copy, made of their finer copies where there are any."""

    optim: bool = option(True)
    """Keep the optimizer's state; without, the copy is for --finetune, --no-load-optim and
    generation."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "files")


class ConvertConfig(Config):
    """What to convert, and into what."""

    load: str = option(aliases=("--load-dir",), metavar="FOLDER")
    """A checkpoint, a folder of checkpoints, or a folder of the transformers library."""

    save: str = option(aliases=("--save-dir",), metavar="FOLDER")
    """Folder to write to."""

    source: str | None = option(
        None, flag="--from", aliases=("--loader",), parse=source_named, metavar="FORMAT"
    )
    """megatron (this project's), torch_dist, torch (Megatron-LM's), or hf (the transformers
    library's); the files say it when absent. mcore, as the old tool has it, is any but hf."""

    target: str = option(
        "megatron", flag="--to", aliases=("--saver",), parse=format_named, metavar="FORMAT"
    )
    """megatron (this project's), torch_dist (Megatron-core's), or hf."""

    model_type: Literal["GPT"] = option("GPT")
    """Kind of model."""

    ckpt_step: int | None = option(None)
    """Iteration to take of a folder of checkpoints; the newest when absent."""

    target_tensor_parallel_size: int | None = option(None)
    """Taken from scripts of the old tool; the result can be read by any layout."""

    target_pipeline_parallel_size: int | None = option(None)
    """Likewise."""

    files: int = option(1)
    """Files to write, in this project's format."""

    max_shard_size: float = option(5.0, metavar="GIB")
    """Size above which the transformers library's format goes on in a further file."""

    params_dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = option(None)
    """Dtype of the weights; as they are when absent."""

    optim: bool = option(True)
    """Keep the optimizer's state, where both formats can hold one."""

    copy_tokenizer: bool = option(False)
    """Copy a tokenizer's files beside the weights."""

    tokenizer: TokenizerConfig

    def __post_init__(self) -> None:
        check_at_least(self, 1, "files", "target_tensor_parallel_size")
        check_at_least(self, 1, "target_pipeline_parallel_size")
        if not self.max_shard_size > 0:
            raise UserError(f"--max-shard-size ({self.max_shard_size}) must be above 0")
