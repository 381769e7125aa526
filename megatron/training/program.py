"""What an entry point brings to a run: how to build its model and its data sets, a forward step."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.datasets.builder import Sizes
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import Say
from megatron.training.build import BuildModel
from megatron.training.config import RunConfig
from megatron.training.data import RunData
from megatron.training.passes import ForwardStep


@dataclass(frozen=True, kw_only=True)
class Program:
    """What an entry point brings to a run."""

    build_model: BuildModel
    """Returns this rank's chunks of the model, one for each of its stages, with named records;
    initial values are drawn later."""
    build_datasets: Callable[[RunConfig, Sizes, Tokenizer, BuildPolicy, Say], RunData]
    """Returns the data sets, or loaders of the program's own (see `external`); the policy says
    whether this process builds index files or waits for them."""
    forward_step: ForwardStep
