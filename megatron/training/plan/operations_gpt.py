"""Operations of a lone stack, a decoder's or an encoder's, on one sample."""

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.plan import LayerPlan, layer_plan, loss_pieces, mtp_layer_plan
from megatron.training.config import RunConfig
from megatron.training.plan import multi_latent

BACKWARD_AND_FORWARD = 3
"""A backward pass multiplies twice as much as the forward: for inputs and for weights."""


def flops_per_sample(model: TransformerConfig, seq_length: int, padded_rows: int) -> int:
    """Return the operations that training on one sample takes, by Megatron-LM's formula.

    Matrix products count two operations per multiply-add, and three times for forward and
    backward. Causal attention counts half of the full square, an encoder's all of it, a window
    counts as none; padded rows of the vocabulary count, recomputation does not.
    """
    depths, hidden = model.mtp.depths, model.hidden_size
    per_token: float = sum(
        sum(layer_multiply_adds(model, seq_length, plan).values()) for plan in _plans(model)
    )
    per_token += depths * prediction_multiply_adds(model) + (1 + depths) * hidden * padded_rows
    per_token += hidden * hidden * model.bert.encoder_alone  # what its head makes of hidden states
    return round(2 * BACKWARD_AND_FORWARD * per_token * seq_length)


def _plans(model: TransformerConfig) -> list[LayerPlan]:
    """Return all layers, those of multi-token prediction behind."""
    ahead = (mtp_layer_plan(model, depth) for depth in range(model.mtp.depths))
    return [*layer_plan(model), *ahead]


def layer_multiply_adds(
    model: TransformerConfig, seq_length: int, plan: LayerPlan
) -> dict[str, float]:
    """Return the multiply-adds of a layer's forward for a token, by part.

    The parts have the names of --recompute-modules; ``rest`` is of none. Of experts those count
    that a token visits; ``shared_experts`` is a part of ``moe``.
    """
    parts = _attention_multiply_adds(model, seq_length, model.visible_share(plan.number))
    matrices = 3 if model.mlp.is_gated else 2
    if all(sublayer.kind != "moe" for sublayer in plan.sublayers):
        return {**parts, "mlp": model.hidden_size * model.mlp.ffn_hidden_size * matrices}
    return {**parts, "moe": sum(_expert_multiply_adds(model))}


def _expert_multiply_adds(model: TransformerConfig) -> tuple[int, int]:
    """Return those of the router and the experts that a token visits, and of shared ones."""
    moe, hidden = model.moe, model.hidden_size
    assert moe.num_experts is not None
    each = hidden * (3 if model.mlp.is_gated else 2)
    shared = (moe.moe_shared_expert_intermediate_size or 0) * each
    shared += hidden * moe.moe_shared_expert_gate
    latent = model.routed_size
    visited = model.router.moe_router_topk * moe.moe_ffn_hidden_size * (each // hidden) * latent
    projections = 0 if moe.moe_latent_size is None else 2 * hidden * latent
    return hidden * moe.num_experts + projections + visited, shared


def _attention_multiply_adds(
    model: TransformerConfig, seq_length: int, visible_share: float
) -> dict[str, float]:
    attention, hidden = model.attention, model.hidden_size
    if model.mla.multi_latent_attention:
        return multi_latent.multiply_adds(model, seq_length, visible_share)
    width = attention.num_attention_heads * attention.kv_channels
    key_value = 2 * attention.num_query_groups * attention.kv_channels
    projections = hidden * (width + key_value) + width * hidden
    return {"rest": projections, "core_attn": 2 * width * seq_length * visible_share}


def prediction_multiply_adds(model: TransformerConfig) -> int:
    """Return those of what joins a layer of multi-token prediction to the model: norms, eh_proj."""
    return 3 * model.hidden_size + 2 * model.hidden_size * model.hidden_size


def recomputed_flops_per_sample(config: RunConfig, padded_rows: int) -> dict[str, int]:
    """Return the operations on one sample that backward does again, beside `flops_per_sample`.

    By what makes them again: ``recomputation``, and the ``head`` where its loss works on pieces of
    the sequence; without the parts that do none. Counted as there: one forward, norms and the like
    left out.
    """
    model, seq_length = config.model, config.data.seq_length
    recompute, depths = model.recompute, model.mtp.depths
    plans = _plans(model)
    adds = [layer_multiply_adds(model, seq_length, plan) for plan in plans]
    per_token = {"recomputation": 0.0, "head": 0.0}
    if recompute.granularity == "full":
        again = {
            n for stage in config.stages for unit in recompute.units(stage.layers) for n in unit
        }
        ahead = depths * recompute.covers_prediction_ahead
        again |= set(range(model.num_layers, model.num_layers + ahead))
        per_token["recomputation"] += sum(sum(adds[number].values()) for number in again)
        per_token["recomputation"] += ahead * prediction_multiply_adds(model)
    else:
        modules = set(recompute.modules)
        for plan, parts in zip(plans, adds, strict=True):
            per_token["recomputation"] += sum(parts.get(module, 0) for module in modules)
            has_experts = any(sublayer.kind == "moe" for sublayer in plan.sublayers)
            if has_experts and "shared_experts" in modules:
                per_token["recomputation"] += _expert_multiply_adds(model)[1]
    samples = config.training.micro_batch_size
    positions = seq_length // config.parallel.context_parallel_size
    rows = padded_rows // config.parallel.tensor_model_parallel_size
    if loss_pieces(positions, samples, rows, limit=model.logits_at_once) > 1:
        per_token["head"] += (1 + depths) * model.hidden_size * padded_rows
    return {part: round(2 * adds * seq_length) for part, adds in per_token.items() if adds}
