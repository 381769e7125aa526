"""Which samples a run needs, and where in the data it is."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron.core.datasets import samples
from megatron.core.datasets.blended import Dataset
from megatron.core.datasets.builder import Built, Sizes, TokenInfo, build_datasets
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.plan import positions
from megatron.core.datasets.sources import read_sources
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import Say
from megatron.training.config import RunConfig
from megatron.training.own_loaders import refuse_external

if TYPE_CHECKING:  # a dry run asks for sizes without importing torch
    from megatron.training.batches import Samples
    from megatron.training.external import Loader


class RunData(Protocol):
    """The data sets of a run, as `megatron.core.datasets.builder.build_datasets` returns them.

    With ``--dataloader-type external`` loaders take their place; see `external`.
    """

    @property
    def train(self) -> Any: ...

    @property
    def valid(self) -> "Sequence[Samples | Loader]": ...

    @property
    def test(self) -> Any: ...

    @property
    def valid_names(self) -> Sequence[str]: ...


def sizes(config: RunConfig, say: Say) -> Sizes:
    """Return the samples asked of train, valid and test: None for one pass, 0 for no data set.

    A split that nobody names data for is not evaluated, with a line that says so. Loaders of the
    program's own (`external`) name their data themselves.
    """
    training, validation = config.training, config.validation
    train = 0 if training.skip_train else training.train_samples or config.total_samples
    batch, iterations = config.batch_sizes.final, validation.eval_iters
    evaluations = 1
    if validation.eval_interval is not None:
        evaluations += config.total_iterations // validation.eval_interval
    valid: int | None = evaluations * iterations * batch
    test: int | None = iterations * batch
    if iterations == -1:
        valid = test = None
    elif iterations and config.data.full_validation:
        valid = None
    if config.data.dataloader_type == "external":
        return train, valid, test
    sources = read_sources(config.data)
    if valid != 0 and sources["valid"] is None:
        say("no validation data: there will be no evaluation on a validation set")
        valid = 0
    if test != 0 and sources["test"] is None:
        test = 0
    return train, valid, test


def data_sets(
    program: str,
    config: RunConfig,
    wanted: Sizes,
    tokenizer: Tokenizer,
    policy: BuildPolicy,
    say: Say,
) -> Built:
    """Return the training, validation and test sets that the data flags say.

    Args:
        program: whose name messages have.
        config: of the run.
        wanted: samples of each set.
        tokenizer: of the run.
        policy: which process builds indices.
        say: told of what is built.

    Raises:
        UserError: loaders are asked for, which a program has to bring; or as for the builder.
    """
    refuse_external(config.data, program)
    info, seed = TokenInfo.of(tokenizer), config.training.seed
    return build_datasets(config.data, wanted, info, seed, policy, say=say)


def index_lines(data: RunData) -> Iterator[str]:
    """Yield how many index files were there, how many had to be built, and by what."""
    if isinstance(data, Built) and data.files:
        states = list(data.files.values())
        yield f"index: {states.count('hit')} files found, {states.count('built')} built"
        if "built" in states:
            numpy = "numpy (the helper is not compiled)"
            yield f"index arrays by {numpy if samples.HELPERS is None else 'the compiled helper'}"


def unneeded(config: DataConfig) -> tuple[str, ...]:
    """Return what a sample has and a model does not need: positions that only count up."""
    return () if config.reset_position_ids else ("position_ids",)


def is_read(config: RunConfig, pp_coordinate: int) -> bool:
    """Return whether a rank of the pipeline reads samples.

    It does if it holds an end of the model, or if a sample says more to a layer than its hidden
    states do: routers of experts ask which tokens count, an encoder-decoder which are padding.
    """
    ends = {0, config.placement.num_stages - 1}
    if not ends.isdisjoint(config.placement.positions(pp_coordinate)):
        return True
    data, model = config.data, config.model
    says_more = model.moe.num_experts is not None or model.has_two_stacks
    is_packed = data.reset_attention_mask or data.bert.masked_words
    return data.reset_position_ids or is_packed or says_more


def epochs(dataset: Dataset | None) -> Callable[[int], Sequence[tuple[str, float]]]:
    """Return what tells (source, passes over it) after a number of consumed samples.

    Empty for data sets that are no corpora of tokens.
    """
    if not isinstance(dataset, Dataset):
        return lambda consumed: ()
    return lambda consumed: [
        (one.source.rsplit("/", 1)[-1], one.epoch) for one in positions(dataset, consumed)
    ]
