"""Operations of an encoder-decoder, as `operations_gpt` counts those of one stack.

Of a sample with S tokens for the encoder and T for the decoder, with H the hidden size and K the
channels of all heads, the multiply-adds of a layer's forward are:

    encoder, self-attention     4 S H K             and 2 S S K of scores and values
    decoder, self-attention     4 T H K             and 2 T T K / 2, as half of the square is seen
    cross-attention             2 T H K + 2 S H K   and 2 S T K
    MLP                         S or T times its matrices
"""

from collections import Counter, defaultdict

from megatron.core.transformer.plan import LayerPlan, layer_plan, loss_pieces
from megatron.training.config import RunConfig
from megatron.training.plan import stacks

BACKWARD_AND_FORWARD = 3
"""As in `operations_gpt`."""


def flops_per_sample(config: RunConfig, padded_rows: int) -> int:
    """Return the operations that training on one sample takes."""
    model, (_, targets) = config.model, stacks.lengths(config)
    adds = sum(sum(layer_multiply_adds(config, plan).values()) for plan in layer_plan(model))
    adds += targets * model.hidden_size * padded_rows
    return round(2 * BACKWARD_AND_FORWARD * adds)


def recomputed_flops_per_sample(config: RunConfig, padded_rows: int) -> dict[str, int]:
    """Return the operations on one sample that backward does again, by what makes them again."""
    model, (_, targets) = config.model, stacks.lengths(config)
    recompute, plans = model.recompute, layer_plan(model)
    again: Counter[str] = Counter()
    adds = [layer_multiply_adds(config, plan) for plan in plans]
    if recompute.granularity == "full":
        for stage in config.stages:
            for unit in stacks.units_made_again(model, stage.layers):
                for number in unit:
                    again["recomputation"] += round(2 * sum(adds[number].values()))
    else:
        for parts in adds:
            made = sum(size for part, size in parts.items() if part in recompute.modules)
            again["recomputation"] += round(2 * made)
    samples, parallel = config.training.micro_batch_size, config.parallel
    positions = targets // parallel.context_parallel_size
    rows = padded_rows // parallel.tensor_model_parallel_size
    if loss_pieces(positions, samples, rows, limit=model.logits_at_once) > 1:
        again["head"] += 2 * targets * model.hidden_size * padded_rows
    return {part: size for part, size in again.items() if size}


def layer_multiply_adds(config: RunConfig, plan: LayerPlan) -> dict[str, float]:
    """Return the multiply-adds of a layer's forward for a sample, by part.

    The parts have the names of --recompute-modules; ``rest`` is of none.
    """
    model, (sources, targets) = config.model, stacks.lengths(config)
    hidden = model.hidden_size
    width = model.attention.num_attention_heads * model.attention.kv_channels
    matrices = 3 if model.mlp.is_gated else 2
    tokens, parts = stacks.length(config, plan.number), defaultdict[str, float](float)
    for sublayer in plan.sublayers:
        if sublayer.kind == "self_attention":
            parts["rest"] += 4 * tokens * hidden * width
            parts["core_attn"] += 2 * tokens * tokens * width * model.visible_share(plan.number)
        elif sublayer.kind == "cross_attention":
            parts["rest"] += 2 * (sources + targets) * hidden * width
            parts["core_attn"] += 2 * sources * targets * width
        else:
            parts["mlp"] += tokens * hidden * model.mlp.ffn_hidden_size * matrices
    return dict(parts)
