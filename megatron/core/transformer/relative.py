"""Learned attention biases by the distance of key and query (Raffel et al., 2020, section 2.1).

    score[i, j] += bias[head, bucket(j - i)]

Short distances have a bucket each, longer ones share buckets whose widths grow as a geometric
series up to ``max_distance``, and all beyond share the last. An encoder has half of the buckets for
keys after the query; a decoder, which sees none of these, all for keys before it. A stack has one
table, which all its layers share: every rank of a pipeline holds it, and gradients are summed over
them.

Shapes: S queries and T keys, n heads on this rank, L distances.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.context_parallel.partition import positions
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.position_config import PositionConfig
from megatron.core.utils import divide


class RelativePositions(nn.Module):
    """The biases of one stack; each tensor-parallel rank holds those of its heads.

    Args:
        config: of positions.
        num_heads: of the whole model.
        init: of the table.
        mesh: axes and device.
        dtype: of the table.
        bidirectional: queries see keys after them too.
    """

    def __init__(
        self,
        config: PositionConfig,
        num_heads: int,
        init: Init,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        self.buckets = config.relative_attention_num_buckets
        self.max_distance, self.bidirectional = (
            config.relative_attention_max_distance,
            bidirectional,
        )
        self.axis = mesh.cp
        shape, cut = (self.buckets, num_heads), (mesh.tp.coordinate, mesh.tp.size)
        record = sharding.split(shape, init, 1, *cut, matrix=False)
        (region,) = record.regions
        record = replace(record, regions=(replace(region, replicated=("pp",), summed=("pp",)),))
        own = (self.buckets, divide(num_heads, mesh.tp.size))
        self.weight = make_parameter(record, own, mesh, dtype)

    def forward(self, length: int) -> Tensor:
        """Return bias_1nST of a sample of ``length`` positions, as many as T.

        S are the queries of this context-parallel rank.
        """
        device = self.weight.device
        # One bias for each distance there is; a query's row is a window of these.
        distances_L = torch.arange(1 - length, length, device=device)
        buckets_L = bucket(distances_L, self.buckets, self.max_distance, self.bidirectional)
        # A bias's gradient is a sum over all pairs of its bucket: it is taken in a wide dtype.
        wide = self.weight.to(accumulate_dtype(self.weight.dtype))
        table_nL = F.embedding(buckets_L, wide).t()
        here_S = positions(length, self.axis.coordinate, self.axis.size).to(device)
        bias_nST = table_nL.unfold(1, length, 1)[:, length - 1 - here_S]
        return bias_nST.to(self.weight.dtype)[None]


def bucket(distances: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bucket of each distance, position of key - position of query, int64."""
    first = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        first = buckets * (distances > 0)
        away = distances.abs()
    else:
        away = (-distances).clamp(min=0)
    exact = buckets // 2
    # In fp32 whatever the model's dtype is: roundings at the bounds of buckets belong to them.
    steps = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    further = (exact + (steps * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(away < exact, away, further)
