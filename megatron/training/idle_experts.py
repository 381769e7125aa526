"""Settings of experts and their routers that change nothing in a run, each with the reason."""

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.moe.router_config import LOSS_NAMES, RouterConfig
from megatron.core.transformer.plan import judged_routers_of, routers_of
from megatron.training.config import RunConfig

OF_CHOICES = (
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("moe_router_num_groups", "moe_router_group_topk"),
)
"""Settings of choices by score, and of what is learned from these."""


def idle_experts(config: RunConfig) -> dict[str, str]:
    """Return the settings of experts that need others which are not there."""
    idle = _idle_in_model(config)
    if not config.checkpoint.moe_use_upcycling:
        idle["moe_upcycling_granularity"] = "no --moe-use-upcycling"
    return idle


def _idle_in_model(config: RunConfig) -> dict[str, str]:
    moe, router = config.model.moe, config.model.router
    if moe.num_experts is None:
        idle = dict.fromkeys((*moe.flatten(), *router.flatten()), "no --num-experts")
        del idle["num_experts"]
        idle["moe_per_layer_logging"] = idle["log_moe_overload_factor"] = "no --num-experts"
        return idle
    idle, sizes = {}, config.parallel
    if sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size == 1:
        why = "every rank holds all experts"
        idle |= dict.fromkeys(("moe_token_dispatcher_type", "moe_shared_expert_overlap"), why)
    if max(config.batch_sizes.sizes) // config.samples_per_pass < 2:
        pairs = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
        idle |= dict.fromkeys(pairs, "an iteration has one microbatch")
    if moe.moe_token_dispatcher_type != "flex":
        names = ("moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms")
        # Where something stands for flex, it may have been given.
        on_cpu = config.process.device == "cpu"
        why = "--device is cpu" if on_cpu else "no --moe-token-dispatcher-type flex"
        idle |= dict.fromkeys(names, why)
    if sizes.expert_model_parallel_size == 1:
        idle["log_moe_overload_factor"] = "--expert-model-parallel-size is 1"
    return idle | _idle_in_router(router) | _idle_by_token_id(config.model)


def _idle_by_token_id(model: TransformerConfig) -> dict[str, str]:
    """Return what layers whose experts follow from the token's id leave without effect."""
    hashed, judged = model.router.moe_n_hash_layers, judged_routers_of(model)
    if not hashed:
        return {}
    if len(judged) == len(routers_of(model)):
        of_them = "the first layer has" if hashed == 1 else f"the first {hashed} layers have"
        return {"moe_n_hash_layers": f"{of_them} no experts; dense layers count"}
    if judged:
        return {}
    why = f"--moe-n-hash-layers {hashed}: every choice follows from the token's id"
    return dict.fromkeys(OF_CHOICES, why)


def _idle_in_router(router: RouterConfig) -> dict[str, str]:
    idle = dict[str, str]()
    if router.capacity_factor is None:
        idle["moe_token_drop_policy"] = "no --moe-expert-capacity-factor"
    if router.moe_router_score_function != "softmax":
        why = f"--moe-router-score-function is {router.moe_router_score_function}"
        idle["moe_router_pre_softmax"] = why
    if not router.moe_router_enable_expert_bias:
        idle["moe_router_bias_update_rate"] = "no --moe-router-enable-expert-bias"
    if router.moe_router_load_balancing_type[0] in LOSS_NAMES and not any(
        router.moe_aux_loss_coeff
    ):
        idle["moe_router_load_balancing_type"] = "--moe-aux-loss-coeff is 0"
    groups = router.moe_router_num_groups
    if groups is not None and groups == router.moe_router_group_topk:
        names = ("moe_router_num_groups", "moe_router_group_topk")
        idle |= dict.fromkeys(names, "a token may use every group")
    return idle
