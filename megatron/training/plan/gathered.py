"""Bytes of activations that a rank gathers or receives from others, in closed form.

They live for a moment in a layer, beside what is kept. With N tokens of a rank inside attention and
MLP, H the hidden size, K the channels of its keys and values together, c context-parallel ranks, e
the bytes of an activation's element and a those of a sum:

    sequence parallelism    N H e                      the input of a product, or a gradient
    cp, p2p                 N K (e + a)                keys and values, and their gradients; twice
                                                       of each where c > 2
    cp, all_gather          c N K (e + a)
    cp, a2a                 0                          what is exchanged is saved

    experts, allgather      R N H e / t                of R ranks along etp_ep, t along tp; H is
                                                       --moe-latent-size where that is given

In each unit of the model the largest counts; with --distribute-saved-activations that is the input
of layers that run again. Transfers between stages are activations.
"""

import math
from collections.abc import Mapping

from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.plan import LayerPlan, layer_plan, mtp_layer_plan
from megatron.training.config import RunConfig
from megatron.training.plan import stacks
from megatron.training.plan.parameter_shapes import BIASES
from megatron.training.plan.passing import units
from megatron.training.plan.share import Share


def gathered(config: RunConfig, stage: Stage, samples: int) -> dict[str, int]:
    """Return the bytes that a microbatch of ``samples`` has gathered at one time, by unit."""
    model, sizes, texts = config.model, config.axis_sizes, stacks.lengths(config)
    share = Share(config, samples, texts[-1])
    found: dict[str, int] = {}
    names = {stacks.name(model, n): share.of(stacks.length(config, n)) for n in stage.layers}
    width = model.hidden_size if sizes["tp"] > 1 else 0
    if config.parallel.sequence_parallel:
        found = _joined(share, stage, width)
    plan, kinds = layer_plan(model), config.context.kinds(model.all_layers)
    layers = {stacks.name(model, n): (plan[n], kinds[n]) for n in stage.layers}
    if model.recompute.distribute_saved_activations:
        found |= {name: here.tokens * width * share.wide for name, here in names.items()}
    for depth in range(stage.num_mtp_layers):
        layers[f"mtp.layers.{depth}"] = (mtp_layer_plan(model, depth), kinds[depth])
    ranks = sizes["etp_ep"]
    if ranks > 1 and model.moe.moe_token_dispatcher_type == "allgather":
        # What all ranks' tokens are, and then what came out of their experts.
        own = -(-share.tokens // share.tp) * model.routed_size * share.size
        for name, (layer, _) in layers.items():
            if any(sublayer.kind == "moe" for sublayer in layer.sublayers):
                found[name] = max(found.get(name, 0), ranks * own)
    if sizes["cp"] > 1:
        for name, (layer, kind) in layers.items():
            reads = _reads(share, layer) if name in names else [share]
            size = max(_exchanged(one, layer, kind, sizes) for one in reads)
            found[name] = max(found.get(name, 0), size)
    return found


def _joined(share: Share, stage: Stage, width: int) -> dict[str, int]:
    """Return the bytes that units gather of the shares of sequence parallelism.

    Args:
        share: of the text that the head reads.
        stage: what the chunk owns.
        width: of hidden states.
    """
    model, plan = share.config.model, layer_plan(share.config.model)
    layers = {stacks.name(model, n): _reads(share, plan[n]) for n in stage.layers}
    found = {
        unit: max(one.tokens for one in layers.get(unit, [share])) * width * share.size
        for unit in units(model, stage)
        if not unit.endswith(BIASES)
    }
    if "embedding" in found:
        longest = share.of(max(stacks.lengths(share.config)))
        found["embedding"] = longest.tokens * width * share.wide
    return found


def _reads(share: Share, layer: LayerPlan) -> list[Share]:
    """Return the texts that a layer reads: cross-attention's keys are made of the encoder's."""
    config = share.config
    found = [share.of(stacks.length(config, layer.number))]
    if any(sublayer.kind == "cross_attention" for sublayer in layer.sublayers):
        found.append(share.of(stacks.lengths(config)[0]))
    return found


def _exchanged(share: Share, layer: LayerPlan, kind: str, sizes: Mapping[str, int]) -> int:
    """Return the bytes of keys, values and their gradients that the attention of a layer gets."""
    model = share.config.model
    heads = max(1, model.attention.num_query_groups // share.tp)
    channels = 2 * model.attention.kv_channels
    if any(sublayer.kind == "multi_latent_attention" for sublayer in layer.sublayers):
        heads = model.attention.num_attention_heads // share.tp
        channels = model.mla.query_size + model.mla.v_head_dim
    one = share.tokens * heads * channels * (share.size + share.main)
    if kind == "all_gather":
        return sizes["cp"] * one
    ranks = sizes["cp"]
    if kind == "a2a":
        return 0
    if kind == "a2a+p2p" and sizes["cp_inner"] > 1:
        ranks = sizes["cp_outer"]
        one = one // heads * math.lcm(heads, sizes["cp_inner"])  # every rank gets a whole head
    return one * min(2, ranks - 1)
