"""Rows travel between ranks while something else is computed, in both directions.

    x ---- start ---------- ... ---------- land ---- y
           send rows     compute other     wait
                            things
    dx --- wait ----------- ... ---------- send gradients back ---- dy

Between its two ends, forward and backward, a rank may do what does not need the rows. Three things
do:

    what the caller computes between `start` and `land`; in backward autograd goes through it
    between the ends by itself, as it takes what was computed last first
    the other half of a pair, whose turn comes before an end waits (`turns`)
    weight gradients that are postponed until somebody waits (`layers.catch_up`)

Shapes: N rows that are sent, M rows that come, H hidden.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from megatron.core import comm, turns
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel import layers

End = Literal["sent", "received"]


class Travel:
    """One exchange and its gradients' way back.

    Args:
        axis: who exchanges.
        sent: rows for each coordinate.
        received: rows from each.
        counted: see `comm.exchange`.
    """

    def __init__(self, axis: Axis, sent: list[int], received: list[int], counted: End) -> None:
        self._axis, self._sent, self._received, self._counted = axis, sent, received, counted
        self._coming: comm.Arrival | None = None
        self._returning: comm.Arrival | None = None

    def start(self, x_NH: Tensor) -> Tensor:
        """Send rows on their way; return what `land` takes, which stands for them, `[N, H]`."""
        return _Start.apply(x_NH, self)  # type: ignore[no-any-return]

    def land(self, sent_NH: Tensor) -> Tensor:
        """Return the rows that came, `[M, H]`."""
        return _Land.apply(sent_NH, self)  # type: ignore[no-any-return]

    def go(self, x_NH: Tensor) -> None:
        """Start to exchange rows."""
        self._coming = comm.exchange(
            x_NH.contiguous(), self._axis, self._sent, self._received, counted=self._counted
        )

    def come(self) -> Tensor:
        """Wait for rows."""
        arrival, self._coming = self._coming, None
        assert arrival is not None, "rows that nobody sent"
        turns.give()
        return arrival.wait()

    def go_back(self, grad_MH: Tensor) -> Tensor:
        """Start to exchange gradients; return where they will be."""
        counted: End = "received" if self._counted == "sent" else "sent"
        self._returning = comm.exchange(
            grad_MH.contiguous(), self._axis, self._received, self._sent, counted=counted
        )
        return self._returning.tensor

    def come_back(self) -> Tensor:
        """Wait for gradients."""
        arrival, self._returning = self._returning, None
        assert arrival is not None, "gradients that nobody sent"
        layers.catch_up()
        turns.give()
        return arrival.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        travel.go(x_NH)
        return x_NH.view_as(x_NH)  # of the shape that the gradients have which come back to here

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.come_back(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent_NH: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        return travel.come()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Nobody reads what is returned before `_Start` has waited: nothing else takes part.
        return ctx.travel.go_back(grads[0]), None
