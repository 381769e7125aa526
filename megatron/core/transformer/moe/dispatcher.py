"""Tokens travel to their experts, and outputs back, over the ranks that hold all experts together.

Every rank along ``etp_ep`` has tokens of its own. Ways, of one interface and one result:

    allgather   every rank gets all tokens and works on those that chose its experts; what ranks
                made of a token is summed. Few ranks, many choices per token: everybody needs most
                tokens anyway.
    flex        a package brings each token once to every rank that has an expert of it (`deepep`)
    alltoall    each rank sends a row for each choice to the ranks of that expert (those along
                ``etp``, each with a share of its width), gets the outputs back, and adds them up
                with their weights (Lepikhin et al., 2020).

                     forward                                backward
    allgather        gather tokens, scatter sums            gather gradients, scatter sums
    alltoall         counts; exchange rows, there and back  exchange gradients, there and back

An expert may get no row or all of them: every rank makes the same calls whatever is in them.
Payloads of exchanges are counted at the tokens' end, where they depend on no choice: one row per
choice that stays, ``etp`` times.

Shapes: T tokens of this rank, G ranks, K choices of a token, N rows, H hidden, E experts of the
model, e of a rank.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.kernels import permute
from megatron.core.kernels.permute import Moves
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.exchange import Travel
from megatron.core.transformer.moe.routing import Routing
from megatron.core.utils import divide

Compute = Callable[[Tensor, list[int]], Tensor]
"""(rows, one expert after the other; how many each has) -> outputs of the rows. Those of ranks
along ``etp`` are partial sums."""

Beside = Callable[[], None]
"""Work that needs no token of other ranks."""


def nothing() -> None:
    """Do no work beside the tokens' way."""


class Dispatcher(Protocol):
    """Brings tokens to experts and their outputs back."""

    def __call__(
        self, x_TH: Tensor, routing: Routing, compute: Compute, beside: Beside = nothing
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, ``[T, H]``.

        A collective of ``etp_ep``, all of whose ranks have equally many tokens. ``beside`` is
        called once, while tokens travel if they do.
        """
        ...


def build_dispatcher(
    kind: str,
    num_experts: int,
    mesh: Mesh,
    dtype: torch.dtype,
    moves: Moves = permute.REFERENCE,
    num_sms: int | None = None,
) -> Dispatcher:
    """Return the dispatcher that a value of --moe-token-dispatcher-type asks for.

    Args:
        kind: the value.
        num_experts: of the model.
        mesh: axes and device.
        dtype: of the tokens.
        moves: sorts tokens by expert and joins their outputs.
        num_sms: multiprocessors for a package, if it is told.

    Raises:
        UserError: a package is asked for that cannot be used here.
    """
    if mesh.etp_ep.size == 1:
        return Local(num_experts, moves)
    if kind == "allgather":
        return Gathering(num_experts, mesh, moves)
    if kind == "flex":
        from megatron.core.transformer.moe.deepep import DeepEP

        return DeepEP(num_experts, mesh, moves, dtype, num_sms)
    return Exchanging(num_experts, mesh, moves)


class Local:
    """All experts are here."""

    def __init__(self, num_experts: int, moves: Moves = permute.REFERENCE) -> None:
        self.num_experts, self.moves = num_experts, moves

    def __call__(
        self, x_TH: Tensor, routing: Routing, compute: Compute, beside: Beside = nothing
    ) -> Tensor:
        """See `Dispatcher`."""
        beside()
        counts_E = _counts(routing.experts_TK, routing.kept_TK, self.num_experts)
        sizes: list[int] = counts_E.tolist()
        by = permute.sort_choices(routing.experts_TK, routing.kept_TK, sum(sizes))
        y_NH = compute(self.moves.permute(x_TH, by), sizes)
        return self.moves.unpermute(y_NH, routing.weights_TK, by)


class Gathering:
    """Every rank gets all tokens."""

    def __init__(self, num_experts: int, mesh: Mesh, moves: Moves) -> None:
        self.moves = moves
        self.axis, self.own = mesh.etp_ep, divide(num_experts, mesh.ep.size)
        self.first = mesh.ep.coordinate * self.own

    def __call__(
        self, x_TH: Tensor, routing: Routing, compute: Compute, beside: Beside = nothing
    ) -> Tensor:
        """See `Dispatcher`."""
        beside()
        # The gradient of a token, and of its weights, is the sum over those who worked on it.
        x_GH = mappings.enter(x_TH, self.axis, sequence_parallel=True)
        weights_GK = mappings.enter(routing.weights_TK, self.axis, sequence_parallel=True)
        chosen_TK = routing.experts_TK
        if routing.kept_TK is not None:
            chosen_TK = chosen_TK.masked_fill(~routing.kept_TK, -1)
        experts_GK = comm.all_gather(chosen_TK.contiguous(), self.axis) - self.first
        mine_GK = (experts_GK >= 0) & (experts_GK < self.own)
        sizes: list[int] = _counts(experts_GK, mine_GK, self.own).tolist()
        by = permute.sort_choices(experts_GK, mine_GK, sum(sizes))
        y_NH = compute(self.moves.permute(x_GH, by), sizes)
        partial_GH = self.moves.unpermute(y_NH, weights_GK, by)
        return mappings.leave(partial_GH, self.axis, sequence_parallel=True)


class Exchanging:
    """Each row travels to the ranks of its expert."""

    def __init__(self, num_experts: int, mesh: Mesh, moves: Moves) -> None:
        self.axis, self.num_experts, self.moves = mesh.etp_ep, num_experts, moves
        self.ways, self.own = mesh.etp.size, divide(num_experts, mesh.ep.size)
        self.first = mesh.ep.coordinate * self.own

    def __call__(
        self, x_TH: Tensor, routing: Routing, compute: Compute, beside: Beside = nothing
    ) -> Tensor:
        """See `Dispatcher`."""
        counts_E = _counts(routing.experts_TK, routing.kept_TK, self.num_experts)
        counts_GE = comm.all_gather(counts_E[None], self.axis)
        coming_Ge = counts_GE[:, self.first : self.first + self.own]
        # The one wait for the device: how many rows go where.
        known: list[int] = torch.cat((counts_E, coming_Ge.flatten())).tolist()
        numbers, came = known[: self.num_experts], known[self.num_experts :]
        order = _by_expert(coming_Ge, sum(came))
        blocks = [sum(numbers[i : i + self.own]) for i in range(0, self.num_experts, self.own)]
        sent = [rows for rows in blocks for _ in range(self.ways)]
        received = [sum(came[i : i + self.own]) for i in range(0, len(came), self.own)]
        sizes = [sum(came[expert :: self.own]) for expert in range(self.own)]

        by = permute.sort_choices(routing.experts_TK, routing.kept_TK, sum(numbers))
        x_NH = _copies(self.moves.permute(x_TH, by), blocks, self.ways)
        there = Travel(self.axis, sent, received, "sent")
        sent_NH = there.start(x_NH)
        beside()
        x_MH = there.land(sent_NH)
        y_MH = compute(permute.rearrange(x_MH, order), sizes)
        y_MH = permute.rearrange(y_MH, permute.inverse(order))
        back = Travel(self.axis, received, sent, "received")
        y_NH = _summed(back.land(back.start(y_MH)), blocks, self.ways)
        return self.moves.unpermute(y_NH, routing.weights_TK, by)


def _counts(experts_TK: Tensor, kept_TK: Tensor | None, num_experts: int) -> Tensor:
    """Return how many choices of each expert stay, int64."""
    chosen = experts_TK.flatten()
    if kept_TK is None:
        ones = torch.ones_like(chosen)
    else:
        ones = kept_TK.flatten().to(chosen.dtype)
        chosen = chosen.where(kept_TK.flatten(), torch.zeros_like(chosen))
    return chosen.new_zeros(num_experts).scatter_add_(0, chosen, ones)


def _by_expert(coming_Ge: Tensor, rows: int) -> Tensor:
    """Return the order that joins each expert's rows, which come rank by rank, expert by expert.

    ``rows`` is the sum of ``coming_Ge``, for which it would else wait for the device.
    """
    ranks, own = coming_Ge.shape
    experts = torch.arange(own, device=coming_Ge.device).repeat(ranks)
    return experts.repeat_interleave(coming_Ge.flatten(), output_size=rows).argsort(stable=True)


def _copies(x_NH: Tensor, blocks: Sequence[int], ways: int) -> Tensor:
    """Return each block of rows once for each rank that has a share of its experts."""
    if ways == 1:
        return x_NH
    return torch.cat([part for part in x_NH.split(list(blocks)) for _ in range(ways)])


def _summed(y_NH: Tensor, blocks: Sequence[int], ways: int) -> Tensor:
    """Return the sum of the copies of each block."""
    if ways == 1:
        return y_NH
    parts = y_NH.split([rows for rows in blocks for _ in range(ways)])
    whole = [torch.stack(parts[i : i + ways]).sum(0) for i in range(0, len(parts), ways)]
    return torch.cat(whole)
