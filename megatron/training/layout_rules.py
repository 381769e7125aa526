"""Rules of a layout: what model, sequence and processes ask of the parallel sizes.

Each takes the run and the origin of each value, as those in `rules`, and raises `UserError` naming
flags, values and what to change; where some layout of the same processes works, `rules.check` adds
the nearest (`nearest_layout`). Nothing here needs a process group.
"""

from collections.abc import Callable, Mapping

from megatron.core.config import Origin
from megatron.core.context_parallel.checks import check_heads, check_sequence
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError, divisors
from megatron.training.config import RunConfig
from megatron.training.wording import flag, listed, nearest_multiples, nearest_of

SHOWN = 24
"""Sizes that a message lists."""
Origins = Mapping[str, Origin]
Rule = Callable[[RunConfig, Origins], None]


def world_holds_the_layout(config: RunConfig, origins: Origins) -> None:
    """The dense and the expert layout must each fill the processes a whole number of times."""
    parallel, world = config.parallel, config.process.world_size
    dense = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    )
    expert = (
        "expert_tensor_parallel_size",
        "expert_model_parallel_size",
        "pipeline_model_parallel_size",
    )
    for names in (dense, expert):
        product = 1
        for name in names:
            product *= getattr(parallel, name)
        if world % product:
            factors = " x ".join(
                f"{flag(name)} {getattr(parallel, name)} ({origins[name]})" for name in names
            )
            raise UserError(
                f"{world} process{'es' * (world > 1)} cannot hold {factors} = {product}; start a "
                f"multiple of {product} processes (such as {nearest_multiples(world, product)}"
                f"{_how_to_start(product) * (world == 1)}), or {_smaller(world)}"
            )
    parallel.grids(world)


def instances_share_the_replicas(config: RunConfig, origins: Origins) -> None:
    """Each instance of the optimizer gets equally many replicas, and more than one."""
    _ = config.shares


def heads_divide_over_tensor_ranks(config: RunConfig, origins: Origins) -> None:
    """Every tensor-parallel rank gets whole heads; groups are split or repeated."""
    check_tensor_heads(config.model, config.parallel.tensor_model_parallel_size)


def check_tensor_heads(model: TransformerConfig, tp: int) -> None:
    """Refuse heads and query groups that do not divide over tensor-parallel ranks."""
    heads, groups = model.attention.num_attention_heads, model.attention.num_query_groups
    if heads % tp:
        raise UserError(
            f"--num-attention-heads ({heads}) is not divisible by --tensor-model-parallel-size "
            f"({tp}); try --tensor-model-parallel-size {nearest_of(divisors(heads), tp)}"
        )
    if groups % tp and tp % groups:
        fitting = [n for n in divisors(heads) if groups % n == 0 or n % groups == 0]
        raise UserError(
            f"--num-query-groups ({groups}) and --tensor-model-parallel-size ({tp}): one must "
            f"divide the other; try --tensor-model-parallel-size {nearest_of(fitting, tp)}"
        )


def widths_divide_over_tensor_ranks(config: RunConfig, origins: Origins) -> None:
    """Every tensor-parallel rank gets the same share of the MLP."""
    tp = config.parallel.tensor_model_parallel_size
    check_tensor_widths(config.model, tp, origins["ffn_hidden_size"])


def check_tensor_widths(model: TransformerConfig, tp: int, origin: str) -> None:
    """Refuse an MLP that does not divide over tensor-parallel ranks."""
    width = model.mlp.ffn_hidden_size
    if width % tp:
        raise UserError(
            f"--ffn-hidden-size ({width}, {origin}) is not divisible by "
            f"--tensor-model-parallel-size ({tp}); try {nearest_multiples(width, tp)}"
        )


def experts_divide_over_their_ranks(config: RunConfig, origins: Origins) -> None:
    """Every rank along EP gets equally many experts, and along ETP an equal share of each."""
    parallel, moe = config.parallel, config.model.moe
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if moe.num_experts is None:
        if ep > 1:
            raise UserError(
                f"--expert-model-parallel-size ({ep}) spreads experts, but the model is dense; "
                "remove it, or give --num-experts"
            )
        return
    if moe.num_experts % ep:
        raise UserError(
            f"--num-experts ({moe.num_experts}) is not divisible by --expert-model-parallel-size "
            f"({ep}); try --expert-model-parallel-size {nearest_of(divisors(moe.num_experts), ep)}"
        )
    width = moe.moe_ffn_hidden_size
    if width % etp:
        origin, other = origins["moe_ffn_hidden_size"], origins["expert_tensor_parallel_size"]
        raise UserError(
            f"--moe-ffn-hidden-size ({width}, {origin}) is not divisible by "
            f"--expert-tensor-parallel-size ({etp}, {other}); try --moe-ffn-hidden-size "
            f"{nearest_multiples(width, etp)}, or --expert-tensor-parallel-size 1"
        )
    shared, tp = moe.moe_shared_expert_intermediate_size, parallel.tensor_model_parallel_size
    if shared is not None and shared % tp:
        raise UserError(
            f"--moe-shared-expert-intermediate-size ({shared}) is not divisible by "
            f"--tensor-model-parallel-size ({tp}); try {nearest_multiples(shared, tp)}"
        )


def vocabulary_divides_over_tensor_ranks(config: RunConfig, origins: Origins) -> None:
    """Rows that are not padded must divide as they are."""
    tp, tokenizer = config.parallel.tensor_model_parallel_size, config.tokenizer
    rows = tokenizer.padded_vocab_size
    if rows is not None and rows % tp:
        raise UserError(
            f"--padded-vocab-size ({rows}) is not divisible by --tensor-model-parallel-size ({tp});"
            f" try {nearest_multiples(rows, tp)}"
        )


def pipeline_holds_the_layers(config: RunConfig, origins: Origins) -> None:
    """The layers can be split over the stages as asked."""
    assert config.stages


def sequence_divides(config: RunConfig, origins: Origins) -> None:
    """The sequence is cut into 2 x CP pieces, and over TP with sequence parallelism."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    check_sequence(config.data.seq_length, parallel.context_parallel_size, tp)
    length = config.data.t5.decoder_seq_length
    if length is not None:
        flag = "--decoder-seq-length"
        check_sequence(length, parallel.context_parallel_size, tp, flag=flag)


def context_can_communicate(config: RunConfig, origins: Origins) -> None:
    """Each layer's way to attend over the sequence's ranks must suit heads and sizes."""
    parallel, context = config.parallel, config.context
    for kind in dict.fromkeys(context.kinds(config.model.all_layers)):
        check_heads(
            kind,
            config.model.attention.num_attention_heads,
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            context.hierarchical_context_parallel_sizes,
        )


def schedule_goes_with_the_stages(config: RunConfig, origins: Origins) -> None:
    """The schedule is made for as many stages per rank as there are.

    Every schedule takes any number of microbatches.
    """
    assert config.pipeline.schedule(config.placement, 1)


def torch_shards_whole_models(config: RunConfig, origins: Origins) -> None:
    """What torch's fully_shard shares out is a model in one piece, whose backwards autograd runs.

    Megatron-LM refuses a pipeline too.
    """
    stages = config.parallel.pipeline_model_parallel_size
    if config.replicas.use_torch_fsdp2 and stages > 1:
        raise UserError(
            "--use-torch-fsdp2 does not go with --pipeline-model-parallel-size "
            f"({stages}), whose schedules take a backward apart; use --use-megatron-fsdp, which "
            "shares out the same on any schedule"
        )


def biases_need_all_heads(config: RunConfig, origins: Origins) -> None:
    """Learned biases are of all heads and a rank's own queries, which no all-to-all trades."""
    if config.model.position.position_embedding_type != "relative":
        return
    kinds = [kind for kind in config.context.cp_comm_type if "a2a" in kind]
    if kinds and config.parallel.context_parallel_size > 1:
        raise UserError(
            f"--cp-comm-type {kinds[0]} does not go with --position-embedding-type relative; use "
            "p2p or all_gather"
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    experts_divide_over_their_ranks,
    world_holds_the_layout,
    instances_share_the_replicas,
    heads_divide_over_tensor_ranks,
    widths_divide_over_tensor_ranks,
    vocabulary_divides_over_tensor_ranks,
    pipeline_holds_the_layers,
    schedule_goes_with_the_stages,
    sequence_divides,
    context_can_communicate,
    torch_shards_whole_models,
    biases_need_all_heads,
)


def _smaller(world: int) -> str:
    if world == 1:
        return "leave these flags out"
    fitting = divisors(world)
    more = f" ... {world}" * (len(fitting) > SHOWN)
    return f"choose sizes whose product divides {world}: {listed(fitting[:SHOWN])}{more}"


def _how_to_start(processes: int) -> str:
    return (
        f": torchrun --nproc-per-node {processes}, or with --dry-run --dry-run-world-size "
        f"{processes}"
    )
