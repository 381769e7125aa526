"""Rules across configs: what must fit together, one small function each.

A rule takes the run and the origin of each value, and raises `UserError` naming the flags, their
values and what to change. A rule looks only at the features it is about. `check` runs those that
hold for every run and for a dry run; `check_built` those of a run that is to start.
"""

from dataclasses import replace
from pathlib import Path

from megatron.core.utils import UserError
from megatron.training.batch_rules import BATCH_RULES, batch_divides
from megatron.training.config import RunConfig
from megatron.training.layout_rules import LAYOUT_RULES, Origins, Rule
from megatron.training.memory_rules import MEMORY_RULES
from megatron.training.model_rules import MODEL_RULES
from megatron.training.nearest_layout import nearest_layouts
from megatron.training.overlap_rules import OVERLAP_RULES
from megatron.training.processes.group_settings import group_settings
from megatron.training.upcycling_rules import UPCYCLING_RULES, warn_of_dropped_choices
from megatron.training.wording import flag, listed


def check(config: RunConfig, origins: Origins) -> None:
    """Apply every rule that needs no device and no data.

    Args:
        config: the run.
        origins: where each value comes from.

    Raises:
        UserError: the first rule that the run breaks.
    """
    for rule in RULES:
        try:
            rule(config, origins)
        except UserError as error:
            if rule not in LAYOUT_RULES and rule is not batch_divides:
                raise
            layouts = nearest_layouts(config, origins, (*LAYOUT_RULES, batch_divides))
            raise UserError(f"{error}{layouts}") from None


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
            "number of ranks on each machine, and a factor that divides the machines; on one "
            "machine no copy would survive it: leave out --replication"
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


RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *LAYOUT_RULES,
    *BATCH_RULES,
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
    *UPCYCLING_RULES,
    *MEMORY_RULES,
    *OVERLAP_RULES,
)


def check_built(config: RunConfig) -> None:
    """Refuse a run that lacks what a plan can do without: data, and the files of its settings.

    Raises:
        UserError: the run names no data, or a file of settings that cannot be used.
    """
    group_settings(config.process)
    if not config.data.sources and config.data.dataloader_type != "external":
        raise UserError("no data: give --data-path PREFIX (or --train-data-path), or --mock-data")


def warnings(config: RunConfig, origins: Origins) -> list[str]:
    """Return what a user should know although nothing is wrong."""
    found = []
    uneven = config.data.uneven_masks
    if uneven and origins["calculate_per_token_loss"] == "default":
        found.append(
            f"warning: with {uneven} microbatches count different numbers of tokens; the "
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
    return found + warn_of_dropped_choices(config) + _warn_of_packages(config)


def _warn_of_packages(config: RunConfig) -> list[str]:
    """Say what a run needs that a plan cannot know to be there, and does not count."""
    moe = config.model.moe
    ranks = config.axis_sizes["ep"] * config.axis_sizes["etp"]
    if moe.num_experts is None or moe.moe_token_dispatcher_type != "flex" or ranks == 1:
        return []
    return [
        "warning: --moe-token-dispatcher-type flex needs CUDA, --bf16 and the package deep_ep, "
        "without which the run ends when its model is built; what it moves is not counted"
    ]


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
