"""What torch's ``fully_shard`` moves, in closed form (``--use-torch-fsdp2``).

With P elements of a unit, each parameter padded to equal numbers of rows on R ranks, g the bytes in
which gradients travel, w those of a weight while it computes and m the microbatches of a replica,
an iteration moves over ``dp_cp`` (``dp_inner`` where there are several instances), of every unit:

    reduce_scatter  m x P g
    all_gather      m x P w         in forward
    all_gather      m x P w         in backward, unless weights stay

An embedding that is tied to the head is one unit with it. Layers that are recomputed stay until
their backward, so nothing is gathered for them once more.

With K depths of multi-token prediction the two ends compute several times, and torch gives their
weights up in between where it can tell that one use is over (`_uses`): after each forward of a
module, and in backward after each use whose input needs a gradient, which that of an embedding does
not. An encoder-decoder's embedding computes twice, once for each text, and is gathered as often
where the head is not tied to it. Gradients are summed once all the same, when there is no more to
come.
"""

from collections import Counter

from megatron.core.distributed.layout import unit_of
from megatron.core.optimizer.memory import BYTES
from megatron.training.config import RunConfig
from megatron.training.plan import stacks
from megatron.training.plan.buffer_plans import chunk_buffers
from megatron.training.plan.traffic_passes import Book


def add_sums(book: Book, config: RunConfig, padded_rows: int, count: int) -> None:
    """Add the sums of gradients of one iteration of ``count`` microbatches."""
    size = BYTES[config.precision.reduce_dtype]
    for elements in _units(config, padded_rows).values():
        book.add(sharing_axis(config), "reduce_scatter", elements * size, count)


def add_gathers(
    book: Book, config: RunConfig, padded_rows: int, count: int, *, trains: bool
) -> None:
    """Add the gathers of weights for the passes of ``count`` microbatches.

    Where weights stay, an evaluation that follows a training iteration gathers once, whatever the
    count, and the next iteration has what it left.
    """
    size = BYTES[config.precision.params_dtype]
    stay = not config.replicas.torch_fsdp2_reshard_after_forward
    for unit, elements in _units(config, padded_rows).items():
        forward, backward = _uses(config, unit)
        if trains:
            times = count * (forward + backward)
        else:
            times = 1 if stay else count * forward
        book.add(sharing_axis(config), "all_gather", elements * size, times)


def sharing_axis(config: RunConfig) -> str:
    """Return the axis along which replicas share out."""
    return "dp_inner" if config.replicas.num_distributed_optimizer_instances > 1 else "dp_cp"


def _units(config: RunConfig, padded_rows: int) -> Counter[str]:
    """Return the elements of each unit, padding included; a head that is tied is the embedding's.

    Of it there may be a bias.
    """
    tied = not config.model.untie_embeddings_and_output_weights
    elements: Counter[str] = Counter()
    for plan in (plan for chunk in chunk_buffers(config, padded_rows, 0) for plan in chunk):
        for slot, (start, stop) in zip(plan.slots, plan.buckets, strict=True):
            unit = unit_of(slot.name)
            elements["embedding" if tied and unit == "output_layer" else unit] += stop - start
    return elements


def _uses(config: RunConfig, unit: str) -> tuple[int, int]:
    """Return how often a unit is gathered for the forward of a microbatch, and for its backward."""
    depths, again = config.model.mtp.depths, config.replicas.torch_fsdp2_reshard_after_forward
    if unit == "embedding" and not config.model.untie_embeddings_and_output_weights:
        # Embedding and head; embeddings and the first head of depths; heads that are left.
        passes = 1 + min(depths, 2)
        left = int(depths > 1)
        return (passes, 1 + left) if again else (1, left)
    if unit == "embedding":
        texts = len(stacks.lengths(config))
        return (texts + depths, 1) if again else (1, 0)
    if unit == "output_layer":
        return (1 + depths, 1 + depths) if again else (1, depths)
    return (1, int(again))
