"""How tokens fell on experts in an iteration, of every layer, whatever the layout.

Routers count the valid tokens of their rank. Each token of a microbatch is routed by one rank, so
the sum over the world counts it once, and the layers of all stages are in it:

    row of a layer = [tokens that chose expert 1 .. E, choices that were kept, numerators of losses]

Rows are summed on the device, travel in the vector of `objective.Totals`, and come to the host with
the other numbers of a log interval.

Shapes: L layers with experts, E experts, X = E + 1 + auxiliary losses.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.transformer.moe import statistics
from megatron.core.transformer.moe.balance import Noted
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.router_config import Z_LOSS

LayerRow = dict[str, int | float | list[int]]
"""What is known of a layer, by name."""


@dataclass(frozen=True)
class Counted:
    """What is counted of a model's experts; alike on all ranks."""

    layers: tuple[int, ...] = ()
    """Numbers of the layers with experts, those of multi-token prediction after the decoder's."""
    experts: int = 0
    losses: tuple[str, ...] = ()
    ranks: int = 0
    """That experts are spread over, where it is to be told how uneven they are; 0 for not."""
    judged: tuple[int, ...] | None = None
    """Those of the layers whose routers choose by score, which alone have losses of balance; None
    for all."""

    def layers_with(self, loss: str) -> tuple[int, ...]:
        """Return the layers that have a loss."""
        return self.layers if loss == Z_LOSS or self.judged is None else self.judged

    @property
    def shape(self) -> tuple[int, int]:
        """Return (L, X)."""
        return len(self.layers), self.experts + 1 + len(self.losses)


class Loads(NamedTuple):
    """What an iteration amounted to."""

    counted: Counted
    sums_LX: Tensor
    """Over the world, fp64; on the device."""
    denominator: float
    """Of the losses."""


class LoadSums:
    """Adds up this rank's microbatches on the device."""

    def __init__(self, counted: Counted, device: torch.device) -> None:
        self.counted = counted
        self.sums_LX = torch.zeros(counted.shape, dtype=torch.float64, device=device)

    def add(self, layer: int, noted: Noted, share: Tensor | None) -> None:
        """Add a microbatch of a layer.

        Args:
            layer: its number.
            noted: what its router counted, and lost.
            share: the denominator of the microbatch, where this rank's losses are to be counted;
                all ranks that share it have the same ones.
        """
        row_X, experts = self.sums_LX[self.counted.layers.index(layer)], self.counted.experts
        row_X[:experts] += noted.counts_E
        row_X[experts] += noted.kept_counts_E.sum()
        if share is not None:
            for number, name in enumerate(self.counted.losses, experts + 1):
                row_X[number] += noted.losses[name].double() * share


def layer_numbers(chunks: Iterable[nn.Module]) -> dict[int, int]:
    """Return the number in the whole model of each layer with experts of a rank, by its id.

    Layers of multi-token prediction, which count from 0, come after all others.
    """
    return {
        id(module): module.router.layer + module.num_layers * ("mtp" in name.split("."))
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, MoELayer)
    }


def rows(loads: Sequence[Loads]) -> list[list[LayerRow]]:
    """Return what is known of each layer, of each of the iterations, with one copy to the host.

    A row has the ``layer``, the ``tokens`` of each expert, how uneven they are (``imbalance``, the
    largest over the mean, and ``overload``, the same of ranks, where it is asked for), the share of
    the experts without any (``idle``), that of the choices that full experts ``dropped``, and the
    auxiliary losses that it has, whose means over the layers are those of the iteration.
    """
    if not loads:
        return []
    sums_NLX = torch.stack([one.sums_LX for one in loads]).cpu()
    return [_rows(one, sums_LX) for one, sums_LX in zip(loads, sums_NLX, strict=True)]


def _rows(loads: Loads, sums_LX: Tensor) -> list[LayerRow]:
    counted = loads.counted
    counts_LE, kept_L = sums_LX[:, : counted.experts], sums_LX[:, counted.experts]
    load = statistics.load(counts_LE, kept_L)
    losses_LX = sums_LX[:, counted.experts + 1 :] / (loads.denominator or float("nan"))
    found: list[LayerRow] = []
    for number, layer in enumerate(counted.layers):
        row: LayerRow = {"layer": layer, "tokens": counts_LE[number].long().tolist()}
        row |= {name: values[number].item() for name, values in load._asdict().items()}
        if counted.ranks:
            of_ranks = counts_LE[number].view(counted.ranks, -1).sum(1)
            row["overload"] = (of_ranks.max() / of_ranks.mean().clamp(min=1e-9)).item()
        values = zip(counted.losses, losses_LX[number].tolist(), strict=True)
        found.append(row | {k: x for k, x in values if layer in counted.layers_with(k)})
    return found


def summary(layers: Sequence[LayerRow]) -> dict[str, float]:
    """Return what the layers of an iteration amount to, under the names of a row of metrics.

    The mean and the largest of the layers' imbalance, and of the overload of ranks where it is
    told, and the share of all choices that were dropped: layers make equally many.
    """
    if not layers:
        return {}
    imbalance = [float(row["imbalance"]) for row in layers]  # type: ignore[arg-type]
    dropped = [float(row["dropped"]) for row in layers]  # type: ignore[arg-type]
    overload = [float(row["overload"]) for row in layers if "overload" in row]  # type: ignore[arg-type]
    of_ranks = {}
    if overload:
        of_ranks = {
            "expert_overload": sum(overload) / len(layers),
            "worst_expert_overload": max(overload),
        }
    return {
        "expert_imbalance": sum(imbalance) / len(layers),
        "worst_expert_imbalance": max(imbalance),
        "dropped_choices": sum(dropped) / len(layers),
        **of_ranks,
    }
