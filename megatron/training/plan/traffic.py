"""What each rank communicates, in closed form: calls and bytes per axis and collective.

Pure functions of the run's config, without torch, so that a dry run can price a layout. They follow
from the layers' own rules (`tensor_parallel.mappings`, `context_parallel`, `distributed`), and
tests compare them with what `comm.counting` counts in real iterations, to the byte.

Bytes are payload as `comm` counts it: the full tensor of a call, what an all-gather returns and
what a reduce-scatter takes. `wire_bytes` says what of that leaves a rank. The part of forwards and
backwards is in `traffic_passes`.

A training iteration, from zero_grad to the new weights, moves what the table has. There t, c are
the ranks along tp, cp; m the microbatches of a replica; N = B S/c the tokens of a microbatch on a
rank; H the hidden size; L the rank's layers in v chunks; n, g the query and key heads of a
tensor-parallel rank (g at least 1), D their channels, k = 2 g D; e the bytes of a weight, a those
of a sum (4, or 8 with --fp64). Each line is (calls) x (bytes of one), all directions together. Axes
of one rank move nothing.

    tp              all_reduce      4 m L x N H e       exits forward, entries backward
                    all_reduce      m x N H e           embedding, forward
                    all_reduce      m x N H e           head, backward
                    all_reduce      m x N a, m x 3 N a  cross entropy: maximum; sums
    tp, sequence    all_gather      6 m L x N H e       entries (again in backward), exits back
    parallel        reduce_scatter  4 m L x N H e       exits, entries back
                    each of them    m x N H e           embedding
                    all_gather      2 m x N H e         head, forward and again in backward
                    reduce_scatter  m x N H e           head, backward
                    all_reduce      m x N a, m x 3 N a  cross entropy
                    all_reduce      v x elements a      gradients of norms and biases, which
                                                        see a part of the tokens
    tp              all_reduce      v x elements a      gradients of query and key norms, which
                                                        see a part of the heads
    kv_replica      all_reduce      v x L/v k (H + 1) a   key and value rows that several
                                                        ranks hold; no 1 without biases
    cp, p2p         shift           2 (c-1) m L x N k e   keys and values, forward and backward
                    shift           (c-1) m L x N k a     their gradients
    cp, all_gather  all_gather      2 m L x c N k e       keys and values, twice
                    reduce_scatter  m L x c N k a         their gradients
    cp, a2a         all_to_all      2 m L x N (n D + r k) e   with r = lcm(g, c) / g copies
                    all_to_all      2 m L x N n D e           outputs
    cp_inner        all_to_all      as a2a, with the inner size for c
    cp_outer        shift           as p2p, with the outer size for c, and r k for k
    cp              all_reduce      m x a               tokens of a microbatch, last stage,
                                                        with --no-calculate-per-token-loss
    pp              send, receive   m x N H e each (a t-th of it with sequence parallelism) for
                                    every neighbour of a stage that is on another rank:
                                    activations one way, gradients the other; on any schedule
    ends            all_reduce      1 x rows H a        a tied matrix of padded rows / t, an
                                                        embedding copied for K > 0
    tp, cp          all_reduce      m L x (2 E + 2) a   losses of routers; for each sample with
                                                        seq_aux_loss
    dp              all_gather      m L x d (E + 1) a   loads so far, of d replicas, with
                                                        global_aux_loss
    tp, cp          all_gather      m L x T' (K + 2) 8  choices that full experts drop, with
                                    m L x T' K a        --moe-expert-capacity-factor; weights
    dp, tp, cp      all_reduce      1 x L E 8           loads that move biases of experts
    etp_ep, allgather   all_gather, reduce_scatter
                        2, 2 m L x R T H e              tokens, outputs and their gradients
                        1, 1 m L x R T K a              weights, and their gradients
                        1, 0 m L x R T K 8              numbers of the chosen experts
    etp_ep,         all_to_all      4 m L x T K F H e   rows there and back, and gradients
    alltoall        all_gather      1 m L x R E 8       how many rows go where
    tp              all_gather      2 m L x t T H e     without sequence parallelism: outputs of
                                                        experts, gradients of their inputs
    dp_cp           all_reduce      1 x elements g      for every bucket, padding included
    edp             all_reduce      1 x elements g      the same, of experts
    world           all_reduce      1 x 64, 1 x 16      totals; norm of the gradient
                    all_reduce      1 x 8               norm of weights, --log-params-norm
                    all_reduce      1 x 8 x groups      --log-grad-norms-by-group

Of layers with experts (of whom E in each) T = N / t are the tokens that a rank routes, K the
choices of each, R the ranks along etp_ep and F those along etp. Along etp_ep H is that of
--moe-latent-size where it is given. In an all-to-all a choice that is
dropped moves nothing, and takes nothing from the payload: then the table says what it is at most.
Shared experts move what an MLP moves. T' are the tokens gathered: t T over tp, then c t T over cp.
Where --moe-router-dtype is finer a is of that.

What replicas share out travels in other ways (`traffic_shares`); g are the bytes in which
gradients travel.

Multi-latent attention enters its heads three times: as wide as the queries' latent (or H), as
that of keys and values, and as the rotary key, which is not gathered again; g is n, and values
have channels of their own. With --tp-comm-overlap and sequence parallelism, gathers forward and
scatters backward of entries, and all of exits, are t - 1 shifts of N H e / t each instead,
embedding aside (through `comm`; torch's own fused operators, which move as much, it cannot
count).

Of an encoder-decoder N is that of the encoder's text in the encoder's layers, and that of the
decoder's in its own and in the head. The embedding has a line for each text. Cross-attention in one
of L'' layers adds to these

    tp              all_reduce      2 m L'' x N H e     exit forward, entry of queries backward
                    all_reduce      m L'' x N' H e      entry of keys and values, backward
    tp, sequence    as for the entries and exits of attention, of N and of N' tokens
    parallel

where N' are the encoder's, and over cp moves what attention does with the keys of N' tokens.
Between stages travel both texts, N + N'.

Each of K layers of multi-token prediction adds, on the last stage, what a layer, an embedding
and a head with its cross entropy move. Counts of tokens over cp are 1 + K numbers then, in both
modes of the loss, and totals K numbers more. L' layers with experts add l + L' (E + 1 + l) numbers
to the totals, of l losses of routers: the losses, and by layer loads and losses.

Where head and loss work on q > 1 pieces of the sequence (--logits-at-once), the head's input is
not gathered again, and cross entropy makes its two calls for every piece, forward and backward:
as many bytes in each direction.

Muon moves what `traffic_updates` says.

What is recomputed makes the calls of its forward again in backward; for the inputs of whole
layers that ranks share (--distribute-saved-activations) comes an all_gather of N H e over tp.

Left out is what does not belong to every iteration: timers across ranks, checks of replicas,
checkpoints, evaluation.
"""

from collections.abc import Mapping

from megatron.core.optimizer.groups import grouping
from megatron.core.transformer.plan import routers_of
from megatron.core.utils import human_bytes
from megatron.training.config import RunConfig
from megatron.training.plan.parameter_shapes import all_parameters
from megatron.training.plan.traffic_passes import (
    Book,
    Costs,
    add_biases,
    add_passes,
    further_losses,
)
from megatron.training.plan.traffic_shares import add_gathers, add_sums
from megatron.training.plan.traffic_updates import add_updates

FP64 = 8
TOTALS = 8
"""Numbers that `objective.Totals` sums over the world, beside auxiliary losses and loads."""
NORM = 2
"""Numbers that the optimizer sums over the world: the squares of the gradient, its zeros."""


def expected(
    config: RunConfig, padded_rows: int, num_microbatches: int, coordinates: Mapping[str, int]
) -> Costs:
    """Return what a rank moves in one training iteration; the table is on top.

    Args:
        config: the run; its world size is that of the process config.
        padded_rows: rows of the vocabulary, padding included.
        num_microbatches: of a replica.
        coordinates: of the rank, by axis; only ``pp`` makes a difference, and where optimizer
            states are shared out and query groups are shared by ranks, or matrices by Muon,
            ``dp`` and ``cp``.
    """
    book = Book(config.axis_sizes)
    add_passes(book, config, padded_rows, num_microbatches, coordinates["pp"], trains=True)
    add_sums(book, config, padded_rows, num_microbatches, coordinates)
    add_updates(book, config, padded_rows, coordinates)
    add_biases(book, config, coordinates["pp"])
    numbers = TOTALS + further_losses(config.model) + _of_routers(config)
    book.add("world", "all_reduce", numbers * FP64)
    book.add("world", "all_reduce", NORM * FP64)
    if config.logging.log_params_norm:
        book.add("world", "all_reduce", FP64)
    if config.logging.log_grad_norms_by_group:
        group_of = grouping(config.optimizer)
        everyone = all_parameters(config.model, padded_rows)
        count = len({group_of(p.traits).name for p in everyone if p.trained})
        book.add("world", "all_reduce", count * FP64)
    return book.costs


def expected_evaluation(
    config: RunConfig, padded_rows: int, num_microbatches: int, coordinates: Mapping[str, int]
) -> Costs:
    """Return what a rank moves in one evaluation: the forward parts of the table, and totals."""
    book = Book(config.axis_sizes)
    add_passes(book, config, padded_rows, num_microbatches, coordinates["pp"], trains=False)
    add_gathers(book, config, padded_rows, num_microbatches, coordinates["pp"], trains=False)
    book.add("world", "all_reduce", (TOTALS + further_losses(config.model)) * FP64)
    return book.costs


def _of_routers(config: RunConfig) -> int:
    """Return the numbers in the totals that routers add: losses, and loads and losses by layer."""
    layers, experts = len(routers_of(config.model)), config.model.moe.num_experts
    if not layers or experts is None:
        return 0
    losses = len(config.model.router.loss_weights)
    return losses + layers * (experts + 1 + losses)


def wire_bytes(op: str, payload: float, ranks: int) -> float:
    """Return the bytes that a rank sends (of a receive: gets) for a payload, by ring algorithms.

    An all-reduce is a reduce-scatter and an all-gather; in each a rank passes on every share but
    one. What is sent to one peer goes over the wire as it is.
    """
    if ranks == 1:
        return 0.0
    shares = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    if op in shares:
        return shares[op] * payload * (ranks - 1) / ranks
    assert op in ("send", "receive", "shift"), op
    return float(payload)


def lines(config: RunConfig, padded_rows: int) -> list[str]:
    """Return what an iteration moves on the pipeline rank that moves most, one line per axis."""
    sizes = config.axis_sizes
    count = config.batch_sizes.final // config.samples_per_pass
    ranks = [expected(config, padded_rows, count, {"pp": rank}) for rank in range(sizes["pp"])]

    def wire(costs: Costs, axis: str | None = None) -> float:
        return sum(
            wire_bytes(op, cost.bytes, sizes[name])
            for (name, op), cost in costs.items()
            if axis in (None, name)
        )

    busiest = max(range(len(ranks)), key=lambda rank: wire(ranks[rank]))
    costs = ranks[busiest]
    if not costs:
        return []
    where = (
        f"a rank at pipeline coordinate {busiest}, the busiest," if len(ranks) > 1 else "each rank"
    )
    found = [
        f"{where} moves {human_bytes(wire(costs))} an iteration by ring algorithms (in brackets: "
        "calls, and the tensors of all of them)"
    ]
    for axis in sorted({name for name, _ in costs}, key=lambda name: -wire(costs, name)):
        listed = ", ".join(
            f"{op} ({cost.calls:,}, {human_bytes(cost.bytes)})"
            for (name, op), cost in costs.items()
            if name == axis
        )
        found.append(f"  {axis:<10} {human_bytes(wire(costs, axis)):>10}  {listed}")
    return found
