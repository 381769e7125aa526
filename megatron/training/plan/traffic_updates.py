"""What making new weights moves, in closed form: matrices that Muon needs from several ranks.

A rank updates the matrices that lie in its share of the buffers. Of each that is cut over
tensor-parallel ranks it moves, with f the bytes of a number in the optimizer (4, or 8 with --fp64):

    duplicated    tp  all_gather  1 x M N f             the update, gathered whole
    distributed   tp  all_reduce  1 x f, n x G G g      for each matrix that it is made of: its
                                                        norm, and in each of n iterations the
                                                        products over the dim that is cut, of size
                                                        G; g is 2 in bfloat16, else f
    blockwise     nothing

Matrices of experts are cut over ``etp``, and each moves by itself.
"""

from collections.abc import Mapping

from megatron.core.optimizer.memory import BYTES
from megatron.training.config import RunConfig
from megatron.training.plan.buffer_plans import (
    BufferKey,
    chunk_buffers,
    chunk_parameters,
    shares_of,
)
from megatron.training.plan.parameter_shapes import ParameterShape
from megatron.training.plan.traffic_passes import Book
from megatron.training.plan.traffic_shares import share_of


def add_updates(
    book: Book, config: RunConfig, padded_rows: int, coordinates: Mapping[str, int]
) -> None:
    """Add what the optimizer moves on a rank; coordinates that are absent count as 0."""
    optimizer, pp_rank = config.optimizer, coordinates["pp"]
    if optimizer.optimizer != "muon" or optimizer.muon_tp_mode == "blockwise":
        return
    whole = {
        parameter.name: parameter
        for chunk in chunk_parameters(config, padded_rows, pp_rank, ways=1)
        for parameter in chunk
    }
    parts = {
        parameter.name: parameter
        for chunk in chunk_parameters(config, padded_rows, pp_rank)
        for parameter in chunk
    }
    for plan in (plan for chunk in chunk_buffers(config, padded_rows, pp_rank) for plan in chunk):
        if plan.rule != "muon":
            continue
        assert isinstance(plan.key, BufferKey)
        share = share_of(config, coordinates, experts=plan.key.expert)
        spans = plan.shards(share, shares_of(config, plan))
        for slot in plan.slots:
            if any(start <= slot.start < stop for start, stop in spans):
                _add_matrix(book, config, parts[slot.name], whole[slot.name])


def _add_matrix(book: Book, config: RunConfig, part: ParameterShape, whole: ParameterShape) -> None:
    if part.shape == whole.shape:
        return
    optimizer, number = config.optimizer, BYTES[config.precision.accumulation_dtype]
    axis, ways, times = "tp", config.parallel.tensor_model_parallel_size, 1
    if part.expert:
        axis, ways, times = "etp", config.parallel.expert_tensor_parallel_size, part.shape[0]
    (rows, columns), (all_rows, all_columns) = part.shape[-2:], whole.shape[-2:]
    if optimizer.muon_tp_mode == "duplicated":
        book.add(axis, "all_gather", ways * rows * columns * number, times)
        return
    in_half = optimizer.muon_fp32_matmul_prec == "medium" and not config.precision.fp64
    across = all_columns if rows != all_rows else all_rows
    blocks = times * _blocks(config, part.name)
    book.add(axis, "all_reduce", number, blocks)
    gram = across * across * (BYTES["bfloat16"] if in_half else number)
    book.add(axis, "all_reduce", gram, blocks * optimizer.muon_num_ns_steps)


def _blocks(config: RunConfig, name: str) -> int:
    """Return how many matrices one is made of, as Muon takes it apart."""
    if name.endswith("linear_qkv.weight"):
        return 3 if config.optimizer.muon_split_qkv else 1
    return 2 if name.endswith("linear_fc1.weight") and config.model.mlp.is_gated else 1
