"""Tokens travel to their experts by DeepEP (DeepSeek-AI, 2025): one row for each rank, not choice.

Not yet proven: no machine of this project has run the package. It is used through its documented
interface (`deep_ep.Buffer`: get_dispatch_layout, dispatch, combine), and tested with a stand-in
that has it.

    dispatch    a token goes once to each rank that has an expert of it, its weights with it
    here        rows sorted by expert, their outputs joined with the weights that came
    combine     what ranks made of a token is summed

The backward of either is the other. An expert that is cut over ``etp`` is known to the package as
one for each rank along it: so a token goes to all of them, and their partial sums are summed.

Shapes: T tokens of this rank, M tokens that came, K choices of a token, J of them with one for each
rank along ``etp``, H hidden, E experts of the model.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.permute import Moves, sort_choices
from megatron.core.kernels.probe import INSTALL, missing
from megatron.core.mesh import Mesh
from megatron.core.transformer.moe.dispatcher import Beside, Compute, nothing
from megatron.core.transformer.moe.routing import Routing
from megatron.core.utils import UserError, divide


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why DeepEP cannot be used for a device and dtype; None when it can."""
    reason = missing("deep_ep")
    if reason is not None:
        return f"{reason}; {INSTALL['deep_ep']}"
    if device.type != "cuda":
        return f"DeepEP needs a CUDA device, this is {device.type}"
    return None if dtype == torch.bfloat16 else f"DeepEP needs --bf16, not {dtype}"


def buffer_of(mesh: Mesh, x_TH: Tensor, num_sms: int | None) -> Any:
    """Return the package's buffer for tokens such as these; a collective when it is made.

    All layers of a rank share it.
    """
    if "deep_ep" not in mesh.buffers:
        kind, group = importlib.import_module("deep_ep").Buffer, mesh.etp_ep.group
        if num_sms is not None:
            kind.set_num_sms(num_sms)
        assert group is not None, "one rank holds all experts"
        ranks, size = group.size(), x_TH.shape[1] * x_TH.element_size()
        configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
        near = max(one.get_nvl_buffer_size_hint(size, ranks) for one in configs)
        far = max(one.get_rdma_buffer_size_hint(size, ranks) for one in configs)
        mesh.buffers["deep_ep"] = kind(group, near, far)
    return mesh.buffers["deep_ep"]


class DeepEP:
    """A dispatcher; see `dispatcher.Dispatcher`.

    Raises:
        UserError: the package cannot be used here.
    """

    def __init__(
        self,
        num_experts: int,
        mesh: Mesh,
        moves: Moves,
        dtype: torch.dtype,
        num_sms: int | None = None,
    ) -> None:
        reason = why_not(mesh.device, dtype)
        if reason is not None:
            raise UserError(
                f"--moe-token-dispatcher-type flex: {reason}; or choose "
                "--moe-token-dispatcher-type alltoall"
            )
        self.moves, self.mesh, self.num_sms = moves, mesh, num_sms
        self.ways, self.own = mesh.etp.size, divide(num_experts, mesh.ep.size)
        self.experts = num_experts * self.ways

    def __call__(
        self, x_TH: Tensor, routing: Routing, compute: Compute, beside: Beside = nothing
    ) -> Tensor:
        """See `dispatcher.Dispatcher`."""
        beside()
        chosen_TK, weights_TJ = routing.experts_TK, routing.weights_TK
        ranks_TK = chosen_TK.div(self.own, rounding_mode="floor") * self.ways
        numbers_TK = ranks_TK * self.own + chosen_TK % self.own
        if routing.kept_TK is not None:
            numbers_TK = numbers_TK.masked_fill(~routing.kept_TK, -1)
        numbers_TJ = numbers_TK
        if self.ways > 1:
            steps = self.own * torch.arange(self.ways, device=x_TH.device)
            numbers_TJ = (numbers_TK[..., None] + steps).flatten(1)
            numbers_TJ = numbers_TJ.masked_fill(numbers_TK.repeat_interleave(self.ways, 1) < 0, -1)
            weights_TJ = weights_TJ.repeat_interleave(self.ways, 1)
        buffer, sent = buffer_of(self.mesh, x_TH, self.num_sms), _Sent()
        x_MH, weights_MJ = _Dispatch.apply(
            x_TH.contiguous(), weights_TJ, numbers_TJ, self.experts, buffer, sent
        )
        by = sort_choices(sent.numbers_MJ, sent.numbers_MJ >= 0, sum(sent.sizes))
        y_NH = compute(self.moves.permute(x_MH, by), sent.sizes)
        y_MH = self.moves.unpermute(y_NH, weights_MJ, by)
        return _Combine.apply(y_MH, buffer, sent)  # type: ignore[no-any-return]


class _Sent:
    """What the package says of tokens that were dispatched."""

    numbers_MJ: Tensor
    """Experts of this rank that want each token that came; -1 for those of other ranks."""
    sizes: list[int]
    """Rows of each expert of this rank."""
    handle: Any
    """What the way back goes by."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TJ: Tensor,
        numbers_TJ: Tensor,
        experts: int,
        buffer: Any,
        sent: _Sent,
    ) -> tuple[Tensor, Tensor]:
        per_rank, per_far_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            numbers_TJ, experts
        )
        x_MH, sent.numbers_MJ, weights_MJ, sent.sizes, sent.handle, _ = buffer.dispatch(
            x_TH,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_far_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=numbers_TJ,
            topk_weights=weights_TJ,
        )
        ctx.buffer, ctx.handle = buffer, sent.handle
        return x_MH, weights_MJ

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dweights_TJ, _ = ctx.buffer.combine(
            grads[0].contiguous(), ctx.handle, topk_weights=grads[1].contiguous()
        )
        return dx_TH, dweights_TJ, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MH: Tensor, buffer: Any, sent: _Sent) -> Tensor:
        ctx.buffer, ctx.handle = buffer, sent.handle
        y_TH: Tensor = buffer.combine(y_MH.contiguous(), sent.handle)[0]
        return y_TH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dy_MH: Tensor = ctx.buffer.dispatch(grads[0].contiguous(), handle=ctx.handle)[0]
        return dy_MH, None, None
