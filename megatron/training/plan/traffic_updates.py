"""What making new weights moves, in closed form: matrices that Muon needs from several ranks.

A rank updates the matrices that lie in its share of the buffers. Of each that is cut over
tensor-parallel ranks it moves, with f the bytes of a number in the optimizer (4, or 8 with --fp64):

    duplicated    tp  all_gather  1 x M N f             the update, gathered whole
    distributed   tp  all_reduce  1 x f, n x G G g      for each matrix that it is made of: its
                                                        norm, and in each of n iterations the
                                                        products over the dim that is cut, of size
                                                        G; g is 2 in bfloat16, else f
    blockwise     nothing
"""

import math
from collections.abc import Mapping

from megatron.core.optimizer.memory import BYTES
from megatron.training.config import RunConfig
from megatron.training.plan.accounting import ParameterShape, chunk_buffers, chunk_parameters
from megatron.training.plan.traffic_passes import Book
from megatron.training.plan.traffic_shares import share_of


def add_updates(
    book: Book, config: RunConfig, padded_rows: int, coordinates: Mapping[str, int]
) -> None:
    """Add what the optimizer moves on a rank; coordinates that are absent count as 0."""
    optimizer, tp = config.optimizer, config.parallel.tensor_model_parallel_size
    if optimizer.optimizer != "muon" or tp == 1 or optimizer.muon_tp_mode == "blockwise":
        return
    pp_rank, share = coordinates["pp"], share_of(config, coordinates)
    whole = {
        parameter.name: parameter
        for chunk in chunk_parameters(config, padded_rows, pp_rank, tp=1)
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
        spans = plan.shards(share, config.shares)
        for slot in plan.slots:
            if any(start <= slot.start < stop for start, stop in spans):
                _add_matrix(book, config, parts[slot.name], whole[slot.name])


def _add_matrix(book: Book, config: RunConfig, part: ParameterShape, whole: ParameterShape) -> None:
    if part.shape == whole.shape:
        return
    optimizer, number = config.optimizer, BYTES[config.precision.accumulation_dtype]
    if optimizer.muon_tp_mode == "duplicated":
        ways = config.parallel.tensor_model_parallel_size
        book.add("tp", "all_gather", ways * math.prod(part.shape) * number)
        return
    in_half = optimizer.muon_fp32_matmul_prec == "medium" and not config.precision.fp64
    across = whole.shape[1] if part.shape[0] != whole.shape[0] else whole.shape[0]
    blocks = _blocks(config, part.name)
    book.add("tp", "all_reduce", number, blocks)
    gram = across * across * (BYTES["bfloat16"] if in_half else number)
    book.add("tp", "all_reduce", gram, blocks * optimizer.muon_num_ns_steps)


def _blocks(config: RunConfig, name: str) -> int:
    """Return how many matrices one is made of, as Muon takes it apart."""
    if name.endswith("linear_qkv.weight"):
        return 3 if config.optimizer.muon_split_qkv else 1
    return 2 if name.endswith("linear_fc1.weight") and config.model.mlp.is_gated else 1
