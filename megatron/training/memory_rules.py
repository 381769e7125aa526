"""Rules of number formats, recomputation and offload: what each needs of the run."""

from megatron.core.config import as_words
from megatron.core.precision import moments
from megatron.core.transformer import offload_config, recompute_config
from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule
from megatron.training.wording import flag


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
    recompute, offload, moe = config.model.recompute, config.model.offload, config.model.moe
    for name, modules, experts in (
        ("recompute_modules", recompute.modules, recompute_config.EXPERT_MODULES),
        ("offload_modules", offload.modules, offload_config.EXPERT_MODULES),
    ):
        found, why = [module for module in modules if module in experts], "the model is dense"
        if moe.num_experts is not None:
            found, why = (
                [module for module in found if module == "shared_experts"],
                "none is shared",
            )
        if found and moe.moe_shared_expert_intermediate_size is None:
            raise UserError(
                f"{flag(name)} {as_words(found)}: parts of experts, but {why}; leave them out"
            )


MEMORY_RULES: tuple[Rule, ...] = (
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
