"""Operations of a run on one sample, whichever stacks its model has."""

from megatron.training.config import RunConfig
from megatron.training.plan import operations_gpt, operations_t5


def flops_per_sample(config: RunConfig, padded_rows: int) -> int:
    """Return the operations that training on one sample takes."""
    if config.model.has_two_stacks:
        return operations_t5.flops_per_sample(config, padded_rows)
    return operations_gpt.flops_per_sample(config.model, config.data.seq_length, padded_rows)


def recomputed_flops_per_sample(config: RunConfig, padded_rows: int) -> dict[str, int]:
    """Return the operations on one sample that backward does again, by what makes them again."""
    if config.model.has_two_stacks:
        return operations_t5.recomputed_flops_per_sample(config, padded_rows)
    return operations_gpt.recomputed_flops_per_sample(config, padded_rows)
