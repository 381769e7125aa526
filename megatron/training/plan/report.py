"""``--dry-run``: the plan of a run as text, from configs alone.

Nothing here touches a device. Of the data, index files are read where they exist, to tell epochs;
the tokenizer is loaded where its files exist, to tell the vocabulary, and whether it can make the
samples.
"""

from collections.abc import Iterator, Sequence

from megatron.core.optimizer import groups
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import UserError, human_count
from megatron.training.arguments import ParsedRun
from megatron.training.config import RunConfig
from megatron.training.plan import memory_text, operations, parameter_shapes, traffic
from megatron.training.plan import pipeline as pipeline_plan
from megatron.training.plan.vocabulary import (
    PlannedVocabulary,
    load_tokenizer,
    plan_vocabulary,
    tokenizer_notes,
)

GIB = 2**30
CURVE_POINTS = 5
MOST_STAGES = 16
"""Stages whose layers are listed although all have equally many."""
_MADE_AGAIN = {
    "recomputation": "--recompute-granularity",
    "head": "the head's logits, which are not kept but made in pieces (--logits-at-once)",
}
_AXES = {
    "kv_replica": "hold the same key and value heads",
    "cp_inner": "trade heads for positions",
    "cp_outer": "pass keys on",
    "dp_cp": "see different tokens, gradients are summed over them",
    "dp_inner": "share out a set of what replicas hold",
    "dp_outer": "hold the same share",
    "ends": "first and last stage",
    "etp": "share each expert's matrices",
    "ep": "share out the experts",
    "etp_ep": "hold all experts together, and send each other tokens",
    "edp": "replicas of the experts",
    "edp_inner": "share out a set of what replicas of experts hold",
    "edp_outer": "hold the same share of it",
}
_OF_EXPERTS = ("etp", "ep", "etp_ep", "edp", "edp_inner", "edp_outer")
MOST_SIZES = 20
"""Steps of a batch-size ramp that are shown."""


def report(run: ParsedRun[RunConfig], program: str) -> str:
    """Return the whole plan.

    Raises:
        UserError: the tokenizer is there, and no samples can be made with it.
    """
    config = run.config
    tokenizer = load_tokenizer(config.tokenizer)
    tensor_parallel = config.parallel.tensor_model_parallel_size
    vocabulary = plan_vocabulary(config.tokenizer, tokenizer, tensor_parallel)
    memory = "memory per rank" if config.placement.num_ranks == 1 else "memory by pipeline rank"
    sections = {
        "layout": _layout(config),
        "pipeline": _pipeline(config),
        "parameters": _parameters(config, vocabulary),
        "batches": _batches(config),
        "data": _data(config, tokenizer),
        "learning rate": _learning_rate(config),
        "optimizer groups": _groups(config, vocabulary),
        "operations": _operations(config, vocabulary),
        "communication": traffic.lines(config, vocabulary.padded_rows),
        memory: memory_text.lines(
            config, run.origins, vocabulary.padded_rows, run.invocation.dry_run_memory * GIB
        ),
        "settings": run.lines(),
    }
    lines = [f"plan of {program} (nothing was started)"]
    for title, content in sections.items():
        listed = list(content)
        if listed:
            lines += ["", f"{title}:", *(f"  {line}" for line in listed)]
    return "\n".join(lines)


def _layout(config: RunConfig) -> Iterator[str]:
    world = config.process.world_size
    names = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    sizes = config.parallel.grids(world)[0].sizes
    factors = " x ".join(f"{name} {sizes[axis]}" for axis, name in names.items())
    yield f"processes {world} = {factors}"
    if world > 1:
        yield f"ranks count up along {', then '.join(names[axis] for axis in sizes)}"
        yield f"ranks of a process group: {', '.join(_process_groups(config))}"
    counts = [len(stage.layers) for stage in config.stages]
    each = " ".join(map(str, counts))
    if len(counts) > MOST_STAGES and len(set(counts)) == 1:
        each = f"{counts[0]} in each of {len(counts)}"
    yield f"layers per stage: {each} = {sum(counts)}"


def _process_groups(config: RunConfig) -> Iterator[str]:
    """Yield the axes that have several ranks; those that no flag names in words."""
    has_experts = config.model.moe.num_experts is not None
    for name, size in config.axis_sizes.items():
        if size > 1 and (has_experts or name not in _OF_EXPERTS):
            yield f"{name} {size}" + (f" ({_AXES[name]})" if name in _AXES else "")


def _pipeline(config: RunConfig) -> Iterator[str]:
    placement, count = config.placement, pipeline_plan.microbatches(config)
    has_pairs = config.pipeline.overlap_moe_expert_parallel_comm
    if placement.num_ranks == 1 and not has_pairs:
        return
    which = "an" if config.batch_sizes.is_constant else "the largest"
    name = "combined " * has_pairs + config.pipeline.schedule_name(placement)
    yield (
        f"schedule {name}: {placement.num_ranks} rank{'s' * (placement.num_ranks > 1)} with "
        f"{placement.num_chunks} stage{'s' * (placement.num_chunks > 1)} each, {count} "
        f"microbatch{'es' * (count > 1)} in {which} iteration"
    )
    if not config.training.skip_train:
        again = ", recomputation left out" * (config.model.recompute.granularity is not None)
        text, value = pipeline_plan.closed_form(config.pipeline, placement, count)
        bubble = pipeline_plan.bubble(config.pipeline, placement, count)
        yield (
            f"bubble {bubble:.2%} of the work by simulation, {value:.2%} by the closed form {text} "
            f"(stages taken as equal, transfers as free{again})"
        )
    alive = "" if config.training.skip_train else ", and the most microbatches alive at once"
    ahead = ", m prediction ahead" if config.model.mtp.depths else ""
    yield f"by rank, its stages with their layers (E embedding{ahead}, L head){alive}:"
    stages = config.stages
    moments = pipeline_plan.alive(config.pipeline, placement, count)
    for rank, found in enumerate(moments):
        mine = placement.positions(rank)
        held = " | ".join(f"{position}: {_content(stages[position])}" for position in mine)
        most = f"; {max(moment.microbatches for moment in found):g} alive" if alive else ""
        yield f"  {rank:>2}   {held}{most}"


def _content(stage: Stage) -> str:
    """Return what a stage owns: its layers and ends."""
    layers = stage.layers
    words = ["E"] * stage.is_first
    words += [f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])] if layers else []
    words += ["m"] * stage.num_mtp_layers + ["L"] * stage.is_last
    return " ".join(words) or "none"


def _parameters(config: RunConfig, vocabulary: PlannedVocabulary) -> Iterator[str]:
    kinds = parameter_shapes.parameters_by_kind(config.model, vocabulary.rows)
    total = sum(kinds.values())
    active = parameter_shapes.active_parameters(config.model, vocabulary.rows)
    visited = f", of which {human_count(active)} work on a token" if active < total else ""
    yield f"total {total:,} ({human_count(total)}){visited}"
    for kind, count in kinds.items():
        yield f"  {kind:<20} {count:>17,}  {count / total:6.1%}"
    yield (
        f"vocabulary {vocabulary.rows:,} rows, padded to {vocabulary.padded_rows:,} "
        f"({vocabulary.source})"
    )


def _batches(config: RunConfig) -> Iterator[str]:
    training, replicas = config.training, config.data_parallel_size
    yield (
        f"micro-batch {training.micro_batch_size} x {replicas} replicas x "
        f"{config.batch_sizes.final // config.samples_per_pass} microbatches = "
        f"global batch {config.batch_sizes.final}"
    )
    if not config.batch_sizes.is_constant:
        runs = list(config.batch_sizes.runs())
        for place, (first, consumed, size, count) in enumerate(runs):
            if MOST_SIZES // 2 <= place < len(runs) - MOST_SIZES // 2:
                if place == MOST_SIZES // 2:
                    yield f"  ... {len(runs) - 2 * place} more sizes"
                continue
            length = (
                "to the end" if count is None else f"for {count:,} iteration{'s' * (count > 1)}"
            )
            yield f"  from iteration {first + 1:,} (sample {consumed:,}): {size} {length}"
    samples = config.total_samples
    yield (
        f"{config.total_iterations:,} iterations = {samples:,} samples = "
        f"{human_count(samples * config.data.seq_length)} tokens"
    )


def _data(config: RunConfig, tokenizer: Tokenizer | UserError) -> Iterator[str]:
    data = config.data
    if data.dataloader_type == "external":
        yield "loaders of the program's own (--dataloader-type external)"
        return
    if not data.sources:
        yield "none named; a run needs --data-path, --train-data-path or --mock-data"
        return
    # Here, since numpy takes time to import and is needed where there is data only.
    from megatron.core.datasets.plan import describe
    from megatron.training.data import sizes

    notes = list(tokenizer_notes(data, tokenizer))
    try:
        rows = describe(data, sizes(config, notes.append))
    except UserError as error:
        yield f"not read: {error}"
        return
    if not config.training.skip_train and all(row.split != "train" for row in rows):
        notes.append("no training data: a run is refused")
    yield from (row.line() for row in rows)
    yield from (f"a run is refused: {row.refusal}" for row in rows if row.refusal)
    yield from notes


def _learning_rate(config: RunConfig) -> Iterator[str]:
    if config.training.skip_train or not config.total_iterations:
        return
    schedule = config.learning_schedule
    yield f"{schedule.decay_style}, counted in {schedule.unit}"
    for position in schedule.points(CURVE_POINTS):
        rates = schedule.rates_at(position)
        apart = rates.decoupled_lr
        ends = "" if apart is None else f", embedding and head {apart:.6e}"
        yield f"  after {position:>13,}: {rates.lr:.6e}{ends}, weight decay {rates.weight_decay:g}"
    yield (
        f"warm-up ends after {schedule.warmup:,}, decay after {schedule.decay:,} {schedule.unit}"
    )


def _groups(config: RunConfig, vocabulary: PlannedVocabulary) -> Sequence[str]:
    if config.training.skip_train:
        return ()
    group_of = groups.grouping(config.optimizer)
    entries = [
        groups.Entry(parameter.traits.name, group_of(parameter.traits), parameter.numel)
        for parameter in parameter_shapes.all_parameters(config.model, vocabulary.rows)
        if parameter.trained
    ]
    groups.check_overrides(config.optimizer, [entry.name for entry in entries])
    return groups.describe(entries)


def _operations(config: RunConfig, vocabulary: PlannedVocabulary) -> Iterator[str]:
    per_sample = operations.flops_per_sample(config, vocabulary.padded_rows)
    per_iteration = per_sample * config.batch_sizes.final
    model = config.model
    is_causal = any(model.layer_is_causal(layer) for layer in range(model.all_layers))
    counted = " (causal attention counted as half of the square)" if is_causal else ""
    yield (
        f"{per_iteration:.4e} FLOPs per iteration, {per_iteration / config.process.world_size:.4e}"
        f" per rank{counted}"
    )
    yield f"{per_sample * config.total_samples:.4e} FLOPs in the whole run"
    again = operations.recomputed_flops_per_sample(config, vocabulary.padded_rows)
    if again and not config.training.skip_train:
        parts = ", ".join(f"{_MADE_AGAIN[part]} {n / per_sample:.1%}" for part, n in again.items())
        total = sum(again.values())
        yield (
            f"{(per_sample + total) * config.batch_sizes.final:.4e} FLOPs per iteration with what "
            f"backward makes again: {total / per_sample:.1%} more ({parts}), which no log counts"
        )
