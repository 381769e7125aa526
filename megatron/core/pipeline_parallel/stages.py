"""Which part of a model each pipeline stage owns; plain Python, so that a plan needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.core.pipeline_parallel.layout import FLAG as LAYOUT
from megatron.core.pipeline_parallel.layout import parse_layout
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.utils import UserError

SIZE = "--pipeline-model-parallel-size"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
SPLIT = "--pipeline-model-parallel-split-rank"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
PER_RANK = "--num-virtual-stages-per-pipeline-rank"
ACCOUNT = "--account-for-embedding/loss-in-pipeline-split"

Layers = int | tuple[int, int]
"""Layers of a model's one stack, or of an encoder and of its decoder."""


@dataclass(frozen=True)
class Stage:
    """One contiguous share of the layer stack, with or without its ends."""

    layers: range
    """Layer numbers in the whole model, from 0."""
    is_first: bool = True
    """Owns the embedding."""
    is_last: bool = True
    """Owns the final norm and the output head."""
    num_mtp_layers: int = 0
    """Multi-token-prediction layers, which follow the stack."""
    other_end_is_here: bool = False
    """The rank that holds this end of the model holds the other one too, as another stage."""


def make_stages(num_layers: int, num_stages: int) -> list[Stage]:
    """Return every stage of a pipeline with one stage per rank, as even as can be.

    Where layers do not divide evenly, earlier stages get one more.

    Raises:
        UserError: there are fewer layers than stages.
    """
    return plan_stages(num_layers, Placement(num_stages))


def plan_stages(
    num_layers: Layers,
    placement: Placement,
    *,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
    mtp_num_layers: int = 0,
) -> list[Stage]:
    """Return every stage of a model, by position; their layers add up to the model's.

    A rank's own are those at `Placement.positions`.

    Args:
        num_layers: of the model, without multi-token prediction; of two stacks those of each.
        placement: ranks, and stages on each.
        first: layers on the first rank, over all its chunks; the others share the rest.
        last: the same on the last rank.
        account_for_embedding: the first stage gets one layer less.
        account_for_loss: the last stage gets one layer less.
        layout: every stage written out, see `parse_layout`.
        mtp_num_layers: layers of multi-token prediction; on the last stage unless laid out.

    Raises:
        UserError: these do not go together, or the layers do not add up.
    """
    ends = first is not None or last is not None
    accounts = account_for_embedding or account_for_loss
    given = [_ends(first, last)] * ends + [ACCOUNT] * accounts
    given += [LAYOUT] * (layout is not None)
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} each say how layers are split; keep one")
    mtp: list[int] | None = None
    num_layers, layers = _counted(num_layers)
    if layout is not None:
        counts, mtp = _laid_out(layout, num_layers, mtp_num_layers, placement, layers)
    elif ends:
        counts = _with_given_ends(num_layers, placement, first, last, layers)
    else:
        counts = _accounted(num_layers, placement, account_for_embedding, account_for_loss, layers)
    assert sum(counts) == num_layers and min(counts) >= 0, (counts, num_layers)
    last = placement.num_stages - 1
    mtp = [0] * last + [mtp_num_layers] if mtp is None else mtp
    meet = last > 0 and placement.owner(0)[0] == placement.owner(last)[0]
    return [
        Stage(held, index == 0, index == last, mtp[index], meet and index in (0, last))
        for index, held in enumerate(_ranges(counts))
    ]


def chunks_per_rank(
    num_layers: Layers,
    num_ranks: int,
    *,
    counted_ends: int = 0,
    layers_per_stage: int | None = None,
    stages_per_rank: int | None = None,
    layout: str | None = None,
) -> int:
    """Return how many stages each rank holds, by whichever flag says so; one by default.

    Args:
        num_layers: of the model; of two stacks those of each.
        num_ranks: ranks along the pipeline.
        counted_ends: how many of embedding and loss count as a layer.
        layers_per_stage: ``--num-layers-per-virtual-pipeline-stage``.
        stages_per_rank: ``--num-virtual-stages-per-pipeline-rank``.
        layout: ``--pipeline-model-parallel-layout``.

    Raises:
        UserError: more than one says so, or the layers or stages do not divide.
    """
    named = ((PER_STAGE, layers_per_stage), (PER_RANK, stages_per_rank), (LAYOUT, layout))
    given = [f"{flag} ({value})" for flag, value in named if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} each set the stages per rank; keep one")
    if layout is not None:
        count = len(parse_layout(layout))
        if count % num_ranks:
            raise UserError(
                f"{LAYOUT} {layout!r} has {count} stages, no multiple of {SIZE} ({num_ranks})"
            )
        return count // num_ranks
    if layers_per_stage is not None:
        num_layers, layers = _counted(num_layers)
        total = num_layers + counted_ends
        if layers_per_stage < 1 or total % (num_ranks * layers_per_stage):
            per_rank, rest = divmod(total, num_ranks)
            fitting = [n for n in range(1, per_rank + 1) if rest == 0 and per_rank % n == 0]
            near = [n for n in fitting if n <= layers_per_stage][-1:]
            near += [n for n in fitting if n > layers_per_stage][:1]
            choices = f"{PER_STAGE} {' or '.join(map(str, near))}, or " if near else ""
            ends = f" + {counted_ends} for its ends" if counted_ends else ""
            raise UserError(
                f"{layers}{ends} is not divisible by {SIZE} ({num_ranks}) x "
                f"{PER_STAGE} ({layers_per_stage}); try {choices}{PER_RANK}, which allows "
                "uneven stages"
            )
        return total // (num_ranks * layers_per_stage)
    if stages_per_rank is not None and stages_per_rank < 1:
        raise UserError(f"{PER_RANK} ({stages_per_rank}) must be at least 1")
    return stages_per_rank or 1


def split_layout(num_layers: int, placement: Placement, encoder_layers: int, ranks: int) -> str:
    """Return the layout whose first ranks hold an encoder's layers, and the others a decoder's.

    Raises:
        UserError: one of them has fewer layers than ranks, or ranks hold several stages.
    """
    if placement.num_chunks > 1:
        raise UserError(
            f"{SPLIT} ({ranks}) needs one stage on each rank, not {placement.num_chunks}, which go "
            f"round all ranks; drop it, or give {LAYOUT}"
        )
    stages = []
    for name, layers, held_by in (
        ("encoder", encoder_layers, ranks),
        ("decoder", num_layers - encoder_layers, placement.num_ranks - ranks),
    ):
        if layers < held_by:
            raise UserError(
                f"{SPLIT} ({ranks}) of {_stages(placement)} gives {held_by} rank(s) to the {name}, "
                f"which has {layers} layer(s); each rank needs one"
            )
        stages += ["t" * count for count in _evenly(layers, held_by)]
    return f"E{'|'.join(stages)}L"


def _accounted(
    num_layers: int, placement: Placement, embedding: bool, loss: bool, layers: str
) -> list[int]:
    """Return an even split in which the ends of the model may count as a layer each."""
    total = num_layers + embedding + loss
    if total < placement.num_stages:
        ends = " + ".join(["", *(["the embedding"] * embedding), *(["the loss"] * loss)])
        raise UserError(
            f"{layers}{ends} must be at least {_stages(placement)}; "
            "raise the former or lower the latter"
        )
    counts = _evenly(total, placement.num_stages)
    counts[0] -= embedding
    counts[-1] -= loss
    # One stage that is both ends, or the only layer of two stages, may have none left to give.
    if min(counts) < 0:
        raise UserError(f"{layers} leaves nothing for {_stages(placement)}")
    return counts


def _with_given_ends(
    num_layers: int, placement: Placement, first: int | None, last: int | None, layers: str
) -> list[int]:
    """Return a split in which the first or last rank holds a given number of layers."""
    ends, ranks = _ends(first, last), placement.num_ranks
    if placement.shape == "v":
        raise UserError(f"{ends}: in a V-shaped schedule rank 0 is both; give {LAYOUT} instead")
    if ranks == 1:
        raise UserError(f"{ends} needs {SIZE} of at least 2: one rank holds all layers")
    middle = ranks - (first is not None) - (last is not None)
    rest, least = num_layers - (first or 0) - (last or 0), middle * placement.num_chunks
    if middle == 0 and rest:
        raise UserError(f"{ends} must be {layers}, since {SIZE} ({ranks}) has no other ranks")
    if rest < least:
        raise UserError(
            f"{ends} leaves {rest} of {layers} for the other {middle} "
            f"rank{'s' * (middle > 1)} of {SIZE} ({ranks}), with {placement.num_chunks} "
            f"stage{'s' * (placement.num_chunks > 1)} each; give it at most {num_layers - least}"
        )
    by_rank = [first] * (first is not None) + _evenly(rest, middle) + [last] * (last is not None)
    held = [count for count in by_rank if count is not None]
    short = [f"rank {rank}: {n}" for rank, n in enumerate(held) if n < placement.num_chunks]
    if short:
        raise UserError(
            f"{ends} of {layers} leaves fewer layers than stages "
            f"({PER_RANK} {placement.num_chunks}) on {', '.join(short)}; give a layer to each stage"
        )
    chunks = [_evenly(count, placement.num_chunks) for count in held]
    owners = [placement.owner(position) for position in range(placement.num_stages)]
    return [chunks[rank][chunk] for rank, chunk in owners]


def _ends(first: int | None, last: int | None) -> str:
    """Return the flags of given ends, with their values."""
    named = ((FIRST, first), (LAST, last))
    return " + ".join(f"{flag} ({value})" for flag, value in named if value is not None)


def _laid_out(
    layout: str, num_layers: int, mtp_num_layers: int, placement: Placement, all_layers: str
) -> tuple[list[int], list[int]]:
    """Return a layout's layers and multi-token-prediction layers by position."""
    stages = parse_layout(layout)
    if len(stages) != placement.num_stages:
        raise UserError(f"{LAYOUT} {layout!r} has {len(stages)} stages, not {_stages(placement)}")
    layers = [stage.num_layers for stage in stages]
    mtp = [stage.num_mtp_layers for stage in stages]
    if sum(layers) != num_layers:
        raise UserError(f"{LAYOUT} {layout!r} has {sum(layers)} t, not {all_layers}")
    if sum(mtp) != mtp_num_layers:
        raise UserError(
            f"{LAYOUT} {layout!r} has {sum(mtp)} m, not --mtp-num-layers ({mtp_num_layers})"
        )
    return layers, mtp


def _counted(num_layers: Layers) -> tuple[int, str]:
    """Return the number of all layers, and it with the flags that it comes from."""
    if isinstance(num_layers, int):
        return num_layers, f"--num-layers ({num_layers})"
    encoder, decoder = num_layers
    return encoder + decoder, f"--num-layers ({encoder}) + --decoder-num-layers ({decoder})"


def _stages(placement: Placement) -> str:
    """Return the number of stages with what it comes from."""
    words = f"{SIZE} ({placement.num_ranks})"
    if placement.num_chunks == 1:
        return words
    chunks = f"{PER_RANK} ({placement.num_chunks})"
    if placement.shape == "v":
        chunks = f"{placement.num_chunks} stages per rank, which zb-v needs"
    return f"{placement.num_stages} = {words} x {chunks}"


def _evenly(count: int, parts: int) -> list[int]:
    """Return ``count`` in ``parts`` shares, the larger ones first."""
    if not parts:
        return []
    share, extra = divmod(count, parts)
    return [share + (index < extra) for index in range(parts)]


def _ranges(counts: Sequence[int]) -> list[range]:
    """Return the layers of each stage from their numbers."""
    stops = [*accumulate(counts)]
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]
