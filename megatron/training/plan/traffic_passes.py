"""What forwards and backwards move: tensor, context and pipeline parallelism, in closed form.

`traffic` has the whole of an iteration, with a table; here is the part that every microbatch adds.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from megatron.core.optimizer.memory import BYTES
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.plan import (
    BlockKind,
    judged_routers_of,
    layer_plan,
    loss_pieces,
    mtp_layer_plan,
)
from megatron.core.utils import divide
from megatron.training.config import RunConfig
from megatron.training.plan import stacks
from megatron.training.plan.saved_routers import INDEX
from megatron.training.plan.traffic_routers import add_router


class Cost(NamedTuple):
    """What one kind of collective moves over one axis."""

    calls: int
    bytes: int


Costs = dict[tuple[str, str], Cost]
"""By (axis, collective), as `comm.Traffic` counts; what is not called is not there."""


class Book:
    """Adds up; an axis of one rank costs nothing."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.costs = dict(sizes), Costs()

    def add(self, axis: str, op: str, size: int, calls: int = 1) -> None:
        """Add ``calls`` of ``size`` bytes each."""
        if self.sizes[axis] > 1 and calls:
            before = self.costs.get((axis, op), Cost(0, 0))
            self.costs[axis, op] = Cost(before.calls + calls, before.bytes + calls * size)


def add_passes(
    book: Book, config: RunConfig, padded_rows: int, count: int, pp_rank: int, *, trains: bool
) -> None:
    """Add the forwards of ``count`` microbatches through a rank's stages, and the backwards."""
    stages = config.stages
    rows = padded_rows // config.parallel.tensor_model_parallel_size
    for position in config.placement.positions(pp_rank):
        _Stage(book, config, stages[position], rows, count, trains).add()
        _transfers(book, config, position, count, trains)


def add_biases(book: Book, config: RunConfig, pp_rank: int) -> None:
    """Add the loads that move the biases of a rank's experts, once an iteration."""
    model = config.model
    if not model.router.moe_router_enable_expert_bias or model.moe.num_experts is None:
        return
    biased, judged = 0, judged_routers_of(model)
    for position in config.placement.positions(pp_rank):
        stage = config.stages[position]
        ahead = range(model.num_layers, model.num_layers + stage.num_mtp_layers)
        biased += sum(number in judged for number in (*stage.layers, *ahead))
    for axis in ("dp", "tp", "cp"):
        size = biased * model.moe.num_experts * INDEX
        book.add(axis, "all_reduce", size, calls=int(biased > 0))


def further_losses(model: TransformerConfig) -> int:
    """Return how many losses a model has besides its main one, those of routers left out."""
    return model.mtp.depths + len(model.bert.loss_weights)


class _Heads(NamedTuple):
    """Heads of a tensor-parallel rank, and their channels."""

    queries: int
    keys: int
    channels: int
    """Of a query or key."""
    values: int
    """Of a value."""


class _Stage:
    """One stage of a rank, with ``count`` microbatches going through it."""

    def __init__(
        self, book: Book, config: RunConfig, stage: Stage, rows: int, count: int, trains: bool
    ) -> None:
        self.book, self.config, self.stage = book, config, stage
        self.count, self.trains = count, trains
        self.forwards = 1
        """Of what is being added: recomputation makes it 2."""
        self.weight = BYTES[config.precision.params_dtype]
        self.total = BYTES[config.precision.accumulation_dtype]
        self.texts = stacks.lengths(config)
        self.tokens = self._tokens(self.texts[-1])
        """Of what is being added."""
        samples = config.training.micro_batch_size
        share = divide(self.tokens, samples)
        pieces = loss_pieces(share, samples, rows, limit=config.model.logits_at_once)
        # As `tensor_split` does: the first ones are longer.
        self.pieces = [samples * (share // pieces + (i < share % pieces)) for i in range(pieces)]
        parallel = config.parallel
        self.split = parallel.sequence_parallel
        self.in_pieces = parallel.sequence_parallel and parallel.tp_comm_overlap

    def add(self) -> None:
        """Add what the stage's modules move, in their order."""
        model, stage = self.config.model, self.stage
        plan, kinds = layer_plan(model), self.config.context.kinds(model.all_layers)
        for length in self.texts * stage.is_first:
            with self._reading(length):
                self._leave()
        units = stacks.units_made_again(model, stage.layers)
        if model.recompute.distribute_saved_activations:
            for unit in units:
                with self._reading(stacks.length(self.config, unit[0])):
                    self._share_input()
        whole = {number for unit in units for number in unit}
        for number in stage.layers:
            length = stacks.length(self.config, number)
            with self._reading(length), self._again(number in whole):
                for sublayer in plan[number].sublayers:
                    self._block(sublayer.kind, kinds[number])
        if stage.is_last:
            self._losses()
        for depth in range(stage.num_mtp_layers):
            self._leave()  # the embedding
            with self._again(model.recompute.covers_prediction_ahead):
                for sublayer in mtp_layer_plan(model, depth).sublayers:
                    self._block(sublayer.kind, kinds[depth])
            self._losses()
        if stage.is_last:
            self._counts()

    @contextmanager
    def _again(self, is_recomputed: bool) -> Iterator[None]:
        """Count forwards of the block twice where backward makes them again."""
        before = self.forwards
        if is_recomputed and self.trains:
            self.forwards = 2
        yield
        self.forwards = before

    def _tokens(self, length: int) -> int:
        """Return the tokens of a microbatch on a rank, of samples of so many positions."""
        share = divide(length, self.config.parallel.context_parallel_size)
        return self.config.training.micro_batch_size * share

    @contextmanager
    def _reading(self, length: int) -> Iterator[None]:
        """Count tokens of samples of so many positions."""
        before = self.tokens
        self.tokens = self._tokens(length)
        yield
        self.tokens = before

    def _share_input(self) -> None:
        """Gather the input of a unit for its second run, of which each rank has kept a share."""
        tp = self.book.sizes["tp"]
        share = -(-self.tokens * self.config.model.hidden_size // tp)
        size = tp * share * BYTES[self.config.residual_dtype]
        self.book.add("tp", "all_gather", size, self.count * self.trains)

    def _block(self, kind: BlockKind, context_kind: str) -> None:
        model, modules = self.config.model, self.config.model.recompute.modules
        if kind == "mlp":
            with self._again("mlp" in modules):
                self._enter_product(model.hidden_size)
                self._leave_product()
            return
        if kind == "moe":
            with self._again("moe" in modules):
                self._experts()
            return
        if kind == "multi_latent_attention":
            rank = model.mla.q_lora_rank
            with self._again("mla_up_proj" in modules):
                self._enter_product(model.hidden_size if rank is None else rank)
                self._enter_product(model.mla.kv_lora_rank)
                self._enter(model.mla.qk_pos_emb_head_dim)
        else:
            self._enter_product(model.hidden_size)
        sources = self.tokens
        if kind == "cross_attention":  # keys and values are made of what the encoder gave
            with self._reading(self.texts[0]):
                self._enter_product(model.hidden_size)
                sources = self.tokens
        with self._again("core_attn" in modules):
            heads = _heads(model, kind, self.config.parallel.tensor_model_parallel_size)
            self._attend(context_kind, heads, sources)
        self._leave_product()

    def _experts(self) -> None:
        """Add what brings tokens to their experts and back, and shared experts."""
        book, model, sizes = self.book, self.config.model, self.book.sizes
        forwards, back = self.count * self.forwards, self.count * self.trains
        share = self.tokens // self.config.training.micro_batch_size
        samples, width = self.config.training.micro_batch_size, model.hidden_size * self.weight
        # Ranks along tp route shares of the positions, which are filled up to divide.
        own = samples * -(-share // sizes["tp"])
        add_router(book, self.config, own, self.count, self.forwards, trains=self.trains)
        if not self.split:
            book.add("tp", "all_gather", sizes["tp"] * own * width, forwards + back)
        width = model.routed_size * self.weight
        assert model.moe.num_experts is not None
        ranks, choices = sizes["etp_ep"], own * model.router.moe_router_topk
        if model.moe.moe_token_dispatcher_type == "allgather":
            for op, times in (("all_gather", forwards), ("reduce_scatter", back)):
                book.add("etp_ep", op, ranks * own * width, times)
                book.add("etp_ep", op, ranks * choices * self.total, times)
            book.add("etp_ep", "all_gather", ranks * choices * INDEX, forwards)
            book.add("etp_ep", "reduce_scatter", ranks * own * width, forwards)
            book.add("etp_ep", "all_gather", ranks * own * width, back)
        elif model.moe.moe_token_dispatcher_type != "flex":  # what a package moves, it knows
            rows = choices * sizes["etp"]
            book.add("etp_ep", "all_gather", ranks * model.moe.num_experts * INDEX, forwards)
            book.add("etp_ep", "all_to_all", rows * width, 2 * (forwards + back))
        if model.moe.moe_shared_expert_intermediate_size is not None:
            with self._again("shared_experts" in model.recompute.modules):
                self._enter_product(model.hidden_size)
                self._leave_product()

    def _losses(self) -> None:
        """The head and its loss: pieces of the sequence are gone through again in backward."""
        if self.config.model.bert.sentence_order_head and self.split:
            samples = self.config.training.micro_batch_size
            size = self.book.sizes["tp"] * samples * self.config.model.hidden_size * self.weight
            self.book.add("tp", "all_gather", size, self.count)  # first positions
        if len(self.pieces) == 1:
            self._enter_product(self.config.model.hidden_size)
            times = 1
        else:
            self._enter(self.config.model.hidden_size)
            times = 1 + self.trains
        for tokens in self.pieces:
            # Of each token the largest logit, then three sums.
            self.book.add("tp", "all_reduce", tokens * self.total, self.count * times)
            self.book.add("tp", "all_reduce", 3 * tokens * self.total, self.count * times)

    def _counts(self) -> None:
        # Of the tokens that count, for each loss, where means of a microbatch are needed.
        further = further_losses(self.config.model)
        if further or not self.config.training.calculate_per_token_loss:
            self.book.add("cp", "all_reduce", (1 + further) * self.total, self.count)

    # A region of tensor parallelism: how wide activations enter, and leave.

    def _enter_product(self, width: int) -> None:
        """Enter a column-parallel layer, which gathers its input again for its weight."""
        if not self.in_pieces:
            self._enter(width)
        else:
            self._in_pieces(width)
        if self.split:
            self._collective("all_gather", width, self.trains)

    def _enter(self, width: int) -> None:
        if self.split:
            self._collective("all_gather", width, self.forwards)
            self._collective("reduce_scatter", width, self.trains)
        else:
            self._collective("all_reduce", width, self.trains)

    def _leave_product(self) -> None:
        """Leave a row-parallel layer."""
        if self.in_pieces:
            self._in_pieces(self.config.model.hidden_size)
        else:
            self._leave()

    def _leave(self) -> None:
        width = self.config.model.hidden_size
        if self.split:
            self._collective("reduce_scatter", width, self.forwards)
            self._collective("all_gather", width, self.trains)
        else:
            self._collective("all_reduce", width, self.forwards)

    def _in_pieces(self, width: int) -> None:
        """Pass shares round the ranks, forward and backward."""
        tp = self.book.sizes["tp"]
        size = self.tokens * width * self.weight // tp
        self.book.add("tp", "shift", size, (tp - 1) * self.count * (self.forwards + self.trains))

    def _collective(self, op: str, width: int, times: int) -> None:
        self.book.add("tp", op, self.tokens * width * self.weight, self.count * times)

    # Attention over a sequence's ranks.

    def _attend(self, kind: str, heads: _Heads, sources: int) -> None:
        """Let queries of this rank's tokens see the keys of ``sources`` tokens of every rank."""
        book, both = self.book, self.count * (self.forwards + self.trains)
        back = self.count * self.trains
        queries = self.tokens * heads.queries * heads.channels
        outputs = self.tokens * heads.queries * heads.values
        keys = sources * heads.keys * (heads.channels + heads.values)
        cp, inner = book.sizes["cp"], book.sizes["cp_inner"]
        if kind == "all_gather":
            book.add("cp", "all_gather", cp * keys * self.weight, both)
            book.add("cp", "reduce_scatter", cp * keys * self.total, back)
            return
        ring = "cp"
        if kind == "a2a" or (kind == "a2a+p2p" and inner > 1):
            axis, ways, ring = ("cp", cp, "") if kind == "a2a" else ("cp_inner", inner, "cp_outer")
            keys *= math.lcm(heads.keys, ways) // heads.keys  # every rank gets a whole head
            # Keys of another text are sent apart, unless they are as many.
            sent = (queries + keys,) if sources == self.tokens else (queries, keys)
            for elements in sent:
                book.add(axis, "all_to_all", elements * self.weight, both)
            book.add(axis, "all_to_all", outputs * self.weight, both)
        if ring:
            hops = book.sizes[ring] - 1
            book.add(ring, "shift", keys * self.weight, hops * both)
            book.add(ring, "shift", keys * self.total, hops * back)


def _heads(model: TransformerConfig, kind: BlockKind, tp: int) -> _Heads:
    attention = model.attention
    queries = attention.num_attention_heads // tp
    if kind == "multi_latent_attention":  # keys and values are made for every head
        return _Heads(queries, queries, model.mla.query_size, model.mla.v_head_dim)
    keys, channels = max(1, attention.num_query_groups // tp), attention.kv_channels
    return _Heads(queries, keys, channels, channels)


def _transfers(book: Book, config: RunConfig, position: int, count: int, trains: bool) -> None:
    """Add what a stage sends to its neighbours on other ranks, and gets from them."""
    placement = config.placement
    positions = config.training.micro_batch_size * sum(stacks.lengths(config))
    elements = divide(positions * config.model.hidden_size, config.sequence_shares)
    size, here = elements * BYTES[config.residual_dtype], placement.owner(position)[0]
    for neighbour, forward, backward in (
        (position - 1, "receive", "send"),
        (position + 1, "send", "receive"),
    ):
        if not 0 <= neighbour < placement.num_stages or placement.owner(neighbour)[0] == here:
            continue
        book.add("pp", forward, size, count)
        book.add("pp", backward, size, count * trains)
