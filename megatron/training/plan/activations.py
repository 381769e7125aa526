"""What a microbatch keeps on a rank until its backward, in bytes, from configs alone.

Counted is every tensor that autograd saves (`saved`), once for each piece of memory: a view keeps
the whole of what it is a view of. Per layer these are the inputs of norms and matrix products, what
the activation and the attention op save (`attention_bytes`), and dropout masks of a byte per
element; the ends of the model add token numbers, masks and exponentials of logits. What lives only
while an operation works is left out, but for a second copy of the logits, the largest of it.

With recomputation a region keeps its inputs alone, and what it saves is there again for a moment in
its backward; with offload it is in host memory, and back for a moment, with what the region before
has there. These moments are counted where they fall in the backward of a microbatch (`Ledger`).

How close it is: on the CPU, tensors saved by built models take these bytes to 0.1% (mostly to the
byte), for every kind of norm, activation, position and attention that there is, fp32, bf16 and
fp64, tensor, sequence and context parallelism of every kind, stages of every content, every kind of
recomputation and offload; and so does the most that is saved at once in an iteration of every
pipeline schedule. Tests repeat it. Packed documents are counted as if each filled its sample. Not
measured is what torch's fused attention saves on CUDA: it is taken to be queries, keys, values,
output and a number per head and token, or a mask where there are documents or ALiBi.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.plan import LayerPlan, layer_plan, loss_pieces, mtp_layer_plan
from megatron.training.config import RunConfig
from megatron.training.plan import saved, stacks
from megatron.training.plan.attention_bytes import Piece
from megatron.training.plan.ledger import Footprint, Ledger
from megatron.training.plan.passing import Passing, splits
from megatron.training.plan.share import Region, Share


def footprint(
    config: RunConfig,
    padded_rows: int,
    stage: Stage,
    samples: int,
    passing: Passing | None = None,
) -> Footprint:
    """Return what a microbatch of ``samples`` keeps in the chunk that is ``stage``.

    Args:
        config: the run.
        padded_rows: rows of the vocabulary, padding included.
        stage: the layers and ends of the chunk.
        samples: of the microbatch.
        passing: what is there for communication; nothing when absent.
    """
    share, texts = Share(config, samples), stacks.lengths(config)
    ledger = Ledger(
        splits(config),
        "embedding" if stage.is_first else "",
        delays=config.pipeline.delay_wgrad_compute,
    )
    working = 0
    if stage.is_first:
        ledger.add(sum(saved.embedding(share.of(length)) for length in texts))
    ledger.add(share.tokens * _rotated(share, stage) * share.main)
    if config.model.has_two_stacks:
        _stacks(ledger, share, stage)
    else:
        _layers(ledger, share, stage, stage.layers)
    share = share.of(texts[-1])
    if stage.is_last:
        rows = padded_rows // share.tp
        logits = share.tokens * rows
        sequence = share.tokens // samples if samples else 0
        limit = config.model.logits_at_once
        pieces = loss_pieces(sequence, samples, rows, limit=limit) if samples else 1
        _ends(ledger, share, stage.num_mtp_layers, *saved.losses(share, logits, pieces), pieces)
        copied = share.size if share.size != share.exponentials else 0
        working = logits * copied
        if pieces > 1:
            each = share.size + (copied and share.exponentials)
            working = -(-sequence // pieces) * samples * rows * each
    if not (stage.layers or stage.is_first or stage.is_last):
        ledger.add(share.of(sum(texts)).residual)  # it hands on what it gets, and keeps it
    return ledger.footprint(working, passing or Passing())


def _rotated(share: Share, stage: Stage) -> int:
    """Return the channels that rotate by angles of this microbatch alone."""
    model = share.config.model
    if not share.config.data.reset_position_ids:
        return 0  # cosines and sines are made once and for all
    if model.mla.multi_latent_attention:
        return model.mla.qk_pos_emb_head_dim if stage.layers or stage.num_mtp_layers else 0
    numbers = [*stage.layers, *range(stage.num_mtp_layers)]
    rotates = any(map(model.position.layer_rotates, numbers))
    return model.position.rotated_channels(model.attention.kv_channels) if rotates else 0


def _stacks(ledger: Ledger, share: Share, stage: Stage) -> None:
    """Add the layers of an encoder, the norm at its end, and the layers of its decoder.

    What a stage was sent is one piece of memory, which is there until its backward: it stands for
    the inputs of its first layers, and for what the encoder gave where that is a part of it.
    """
    model, texts = share.config.model, stacks.lengths(share.config)
    encoder, decoder = (share.of(length) for length in texts)
    first, *others = stacks.of(model, stage.layers) or [range(0)]
    ends = model.num_layers - 1 in stage.layers
    if not stage.is_first:
        ledger.add(share.of(sum(texts)).residual)
        held = encoder if first and not stacks.is_decoders(model, first[0]) else decoder
        ledger.add(-held.residual)
    for layers in (first, *others):
        is_decoder = bool(layers) and stacks.is_decoders(model, layers[0])
        text = decoder if is_decoder else encoder
        if layers:
            ledger.add(saved.biases(text))
        if is_decoder:
            ledger.add(*saved.encoded(encoder, is_made_here=ends or stage.is_first))
            if others and not stage.is_first:
                ledger.add(-decoder.residual)
        _layers(ledger, text, stage, layers)
        if ends and not is_decoder:
            ledger.unit = "encoder"
            ledger.add(sum(piece.size for piece in encoder.norm()))


def _layers(ledger: Ledger, share: Share, stage: Stage, layers: range) -> None:
    """Add layers of a stack, in units where they are recomputed as a whole."""
    model = share.config.model
    plan, units = layer_plan(model), model.recompute.units(layers)
    if stage.layers and not stage.is_first and _first_input_goes(share, len(units)):
        ledger.add(share.residual)  # the pipeline holds it, for its gradient
    for unit in units:
        _unit(ledger, share, [plan[number] for number in unit])
    for number in layers[sum(map(len, units)) :]:
        ledger.unit = stacks.name(model, number)
        if number < model.offload.cpu_offloading_num_layers:
            _moved_layer(ledger, share, plan[number])
        else:
            _layer(ledger, share, plan[number])


def _first_input_goes(share: Share, units: int) -> bool:
    """Return whether a stage's first layer does not keep its input on the device."""
    model = share.config.model
    if units and model.recompute.distribute_saved_activations:
        return True
    name = "layer_input" if units else "attn_norm"
    return name in model.offload.modules and _is_moved(share, share.norm()[0])


def _unit(ledger: Ledger, share: Share, layers: Iterable[LayerPlan]) -> None:
    """Add layers that are recomputed together."""
    model = share.config.model
    found = [_regions_of(share, layer, stacks.name(model, layer.number)) for layer in layers]
    given = share.norm()[0]
    shares = share.config.model.recompute.distribute_saved_activations
    size = -(-(given.size // given.item) // share.tp) * given.item if shares else given.size
    _whole(ledger, share, given, size, [region for regions in found for region in regions])


def _regions_of(share: Share, layer: LayerPlan, unit: str) -> list[tuple[int, int, str]]:
    """Return (saved, postponed, unit) of the regions of a layer, each piece of memory once."""
    return [
        (sum(piece.size for piece in region.saved), region.late, unit)
        for sublayer in layer.sublayers
        for region in _once(saved.regions(share, sublayer, layer.number))
    ]


def _whole(
    ledger: Ledger, share: Share, given: Piece, size: int, regions: Sequence[tuple[int, int, str]]
) -> None:
    """Add a unit that keeps ``size`` bytes of what it is given, and saves the rest again.

    Args:
        ledger: to add to.
        share: of the rank.
        given: the unit's input, which its first region saves.
        size: bytes of it that are kept.
        regions: (saved, postponed, unit of the model) of each.
    """
    moves = "layer_input" in share.config.model.offload.modules and _is_moved(share, given)
    first = len(ledger.kept)
    last = first + len(regions) - 1
    for number, (again, late, unit) in enumerate(regions, first):
        is_input, ledger.unit = number == first, unit
        ledger.add(size if is_input and not moves else 0, late)
        # The input itself is there, or fetched; out of shares it is made again.
        there = given.size if is_input and size == given.size else 0
        ledger.moments.append((again - there, last, number))
    if moves:
        ledger.groups.append((size, last, first))


def _layer(ledger: Ledger, share: Share, layer: LayerPlan) -> None:
    """Add a layer, parts of which may be recomputed or offloaded."""
    for sublayer in layer.sublayers:
        _sublayer(ledger, share, saved.regions(share, sublayer, layer.number))


def _moved_layer(ledger: Ledger, share: Share, layer: LayerPlan) -> None:
    """Add a layer that is offloaded as a whole."""
    away, numbers = 0, []
    for sublayer in layer.sublayers:
        for region in _once(saved.regions(share, sublayer, layer.number)):
            large = sum(piece.size for piece in region.saved if _is_moved(share, piece))
            number = ledger.add(sum(piece.size for piece in region.saved) - large, region.late)
            away += large
            numbers += [number] if large else []
    if numbers:
        ledger.groups.append((away, numbers[-1], numbers[0]))


def _once(regions: Sequence[Region]) -> Iterator[Region]:
    """Yield the regions of a sub-layer, each piece in the first that it stands in alone."""
    seen: set[str] = set()
    for region in regions:
        new = {piece.name: piece for piece in region.saved if piece.name not in seen}
        seen.update(new)
        yield Region(region.name, tuple(new.values()), region.late)


def _is_moved(share: Share, piece: Piece) -> bool:
    """Return whether a piece of what is offloaded is large enough to be moved."""
    least = share.config.model.offload.min_offloaded_tensor_size
    return piece.size >= max(least * piece.item, 1)


def _sublayer(ledger: Ledger, share: Share, regions: Sequence[Region]) -> None:
    """Add the regions of a sub-layer, some of them recomputed or offloaded."""
    model = share.config.model
    remade = [region.recomputed in model.recompute.modules for region in regions]
    dropped = {
        piece.name
        for region, again in zip(regions, remade, strict=True)
        if again
        for piece in region.outputs
    }
    reads, seen, group = _reads(regions, remade), set[str](), ""
    for place, region in enumerate(regions):
        held = region.inputs if remade[place] else region.saved
        pieces = {piece.name: piece for piece in held if piece.name not in dropped}
        large: dict[str, Piece] = {}
        if region.offloaded in model.offload.modules:
            large = {name: piece for name, piece in pieces.items() if _is_moved(share, piece)}
        stay = [piece for name, piece in pieces.items() if name not in large.keys() | seen]
        seen.update(piece.name for piece in stay)
        if region.awaits:
            ledger.waits.append(len(ledger.kept))
        if region.sends:
            ledger.waits_back.append(len(ledger.kept))
        number = ledger.add(sum(piece.size for piece in stay), region.late)
        first, last = (number - place + read for read in reads[place])
        if remade[place]:
            own = {piece.name: piece.size for piece in region.saved}
            given = {piece.name: piece.size for piece in region.outputs}
            left = {piece.name for piece in region.inputs} | (dropped - given.keys())
            given = {name: size for name, size in given.items() if name not in own}
            ledger.moments.append((_size(own, left), first, number))
            ledger.moments.append((_size(given, left), first, last))
        away = sum(piece.size for piece in large.values())
        if away and region.joins and group == region.offloaded:
            size, _, last = ledger.groups.pop()
            ledger.groups.append((size + away, first, last))
        elif away:
            ledger.groups.append((away, first, number))
        group = region.offloaded if away else ""


def _size(sizes: Mapping[str, int], left: Collection[str]) -> int:
    """Return the sum of the sizes, some names left out."""
    return sum(size for name, size in sizes.items() if name not in left)


def _reads(regions: Sequence[Region], remade: Sequence[bool]) -> list[tuple[int, int]]:
    """Return with whose backward each region is needed, and after whose its outputs go.

    It is needed for its own, or for a region that reads its outputs: one that runs again reads its
    inputs at once, and regions of one name run again together. Nothing but what reads them holds
    outputs; weights' gradients that are put off count them as theirs.
    """
    found = [(place, place) for place in range(len(regions))]
    for place in reversed(range(len(regions))):
        names = {piece.name for piece in regions[place].outputs} if remade[place] else set()
        needed, readers = place, list[int]()
        for later in range(place + 1, len(regions)):
            apart = regions[later].recomputed != regions[place].recomputed
            read = regions[later].inputs if remade[later] and apart else regions[later].saved
            if names & {piece.name for piece in read}:
                needed = max(needed, found[later][0])
                readers.append(later)
        found[place] = (needed, min(readers, default=place))
    return found


def _ends(ledger: Ledger, share: Share, depths: int, kept: int, late: int, pieces: int) -> None:
    """Add the last norm, the layers of multi-token prediction, and the heads of all.

    A head keeps the hidden states that it is given, and so does the next depth: they stay for the
    one that is earlier. Not so where the head gathers them first, and keeps that, or where the
    depth has them in host memory.
    """
    gathers, moves = pieces > 1 and share.outer != share.tokens, _hidden_moves(share)
    own = 0 if moves else share.stream
    norm = sum(piece.size for piece in share.norm())
    ledger.unit = "output_layer"
    if share.config.model.bert.encoder_alone:
        words, put_off = saved.words_head(share)
        norm, late = norm + words, late + put_off
    ledger.add(norm + kept, late)
    for depth in range(depths):
        _ahead(ledger, share, depth, own if gathers or depth else 0)
    ledger.unit = "output_layer"
    for depth in range(depths):
        shared = 0 if gathers or depth == depths - 1 else own
        ledger.add(kept - shared, late - shared)


def _hidden_moves(share: Share) -> bool:
    """Return whether layers of multi-token prediction have what they are given in the host."""
    model = share.config.model
    if not model.recompute.covers_prediction_ahead or "layer_input" not in model.offload.modules:
        return False
    return _is_moved(share, Piece("hidden", share.stream, share.size))


def _ahead(ledger: Ledger, share: Share, depth: int, hidden: int) -> None:
    """Add a layer of multi-token prediction, up to and with its last norm.

    ``hidden`` is what it keeps of the hidden states that it is given.
    """
    plan = mtp_layer_plan(share.config.model, depth)
    ledger.unit = f"mtp.layers.{depth}"
    ledger.add(saved.embedding(share) + hidden, hidden)
    _, *statistics = share.inner_norm("hidden", 0, share.outer)
    joins = [*share.norm("embedded"), *statistics, Piece("joined", 2 * share.stream, share.size)]
    start = sum(piece.size for piece in joins)
    last = sum(piece.size for piece in share.norm())
    if not share.config.model.recompute.covers_prediction_ahead:
        ledger.add(start, 3 * share.stream)
        _layer(ledger, share, plan)
        ledger.add(last)
        return
    regions = _regions_of(share, plan, ledger.unit)
    regions = [(start, 3 * share.stream, ledger.unit), *regions, (last, 0, ledger.unit)]
    _whole(ledger, share, joins[0], joins[0].size, regions)
    if _hidden_moves(share):  # a head keeps it on the device too
        size, first, last = ledger.groups.pop()
        ledger.groups.append((size + share.stream, first, last))
