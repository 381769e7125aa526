"""Rules across configs: what must fit together, one small function each.

A rule takes the run and the origin of each value, and raises `UserError` naming the flags, their
values and what to change. A rule looks only at the features it is about. `check` runs those that
hold for every run and for a dry run; `check_built` those of a run that is to start.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from megatron.core.config import Config, as_words
from megatron.core.precision import moments
from megatron.core.transformer import offload_config, recompute_config
from megatron.core.utils import UserError, divisors
from megatron.training.config import RunConfig
from megatron.training.layout_rules import LAYOUT_RULES, Origins, Rule, experts_need_an_expert_model
from megatron.training.nearest_layout import nearest_layouts
from megatron.training.processes.group_settings import group_settings
from megatron.training.wording import flag, listed, nearest_multiples, nearest_of

T = TypeVar("T", bound=Config)

EXPERTS = ("--num-experts", "--moe-num-experts")
"""Flags that ask for experts, which a dry run leaves out."""

MOST_INCREMENTS = 100_000
"""Of a batch size that grows."""


def check(config: RunConfig, origins: Origins, left_out: Sequence[str] = ()) -> None:
    """Apply every rule that needs no device and no data.

    Args:
        config: the run.
        origins: where each value comes from.
        left_out: flags that a dry run leaves out of its plan.

    Raises:
        UserError: the first rule that the run breaks.
    """
    has_experts = any(text.split()[0] in EXPERTS for text in left_out)
    for rule in RULES:
        if has_experts and rule in (experts_need_an_expert_model, saved_experts_exist):
            continue
        try:
            rule(config, origins)
        except UserError as error:
            if rule not in LAYOUT_RULES and rule is not batch_divides:
                raise
            layouts = nearest_layouts(config, origins, (*LAYOUT_RULES, batch_divides))
            raise UserError(f"{error}{layouts}") from None


def heads_fill_the_hidden_size(config: RunConfig, origins: Origins) -> None:
    """Unless --kv-channels says otherwise, heads share the hidden size."""
    hidden, heads = config.model.hidden_size, config.model.attention.num_attention_heads
    if config.model.mla.multi_latent_attention:
        return  # its heads have sizes of their own
    if origins["kv_channels"] in ("derived", "default") and hidden % heads:
        raise UserError(
            f"--hidden-size ({hidden}) is not divisible by --num-attention-heads ({heads}); try "
            f"{nearest_of(divisors(hidden), heads)} heads, or set --kv-channels"
        )


def rotated_channels_are_pairs(config: RunConfig, origins: Origins) -> None:
    """Rotary positions turn channels two by two."""
    if config.model.mla.multi_latent_attention:
        _latent_channels_are_pairs(config)
        return
    position, head_size = config.model.position, config.model.attention.kv_channels
    width = position.rotated_channels(head_size)
    if position.is_rotary and (width < 2 or width % 2):
        raise UserError(
            f"--rotary-percent ({position.rotary_percent}) of --kv-channels ({head_size}, "
            f"{origins['kv_channels']}) makes {width} channels that rotate; their number must be "
            "even and at least 2"
        )


def _latent_channels_are_pairs(config: RunConfig) -> None:
    """With YaRN all rotary channels of a head of multi-latent attention turn."""
    position, latent = config.model.position, config.model.mla
    channels = width = latent.qk_pos_emb_head_dim
    share = ""
    if latent.rope_type == "rope":
        width = position.rotated_channels(channels)
        share = f"--rotary-percent ({position.rotary_percent}) of "
    if width < 2 or width % 2:
        raise UserError(
            f"{share}--qk-pos-emb-head-dim ({channels}) makes {width} channels that rotate; their "
            "number must be even and at least 2"
        )


def positions_reach_the_sequence(config: RunConfig, origins: Origins) -> None:
    """A learned table has a row for each position."""
    position, seq = config.model.position, config.data.seq_length
    rows = position.max_position_embeddings
    if position.position_embedding_type == "learned_absolute" and rows < seq:
        raise UserError(
            f"--max-position-embeddings ({rows}) is less than --seq-length ({seq}); raise it to "
            f"{seq} or shorten the sequence (learned positions end at the table's last row)"
        )


def ramp_up_reaches_the_batch(config: RunConfig, origins: Origins) -> None:
    """START + n x INCREMENT is the global batch, and each of these is made of microbatches."""
    training = config.training
    if training.rampup_batch_size is None:
        return
    if training.step_batch_size_schedule is not None:
        raise UserError(
            "--rampup-batch-size and --step-batch-size-schedule exclude each other; drop one"
        )
    start, increment, samples = training.rampup_batch_size
    final, name = (
        training.global_batch_size,
        f"--rampup-batch-size {listed(training.rampup_batch_size, ' ')}",
    )
    if start < 1 or increment < 1 or samples < 0:
        raise UserError(f"{name}: START and INCREMENT must be at least 1, SAMPLES at least 0")
    if start > final or (final - start) % increment:
        below = max(start, start + (final - start) // increment * increment)
        reached = (below, below + increment * (below < final))
        raise UserError(
            f"{name}: steps of {increment} from {start} do not reach --global-batch-size "
            f"({final}); try --global-batch-size {nearest_of(reached, final)}"
        )
    if (final - start) // increment > MOST_INCREMENTS:
        raise UserError(
            f"{name}: {(final - start) // increment} increments to --global-batch-size ({final}); "
            f"there may be at most {MOST_INCREMENTS:,}, so raise INCREMENT"
        )
    unit = config.samples_per_pass
    if not training.decrease_batch_size_if_needed and (start % unit or increment % unit):
        raise UserError(
            f"{name}: START and INCREMENT must be divisible by {_unit_text(config)}; try START "
            f"{nearest_multiples(start, unit)} and INCREMENT {nearest_multiples(increment, unit)}, "
            "or --decrease-batch-size-if-needed"
        )


def batch_divides(config: RunConfig, origins: Origins) -> None:
    """The global batch is a whole number of microbatches on every replica."""
    training, unit = config.training, config.samples_per_pass
    size = training.global_batch_size
    if training.step_batch_size_schedule is not None or training.decrease_batch_size_if_needed:
        if size < unit and training.step_batch_size_schedule is None:
            raise UserError(
                f"--global-batch-size ({size}) is less than {_unit_text(config)}; it cannot be "
                "decreased to a multiple of that"
            )
        return
    if size % unit:
        raise UserError(
            f"--global-batch-size ({size}) is not divisible by {_unit_text(config)}; try "
            f"{nearest_multiples(size, unit)}, or --decrease-batch-size-if-needed"
        )


def batch_steps_divide(config: RunConfig, origins: Origins) -> None:
    """Each size of --step-batch-size-schedule is made of microbatches."""
    training = config.training
    if training.step_batch_size_schedule is None:
        return
    sizes = config.batch_sizes
    for size in sizes.sizes:
        if size % config.samples_per_pass:
            raise UserError(
                f"--step-batch-size-schedule: size {size} is not divisible by "
                f"{_unit_text(config)}; try {nearest_multiples(size, config.samples_per_pass)}"
            )
    if origins["global_batch_size"] in ("flag", "file") and (
        training.global_batch_size != sizes.final
    ):
        raise UserError(
            f"--global-batch-size ({training.global_batch_size}) contradicts the last size of "
            f"--step-batch-size-schedule ({sizes.final}); drop --global-batch-size"
        )
    if training.decrease_batch_size_if_needed:
        raise UserError(
            "--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other; "
            "drop one"
        )


def run_has_one_length(config: RunConfig, origins: Origins) -> None:
    """The length is in iterations or in samples."""
    training = config.training
    iterations, samples = training.train_iters, training.train_samples
    if iterations is not None and samples is not None:
        raise UserError(
            f"--train-iters ({iterations}) and --train-samples ({samples}) both give the length "
            "of the run; drop one"
        )
    if iterations is None and samples is None and not training.skip_train:
        raise UserError("the run has no length; give --train-iters or --train-samples")


def something_is_done(config: RunConfig, origins: Origins) -> None:
    """A run trains at least one iteration, or evaluates."""
    training = config.training
    if training.skip_train:
        if config.validation.eval_iters == 0:
            raise UserError(
                "--skip-train with --eval-iters 0 leaves nothing to do; give --eval-iters a number "
                "of batches, or -1 for the whole validation set"
            )
    elif config.total_iterations < 1:
        name = "train_iters" if training.train_samples is None else "train_samples"
        raise UserError(
            f"{flag(name)} ({getattr(training, name)}) leaves nothing to train: the run would have "
            "no full iteration; raise it, or evaluate only with --skip-train"
        )


def skipped_iterations_exist(config: RunConfig, origins: Origins) -> None:
    """An iteration that is not one of the run cannot be left out."""
    last = config.total_iterations
    absent = [n for n in config.training.iterations_to_skip if not 1 <= n <= last]
    if absent and not config.training.skip_train:
        raise UserError(
            f"--iterations-to-skip: {listed(absent)} not among the run's iterations, 1 to {last}"
        )


def schedule_fits_the_run(config: RunConfig, origins: Origins) -> None:
    """Schedule lengths have the unit of the run's length, and fit each other and the run."""
    if not config.training.skip_train:
        assert config.learning_schedule


def checkpoints_have_a_folder(config: RunConfig, origins: Origins) -> None:
    """What names an iteration to load needs a place to load from."""
    checkpoint = config.checkpoint
    if checkpoint.ckpt_step is not None and not (
        checkpoint.load or checkpoint.pretrained_checkpoint
    ):
        raise UserError(
            f"--ckpt-step ({checkpoint.ckpt_step}) needs --load or --pretrained-checkpoint"
        )
    if checkpoint.exit_on_missing_checkpoint and not checkpoint.load:
        raise UserError("--exit-on-missing-checkpoint needs --load")


def copies_have_partners(config: RunConfig, origins: Origins) -> None:
    """Each rank's local checkpoint is kept by as many ranks as the flags say."""
    recovery, world = config.checkpoint.recovery, config.process.world_size
    jump, count = recovery.copies()
    if recovery.is_local and recovery.replication and world % (jump * count):
        raise UserError(
            f"--replication-jump ({jump}) x --replication-factor ({count}) ranks keep the data of "
            f"one another, but {world} processes are no multiple of {jump * count}; give the "
            "number of ranks on each machine, and a factor that divides the machines"
        )


def profiled_ranks_exist(config: RunConfig, origins: Origins) -> None:
    """A profile that no rank takes would be missed at the end only."""
    world, ranks = config.process.world_size, config.profiling.profile_ranks
    absent = [rank for rank in ranks if not 0 <= rank < world]
    if config.profiling.profile and absent:
        raise UserError(
            f"--profile-ranks: {listed(absent)} not among the {world} processes; ranks count from "
            f"0 to {world - 1}"
        )


def profiles_are_of_the_device(config: RunConfig, origins: Origins) -> None:
    """Nsight Systems and the history of an allocator are CUDA's (see also `Profiler`)."""
    profiling = config.profiling
    if config.process.device != "cpu":
        return
    if profiling.profile and not profiling.use_pytorch_profiler:
        raise UserError(
            "--profile marks iterations for Nsight Systems, which needs CUDA, and --device is cpu; "
            "add --use-pytorch-profiler"
        )
    if profiling.record_memory_history:
        raise UserError(
            "--record-memory-history records CUDA's allocator, and --device is cpu; leave it out, "
            "or use --log-memory-interval"
        )


def loaders_have_no_length(config: RunConfig, origins: Origins) -> None:
    """There is no whole of a validation set that a program's own loader gives."""
    whole = config.validation.eval_iters == -1 or config.data.full_validation
    if whole and config.data.dataloader_type == "external":
        raise UserError(
            "--dataloader-type external: loaders have no length, so there is no whole validation "
            "set; give --eval-iters a number of batches, and no --full-validation"
        )


def groups_are_known(config: RunConfig, origins: Origins) -> None:
    """Settings of process groups name groups and settings; a plan does without their file."""
    process = config.process
    path = process.nccl_communicator_config_path
    if path is not None and not Path(path).exists():
        process = replace(process, nccl_communicator_config_path=None)
    group_settings(process)


def half_precision_has_a_use(config: RunConfig, origins: Origins) -> None:
    """What fp32 takes over from half needs a run in half, as in Megatron-LM."""
    precision, model = config.precision, config.model
    if model.fp32_residual_connection and not (precision.bf16 or precision.fp16):
        raise UserError(
            "--fp32-residual-connection needs --bf16 or --fp16: the residual stream is "
            f"{precision.params_dtype} anyway, so leave it out"
        )
    if model.fp16_lm_cross_entropy and not precision.fp16:
        raise UserError(
            f"--fp16-lm-cross-entropy needs --fp16, and weights are {precision.params_dtype}: "
            "leave it out, or train with --fp16"
        )


def chosen_dtypes_are_adams(config: RunConfig, origins: Origins) -> None:
    """Dtypes of masters and moments are chosen for Adam's, as in Megatron-LM."""
    precise, rule = config.precision.use_precision_aware_optimizer, config.optimizer.optimizer
    if precise and rule != "adam":
        raise UserError(
            f"--use-precision-aware-optimizer needs --optimizer adam, not {rule}; drop one of them"
        )


def sums_are_as_fine_as_asked(config: RunConfig, origins: Origins) -> None:
    """What asks for sums of gradients in fp32 is not given sums in half."""
    precision, replicas = config.precision, config.replicas
    asked = (
        ("ddp_reduce_scatter_with_fp32_accumulation", "travel and are summed", "reduce_dtype"),
        ("ddp_param_name_patterns_for_fp32_local_accumulation", "add up", "grad_dtype"),
    )
    for name, what, kind in asked:
        dtype = getattr(precision, kind)
        if getattr(replicas, name) and dtype in ("bfloat16", "float16"):
            way_out = "give --accumulate-allreduce-grads-in-fp32"
            if precision.main_grads_dtype != "fp32":
                way_out = "leave out --main-grads-dtype"
            if kind == "reduce_dtype" and precision.grad_reduce_in_bf16:
                way_out = "leave out --grad-reduce-in-bf16"
            raise UserError(
                f"{flag(name)} is not built, and gradients {what} in {dtype} here; {way_out}, so "
                f"that it is fp32, or leave out {flag(name)}"
            )


def short_moments_decay(config: RunConfig, origins: Origins) -> None:
    """What a step takes of a moment is well above what its format rounds away."""
    precision, optimizer = config.precision, config.optimizer
    for dtype, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        names = (flag(dtype), flag(beta))
        moments.check(getattr(precision, dtype), getattr(optimizer, beta), names)


def shared_activations_have_sharers(config: RunConfig, origins: Origins) -> None:
    """A layer's input is shared out among ranks that would hold it whole."""
    if not config.model.recompute.distribute_saved_activations:
        return
    parallel = config.parallel
    if parallel.tensor_model_parallel_size == 1:
        raise UserError(
            "--distribute-saved-activations needs tensor-parallel ranks to share with: give "
            "--tensor-model-parallel-size above 1, or drop it"
        )
    if parallel.sequence_parallel:
        raise UserError(
            "--distribute-saved-activations and --sequence-parallel exclude each other: with the "
            "latter each rank holds its share of a layer's input anyway; drop the former"
        )


def offloaded_layers_are_in_one_stage(config: RunConfig, origins: Origins) -> None:
    """The first layers of a model belong to one rank of a pipeline, and not to all."""
    moved = config.model.offload.cpu_offloading_num_layers
    size = config.parallel.pipeline_model_parallel_size
    if moved and size > 1:
        raise UserError(
            f"--cpu-offloading-num-layers ({moved}) does not go with "
            f"--pipeline-model-parallel-size ({size}), as in Megatron-LM; use "
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj, which "
            "moves parts of every layer on every rank"
        )


def torch_cuts_rows(config: RunConfig, origins: Origins) -> None:
    """A rule that needs whole matrices has none where torch cuts each by rows."""
    if config.replicas.use_torch_fsdp2 and "muon" in config.optimizer.rules:
        raise UserError(
            "--use-torch-fsdp2 cuts every matrix by rows, and --optimizer muon needs whole ones; "
            "use --use-distributed-optimizer, which deals out whole matrices, or --optimizer adam"
        )


def torch_keeps_one_dtype(config: RunConfig, origins: Origins) -> None:
    """Under torch's fully_shard weights and gradients are kept in fp32, without masters."""
    if not config.replicas.use_torch_fsdp2:
        return
    for name in ("main_grads_dtype", "main_params_dtype"):
        value = getattr(config.precision, name)
        if value != "fp32":
            raise UserError(
                f"{flag(name)} {value} does not go with --use-torch-fsdp2, under which torch keeps "
                "weights and gradients in fp32; leave it out, or use --use-megatron-fsdp"
            )


def saved_experts_exist(config: RunConfig, origins: Origins) -> None:
    """Parts of experts are recomputed or offloaded where there are experts."""
    recompute, offload = config.model.recompute, config.model.offload
    for name, modules, experts in (
        ("recompute_modules", recompute.modules, recompute_config.EXPERT_MODULES),
        ("offload_modules", offload.modules, offload_config.EXPERT_MODULES),
    ):
        found = [module for module in modules if module in experts]
        if found:
            raise UserError(
                f"{flag(name)} {as_words(found)}: parts of experts, but the model is dense; "
                "leave them out"
            )


RULES: tuple[Rule, ...] = (
    heads_fill_the_hidden_size,
    *LAYOUT_RULES,
    rotated_channels_are_pairs,
    positions_reach_the_sequence,
    ramp_up_reaches_the_batch,
    batch_divides,
    batch_steps_divide,
    run_has_one_length,
    schedule_fits_the_run,
    something_is_done,
    skipped_iterations_exist,
    checkpoints_have_a_folder,
    copies_have_partners,
    profiled_ranks_exist,
    profiles_are_of_the_device,
    loaders_have_no_length,
    groups_are_known,
    half_precision_has_a_use,
    chosen_dtypes_are_adams,
    sums_are_as_fine_as_asked,
    short_moments_decay,
    shared_activations_have_sharers,
    offloaded_layers_are_in_one_stage,
    saved_experts_exist,
    torch_cuts_rows,
    torch_keeps_one_dtype,
)


def check_built(config: RunConfig) -> None:
    """Refuse a run that lacks what a plan can do without: data, and the files of its settings.

    Raises:
        UserError: the run names no data, or a file of settings that cannot be used.
    """
    group_settings(config.process)
    if not config.data.sources and config.data.dataloader_type != "external":
        raise UserError("no data: give --data-path PREFIX (or --train-data-path), or --mock-data")


# Choices that only exist on CUDA: name, values, what stands for them on the CPU.
_CUDA_ONLY = (
    ("process", "distributed_backend", ("nccl",), "gloo"),
    ("model", "transformer_impl", ("transformer_engine", "apex"), "auto"),
    ("model", "attention_backend", ("flash", "fused"), "auto"),
    ("model.fusion", "cross_entropy_fusion_impl", ("te",), "native"),
)


NCCL_ONLY = (
    "nccl_communicator_config_path",
    "high_priority_stream_groups",
    "flight_recorder_dump_path",
)
"""Settings of NCCL, which have no effect under --device cpu."""


def cuda_only(config: RunConfig) -> list[str]:
    """Return the choices of a run that only exist on CUDA, as flags."""
    return [
        f"{flag(name)} {attrgetter(f'{part}.{name}')(config)}"
        for part, name, values, _ in _CUDA_ONLY
        if attrgetter(f"{part}.{name}")(config) in values
    ]


def _with(config: T, path: str, value: object) -> T:
    """Return a config with another value for one setting of those that it nests."""
    name, _, rest = path.partition(".")
    changed = _with(getattr(config, name), rest, value) if rest else value
    return replace(config, **{name: changed})


def map_to_cpu(config: RunConfig, origins: Origins) -> tuple[RunConfig, list[str]]:
    """Return the run with the CPU reference for CUDA's choices, and a line that lists them.

    Only ``--device cpu`` asks for this; any other run is returned as it is.
    """
    chosen = cuda_only(config)
    if config.process.device != "cpu" or not chosen:
        return config, []
    for part, name, values, substitute in _CUDA_ONLY:
        if attrgetter(f"{part}.{name}")(config) in values:
            config = _with(config, f"{part}.{name}", substitute)
    return config, [f"--device cpu: the CPU reference stands in for {', '.join(chosen)}"]


def check_device(config: RunConfig, cuda_is_available: bool) -> None:
    """Refuse a device, or a choice that needs one, that this machine does not have.

    Raises:
        UserError: the run needs CUDA and there is none.
    """
    process = config.process
    needs = cuda_only(config)
    if process.world_size > 1 and process.device != "cpu" and process.distributed_backend != "gloo":
        needs += [
            f"{flag(name)} {as_words(value)}"
            for name, value in process.flatten().items()
            if name in NCCL_ONLY and value
        ]
    if process.device == "cuda":
        needs = ["--device cuda", *needs]
    if needs and not cuda_is_available:
        raise UserError(
            f"{', '.join(needs)}: no CUDA device here; add --device cpu to use the CPU reference"
        )


def warnings(config: RunConfig, origins: Origins) -> list[str]:
    """Return what a user should know although nothing is wrong."""
    found = []
    if config.data.eod_mask_loss and origins["calculate_per_token_loss"] == "default":
        found.append(
            "warning: with --eod-mask-loss microbatches count different numbers of tokens; the "
            "loss is averaged over all of the batch's tokens (--calculate-per-token-loss), while "
            "--no-calculate-per-token-loss averages the microbatches' means as Megatron-LM does"
        )
    if not config.training.skip_train:
        schedule = config.learning_schedule
        fall = (schedule.wsd_decay or 0) if schedule.decay_style == "WSD" else 0
        if fall and schedule.warmup + fall > schedule.decay:
            found.append(
                f"warning: the final fall of WSD ({fall} {schedule.unit}) begins before the end of "
                f"the warm-up ({schedule.warmup}), since both together exceed the decay "
                f"({schedule.decay}): after the warm-up the rate jumps down, as in Megatron-LM"
            )
        found += _warn_of_padding(config)
    return found


def _warn_of_padding(config: RunConfig) -> list[str]:
    """Say where whole matrices cannot be shared out evenly."""
    replicas = config.replicas
    if config.optimizer.optimizer != "muon" or not replicas.shards_gradients or config.shares == 1:
        return []
    strategy = replicas.data_parallel_sharding_strategy
    return [
        f"warning: with --optimizer muon and --data-parallel-sharding-strategy {strategy} a rank's "
        "share of each layer is at least the layer's largest matrix, since matrices stay whole; "
        "--use-distributed-optimizer deals out those of all layers together"
    ]


def _unit_text(config: RunConfig) -> str:
    micro, replicas = config.training.micro_batch_size, config.data_parallel_size
    return f"{micro * replicas} = --micro-batch-size ({micro}) x data-parallel size ({replicas})"
