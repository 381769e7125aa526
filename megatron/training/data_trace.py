"""What an iteration of a run read, found again by the functions that the run reads by.

    iteration -> positions in the run -> samples of the training set -> documents and places

All of it follows from the run's config; nothing that the run wrote is needed. A run whose batch
size was changed between two of its parts has read other positions than the last config says: its
metrics file has them (``first_sample``, ``last_sample``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.config import specs
from megatron.core.datasets.builder import build_datasets
from megatron.core.datasets.sampler import sample_order
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.datasets.trace import Trace, trace
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import UserError
from megatron.training import data as run_data
from megatron.training.config import RunConfig


@dataclass(frozen=True)
class Place:
    """Where in an iteration a sample was read."""

    iteration: int
    microbatch: int
    replica: int


def positions_of(config: RunConfig, iteration: int) -> range:
    """Return the positions in the run that an iteration, counted from 1, reads.

    Raises:
        UserError: the run has no such iteration.
    """
    if not 1 <= iteration <= config.total_iterations:
        raise UserError(
            f"--iteration {iteration}: the run has iterations 1 to {config.total_iterations}"
        )
    sizes = config.batch_sizes
    first = sizes.samples(iteration - 1)
    return range(first, first + sizes.at(first))


def place_of(config: RunConfig, position: int) -> Place:
    """Return where the sample at a position in the run is read."""
    iteration = config.batch_sizes.iterations(position) + 1
    number = position - config.batch_sizes.samples(iteration - 1)
    micro = config.training.micro_batch_size
    return Place(
        iteration, number // config.samples_per_pass, number // micro % config.data_parallel_size
    )


class RunReader:
    """The training set of a run and the order in which it is read.

    Raises:
        UserError: the data is not there, or is not read by samples of a data set.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        if config.data.dataloader_type == "external":
            raise UserError(
                "--dataloader-type external: the run's own loader decides what it reads; samples "
                "cannot be found from here"
            )
        self.config = config
        asked, _, _ = run_data.sizes(config, lambda line: None)
        info = TokenInfo.of(tokenizer)
        train = build_datasets(config.data, (asked, 0, 0), info, config.training.seed).train
        if train is None:
            raise UserError("the run trains on nothing (--skip-train)")
        self.dataset = train
        self._order = sample_order(
            config.data.dataloader_type,
            len(train),
            config.total_samples,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_size=config.data_parallel_size,
        )

    def check(self, position: int) -> None:
        """Refuse a position that the run does not reach.

        Raises:
            UserError: it is negative, or the run ends before it.
        """
        if not 0 <= position < self.config.total_samples:
            raise UserError(
                f"--sample {position}: the run reads samples 0 to {self.config.total_samples - 1}"
            )

    def read(self, position: int) -> Trace:
        """Return what stands at a position in the run.

        Raises:
            UserError: the run ends before it.
        """
        self.check(position)
        return trace(self.dataset, self._order(position))


def stored_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stored run config by name, as the config holds them.

    Names that this version does not know are passed over.

    Raises:
        UserError: a value cannot be used.
    """
    values = {}
    for name, spec in specs(RunConfig).items():
        try:
            if name in flat:
                values[name] = spec.convert(flat[name])
        except ValueError as error:
            raise UserError(f"the run's {name} cannot be used: {error}") from None
    return values
