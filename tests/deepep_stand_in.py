"""A package with the interface of DeepEP's `Buffer`, over gloo: tokens travel by one exchange."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.kernels import probe
from megatron.core.transformer.moe import deepep


class Config:
    """Sizes of buffers, as the package hints at them."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """DeepEP's, as its documentation describes it; any dtype."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.group, self.rank, self.ranks = group, group.rank(), group.size()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, None, Tensor, Tensor, None]:
        """Tokens of each rank and expert, and which token goes to which rank."""
        assert topk_idx.dtype == torch.int64 and num_experts % self.ranks == 0
        own = num_experts // self.ranks
        to_TR = torch.zeros(len(topk_idx), self.ranks, dtype=torch.bool)
        for token, chosen in enumerate(topk_idx.tolist()):
            for expert in chosen:
                if expert >= 0:
                    to_TR[token, expert // own] = True
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return to_TR.sum(0).int(), None, per_expert.int(), to_TR, None

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, None]:
        """Tokens in the order of the ranks they come from."""
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            (from_N, _), sent, received = handle
            return self._exchange(x[from_N], sent, received), None, None, None, None, None
        assert topk_idx is not None and topk_weights is not None
        assert num_tokens_per_rank is not None and is_token_in_rank is not None
        assert num_tokens_per_rdma_rank is None and num_tokens_per_expert is not None
        sent = num_tokens_per_rank.tolist()
        counts = [torch.zeros_like(num_tokens_per_rank) for _ in range(self.ranks)]
        dist.all_gather(counts, num_tokens_per_rank, group=self.group)
        received = [int(count[self.rank]) for count in counts]
        to_rank, from_N = is_token_in_rank.t().nonzero(as_tuple=True)
        own = len(num_tokens_per_expert) // self.ranks
        local = topk_idx[from_N] - own * to_rank[:, None]
        is_here = (local >= 0) & (local < own) & (topk_idx[from_N] >= 0)
        numbers = self._exchange(local.where(is_here, -1), sent, received)
        weights = self._exchange(topk_weights[from_N].where(is_here, 0.0), sent, received)
        sizes = [int((numbers == expert).sum()) for expert in range(own)]
        handle = ((from_N, len(x)), sent, received)
        return self._exchange(x[from_N], sent, received), numbers, weights, sizes, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        """Sums over the ranks a token went to."""
        (from_N, tokens), sent, received = handle

        def summed(rows: Tensor) -> Tensor:
            back = self._exchange(rows, received, sent)
            return back.new_zeros(tokens, *back.shape[1:]).index_add_(0, from_N, back)

        return summed(x), None if topk_weights is None else summed(topk_weights), None


def install(patch: pytest.MonkeyPatch) -> None:
    """Let this process find the stand-in, on any device and for any dtype."""
    patch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))
    patch.setattr(deepep, "why_not", lambda device, dtype: None)
    probe.missing.cache_clear()
