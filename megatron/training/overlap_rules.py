"""Rules of microbatches that run beside each other, so that tokens travel under computation."""

from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule

OVERLAP = "--overlap-moe-expert-parallel-comm"


def paired_microbatches_exchange_tokens(config: RunConfig, origins: Origins) -> None:
    """Pairs are for tokens that travel to experts of other ranks by all-to-all."""
    if not config.pipeline.overlap_moe_expert_parallel_comm:
        return
    moe, ranks = config.model.moe, config.parallel.expert_model_parallel_size
    if moe.num_experts is None:
        raise UserError(
            f"{OVERLAP} is for tokens on their way to experts, but the model is dense; remove it, "
            "or give --num-experts"
        )
    if ranks == 1:
        raise UserError(
            f"{OVERLAP} needs experts on several ranks, and --expert-model-parallel-size is 1; "
            "raise it, or drop the overlap"
        )
    if not moe.exchanges:
        raise UserError(
            f"{OVERLAP} needs tokens that travel by all-to-all, which --moe-token-dispatcher-type "
            f"{moe.moe_token_dispatcher_type} does not; choose --moe-token-dispatcher-type alltoall"
        )


def paired_microbatches_take_turns(config: RunConfig, origins: Origins) -> None:
    """What runs beside a microbatch must find things as if it were alone."""
    if not config.pipeline.overlap_moe_expert_parallel_comm:
        return
    config.pipeline.schedule(config.placement, 1)  # it has pairs, or is refused
    recompute = config.model.recompute
    if recompute.granularity == "full":
        raise UserError(
            f"{OVERLAP} does not go with --recompute-granularity full, where tokens travel once "
            "more inside a backward; use --recompute-granularity selective, for parts of a layer "
            "without its experts as a whole"
        )
    if "moe" in recompute.modules:
        raise UserError(
            f"{OVERLAP} does not go with --recompute-modules moe, where tokens travel once more "
            "inside a backward; recompute moe_act and shared_experts instead"
        )
    if config.model.offload.is_on:
        raise UserError(
            f"{OVERLAP} does not go with activations in host memory yet, which come back in the "
            "order of one backward; drop one of the two"
        )
    if config.replicas.shards_gradients:
        raise UserError(
            f"{OVERLAP} does not go with --data-parallel-sharding-strategy "
            f"{config.replicas.data_parallel_sharding_strategy} yet, whose layers come and go with "
            "one microbatch; use optim (--use-distributed-optimizer)"
        )


def delayed_gradients_fill_waits(config: RunConfig, origins: Origins) -> None:
    """Weight gradients wait for the tokens of a backward that runs beside a forward."""
    pipeline = config.pipeline
    if pipeline.delay_wgrad_compute and not pipeline.overlap_moe_expert_parallel_comm:
        raise UserError(
            f"--delay-wgrad-compute computes weight gradients where tokens travel under {OVERLAP}; "
            "give that too, or drop it (--pipeline-schedule zb-h1 and zb-v postpone them by "
            "themselves)"
        )


OVERLAP_RULES: tuple[Rule, ...] = (
    paired_microbatches_exchange_tokens,
    paired_microbatches_take_turns,
    delayed_gradients_fill_waits,
)
