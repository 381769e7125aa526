"""What attention keeps of a microbatch until its backward, in bytes; plain arithmetic.

Which implementation runs decides. On the CPU, and for what fused ops cannot do, it is the tiled one
(`kernels.blocked`), which keeps copies in the dtype of sums, and all probabilities or none. Over a
sequence that is cut over ranks a ring or an all-gather keeps this rank's queries, keys and values,
and as many probabilities as there is room for (`kernels.ring_block`); an all-to-all keeps what the
attention within it does. A plan is for a GPU, unless it says ``--device cpu``; there torch's fused
attention is meant, since nobody knows here whether flash-attn is installed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from megatron.core.optimizer.memory import BYTES
from megatron.training.config import RunConfig

TILE = 64
"""Queries of a tile, at most."""
RING_SCORES = 2**22
"""Scores that a ring holds at once, about."""
PROBABILITIES = 2**25
"""Probabilities of one call that are kept, at most."""
TILE_SCORES = 2**21
"""Scores up to which samples share a tile."""

Kernel = Literal["blocked", "fused", "reference", "ring"]


class Piece(NamedTuple):
    """A piece of memory."""

    name: str
    """By which it counts once."""
    size: int
    """Bytes."""
    item: int
    """Bytes of an element."""


class Heads(NamedTuple):
    """Queries, keys and values of a tensor-parallel rank."""

    heads: int
    groups: int
    channels: int
    """Of a query or key head."""
    values: int
    """Of a value head."""


@dataclass(frozen=True)
class Call:
    """One layer's attention on one rank."""

    kernel: Kernel
    samples: int
    rows: int
    """Positions of a whole sample's queries."""
    sequence: int
    """Those of its keys."""
    heads: Heads
    causal: bool = True
    """A query sees no keys after its own position."""
    cp: int = 1
    """Ranks of a ring, which share the positions."""
    left: int = -1
    """Keys before its own that a query sees; -1 is no limit."""
    right: int = -1
    """Keys after its own, where these are seen at all."""
    softcap: bool = False
    dropout: bool = False
    packed: bool = False
    padded: bool = False
    """Keys of each sample that are padding are hidden."""
    biased: bool = False
    """ALiBi, or biases that were learned, add to the scores."""

    @property
    def queries(self) -> int:
        """Queries of all heads."""
        return self.samples * self.rows // self.cp * self.heads.heads

    @property
    def keys(self) -> int:
        """Keys of all groups that are kept."""
        return self.samples * self.sequence // self.cp * self.heads.groups


class Texts(NamedTuple):
    """What attends to what, in positions of a whole sample."""

    queries: int
    keys: int
    causal: bool
    padded: bool = False
    """Keys of each sample that are padding are hidden."""
    biased: bool = False
    """Learned biases are added; the model keeps them for all layers."""


def saved(
    config: RunConfig,
    layer: int,
    samples: int,
    heads: Heads,
    given: Sequence[Piece],
    texts: Texts,
) -> Iterator[Piece]:
    """Yield what the op keeps, without its output where that is the next projection's input.

    Args:
        config: the run.
        layer: its number, from 0.
        samples: of the microbatch.
        heads: that go in.
        given: what queries, keys and values lie in.
        texts: what its queries and keys are made of.
    """
    size, main = BYTES[config.precision.params_dtype], BYTES[config.precision.accumulation_dtype]
    call, is_exchanged = _call(config, layer, samples, heads, texts)
    q, k = call.queries * heads.channels, call.keys * heads.channels
    v, out = call.keys * heads.values, call.queries * heads.values
    if is_exchanged:
        given = [Piece("exchanged", (q + k + v) * size, size)] * 3
        if call.rows != call.sequence:  # keys of another text are sent apart
            pairs = Piece("exchanged keys", (k + v) * size, size)
            given = [Piece("exchanged", q * size, size), pairs, pairs]
        if call.kernel in ("ring", "fused"):
            yield Piece("output before its exchange", out * size, size)
    # Where elements need not be converted, views are kept as they come.
    if call.kernel == "fused":
        yield from given
    elif call.kernel == "ring":
        yield Piece("copy of queries", q * size, size)
        yield Piece("copy of keys and values", (k + v) * size, size)
    elif call.kernel == "blocked":
        yield Piece("copy of queries", q * main, main)
        yield from given[1:] if size == main else _copies(main, keys=k, values=v)
    else:  # keys and values are repeated for every head
        yield from given[:1] if size == main else _copies(main, queries=q)
        repeats = call.heads.heads // call.heads.groups
        yield from _copies(main, keys=k * repeats, values=v * repeats)
    if call.kernel in ("ring", "fused"):
        yield Piece("sums of exponentials", call.queries * main, main)
    if call.kernel == "blocked" and config.model.offload.is_on:  # each is moved or not by its size
        yield from _score_tiles(call, main)
    else:
        yield Piece("scores", _scores(call, size, main), main)


def _copies(item: int, **elements: int) -> Iterator[Piece]:
    for name, count in elements.items():
        yield Piece(f"copy of {name}", count * item, item)


def _score_tiles(call: Call, main: int) -> Iterator[Piece]:
    """Yield what `_scores` adds up, tile by tile."""
    pairs, _ = _tiles(call)
    keeps = not call.softcap and (pairs <= PROBABILITIES)
    together = max(1, TILE_SCORES // (call.heads.heads * TILE * call.sequence))
    if call.packed:
        together = 1
    for first in range(0, call.samples, together):
        rows = min(together, call.samples - first) * call.heads.heads
        for start, tile in _queries(call):
            low, high = _seen(call, start, tile)
            size = rows * tile * (high - low) * main
            for name in ("scores",) * keeps + ("factors",) * call.dropout:
                yield Piece(f"{name} {first} {start}", size, main)


def _call(
    config: RunConfig, layer: int, samples: int, heads: Heads, texts: Texts
) -> tuple[Call, bool]:
    """Return the attention of a layer, and whether an all-to-all brings its heads together."""
    model, cp = config.model, config.parallel.context_parallel_size
    attention, window = model.attention, model.attention.layer_window(layer)
    alibi = model.position.position_embedding_type == "alibi"
    # An encoder alone has padding as a document of its own.
    packed = config.data.reset_attention_mask or model.bert.encoder_alone
    call = Call(
        kernel=_kernel(config, window is not None and not (alibi or packed)),
        samples=samples,
        rows=texts.queries,
        sequence=texts.keys,
        heads=heads,
        causal=texts.causal,
        left=window[0] if window else -1,
        right=window[1] if window else -1,
        softcap=attention.attention_softcap is not None,
        dropout=attention.attention_dropout > 0,
        packed=packed,
        padded=texts.padded,
        biased=alibi or texts.biased,
    )
    if cp == 1:
        return call, False
    kind = config.context.kinds(model.all_layers)[layer]
    inner, outer = 1, cp
    if kind == "a2a":
        inner, outer = cp, 1
    elif kind == "a2a+p2p":
        inner, outer = config.context.hierarchical_context_parallel_sizes or (1, cp)
    groups = math.lcm(heads.groups, inner) // inner
    heads = heads._replace(heads=heads.heads // inner, groups=groups)
    call = replace(call, heads=heads, cp=outer)
    return (replace(call, kernel="ring") if outer > 1 else call), inner > 1


def _kernel(config: RunConfig, only_window: bool) -> Kernel:
    """Return what attends to whole samples."""
    attention, backend = config.model.attention, config.model.attention_backend
    if backend in ("unfused", "local"):
        return "reference"
    if config.process.device == "cpu" or only_window:
        return "blocked"
    special = attention.softmax_type != "vanilla" or attention.attention_softcap is not None
    return "blocked" if special else "fused"


def _scores(call: Call, size: int, main: int) -> int:
    """Return what is of the size of a matrix of scores."""
    square, heads = call.rows * call.sequence, call.heads.heads
    if call.kernel == "fused":  # a mask, where the op has no words for what is hidden or added
        samples = call.samples if call.packed or call.padded else 1
        is_masked = call.packed or call.padded or call.biased
        return samples * (heads if call.biased else 1) * square * size if is_masked else 0
    if call.kernel == "reference":  # also a mask of a byte
        matrices = 2 + call.dropout + call.softcap
        hidden = square * (call.samples if call.packed or call.padded else 1)
        return matrices * call.samples * heads * square * main + hidden
    pairs, rows = _tiles(call)
    if call.kernel == "ring":
        kept = 0 if call.softcap else min(pairs, PROBABILITIES)
        return round((kept + rows * kept / pairs) * main)
    # Documents make for fewer pairs, but nobody knows how many.
    kept = pairs if pairs <= PROBABILITIES or call.packed else 0
    kept = 0 if call.softcap else min(kept, PROBABILITIES)
    return (kept + (pairs if call.dropout else 0)) * main


@lru_cache(maxsize=1024)
def _tiles(call: Call) -> tuple[int, int]:
    """Return the scores in the tiles of a call, and their rows."""
    pairs = rows = 0
    run = call.sequence // (2 * call.cp)
    for first, tile in _queries(call):
        low, high = _seen(call, first, tile)
        pairs += tile * (high - low)
        # In a ring every run of keys is a block with tiles of its own.
        blocks = (high - 1) // run - low // run + 1 if call.kernel == "ring" else 1
        rows += tile * blocks
    return pairs * call.samples * call.heads.heads, rows * call.samples * call.heads.heads


def _seen(call: Call, first: int, tile: int) -> tuple[int, int]:
    """Return the range of keys that a tile of queries looks at."""
    low = max(0, first - call.left) if call.left >= 0 else 0
    if call.causal:
        return low, first + tile
    high = first + tile + call.right if call.right >= 0 else call.sequence
    return low, min(high, call.sequence)


def _queries(call: Call) -> Iterator[tuple[int, int]]:
    """Yield (first query, queries) of each tile."""
    if call.kernel != "ring":
        starts, run, most = [0], call.rows, TILE
    else:
        run, keys = (length // (2 * call.cp) for length in (call.rows, call.sequence))
        # Of the last rank, whose window is cut short nowhere; without one all see equally much.
        starts = [(call.cp - 1) * run, call.cp * run]
        most = min(TILE, max(RING_SCORES // (call.samples * call.heads.heads * keys), 8))
    for start in starts:
        for first in range(start, start + run, most):
            yield first, min(most, start + run - first)
