"""What a layer's channel block saves for its backward: an MLP, or experts; from configs alone.

Of experts as many rows are counted as there are if all get equally many: each rank along ``ep`` an
even share of all choices. How many a rank gets in a run depends on its tokens, unless experts are
filled up to a capacity.

Shapes in comments: N tokens of a rank, f inner width of a rank.
"""

from dataclasses import replace

from megatron.training.plan import saved_routers
from megatron.training.plan.attention_bytes import Piece
from megatron.training.plan.saved_routers import INDEX
from megatron.training.plan.share import Region, Share

SAVED_BY_ACTIVATION = {
    "gelu": 0,
    "gelu_tanh": 0,
    "squared_relu": 0,  # what is above zero, instead of its input
    "swiglu": 0,  # the op of its own saves its input alone
    "relu": -1,  # its result alone, which the second product saves
    "geglu": 1,  # the gate's activation
    "geglu_tanh": 1,
    "quick_geglu": 2,  # and its sigmoid
}
"""What an activation saves beside its input, as multiples of the inner width."""


def mlp(share: Share, layer: int) -> list[Region]:
    """Return the regions of an MLP."""
    return feed_forward(share, share.config.model.mlp.ffn_hidden_size, "mlp")


def activation(share: Share, rows: int, inner: int, of: str) -> tuple[Piece, ...]:
    """Return what an activation saves, and last what it gives to the second product.

    Args:
        share: of the rank.
        rows: tokens that it sees.
        inner: inner width on the rank.
        of: begins the names of the pieces.
    """
    mlp, size = share.config.model.mlp, share.size
    one = rows * inner * size
    count = SAVED_BY_ACTIVATION[mlp.activation]
    if mlp.has_bounds and mlp.activation != "swiglu":
        # What is clamped; else the value with what is added to it.
        count += 1 if mlp.activation_func_clamp_value is None else 2
    more = [Piece(f"{of}activation {i}", one, size) for i in range(count)]
    wide = Piece(f"{of}fc1 output", one * (2 if mlp.is_gated else 1), size)
    if SAVED_BY_ACTIVATION[mlp.activation] < 0:
        wide = wide._replace(size=0)
    return (wide, *more, Piece(f"{of}fc2 input", one, size))


def feed_forward(share: Share, width: int, module: str, of: str = "") -> list[Region]:
    """Return the regions of a feed-forward block.

    Args:
        share: of the rank.
        width: inner width in the whole model.
        module: its name in --recompute-modules.
        of: begins the names of its pieces.
    """
    normed, act = share.normed, activation(share, share.tokens, width // share.tp, of)
    # The second product's input and, once there are gradients, those of both products' outputs.
    wide, inner = act[0].size or act[-1].size, act[-1].size
    if module in share.config.model.recompute.modules:
        late = share.stream + wide + inner + share.output
        return [Region(module, (normed, *act), late, inputs=(normed,), recomputed=module)]
    return [
        Region("in", (normed,), share.stream + wide),
        Region(module, act, inner + share.output),
    ]


def experts(share: Share, layer: int) -> list[Region]:
    """Return the regions of a router, its experts and shared experts."""
    model, modules = share.config.model, share.config.model.recompute.modules
    width, shared = model.moe.moe_shared_expert_intermediate_size, list[Region]()
    if width is not None:
        shared = feed_forward(share, width, "shared_experts", "shared ")
        if model.moe.moe_shared_expert_gate:
            gates = share.outer * share.size
            kept = (Piece("shared output", share.stream, share.size), Piece("gates", gates, 1))
            if "shared_experts" in modules:  # one run makes all of it again
                (run,) = shared
                shared = [replace(run, saved=(*run.saved, *kept), late=run.late + gates)]
            else:
                shared.append(Region("gate", (share.normed, *kept), share.stream + gates))
    routed = _routed(share)
    # Of all that put off their gradients the router is last to let go of the block's input.
    shared = [
        replace(region, late=region.late - share.stream)
        if share.normed in region.saved and share.normed in routed[0].saved
        else region
        for region in shared
    ]
    whole = [*routed, *shared]
    if "moe" not in modules:
        if not model.moe.moe_shared_expert_overlap:
            return whole
        sent = [region.name for region in routed].index("dispatch") + 1
        return [*routed[:sent], *shared, *routed[sent:]]
    # One run makes all of it again; what the router has saved is there until its backward, which is
    # the last, and what sorting has until the one before that puts off no more.
    router, *rest = whole
    down = [replace(r, inputs=(share.normed,), recomputed="moe") for r in rest if r.name == "down"]
    rest = [region for region in rest if region.name != "down"]
    sorting = () if down else next(region.saved for region in rest if region.name == "dispatch")
    made = (piece for piece in router.saved if piece != share.normed)
    numbers = tuple(dict.fromkeys((*made, *sorting)))
    saved = tuple(dict.fromkeys(piece for region in rest for piece in (*region.saved, *numbers)))
    given, late = (share.normed,), sum(region.late for region in rest)
    return [
        Region("router", (*given, *numbers), router.late, given, numbers, recomputed="moe"),
        *down,
        Region("moe", saved, late, given, recomputed="moe"),
    ]


def _routed(share: Share) -> list[Region]:
    """Return the regions of what routed experts do, dispatch included."""
    model, sizes = share.config.model, share.config.axis_sizes
    moe, size = model.moe, share.size
    assert moe.num_experts is not None
    positions = share.tokens // share.samples if share.samples else 0
    own = share.samples * -(-positions // share.tp)
    choices = own * model.router.moe_router_topk
    kind = moe.moe_token_dispatcher_type if sizes["etp_ep"] > 1 else "here"
    # Whole tokens come here, and are sorted here with all their choices.
    gathers = kind in ("allgather", "flex")
    travel = sizes["etp_ep"] > 1 and not gathers
    seen, rows = choices, choices * sizes["etp"]
    if kind == "allgather":
        seen = choices * sizes["etp_ep"]
    elif kind == "flex":  # at most, each choice being of another rank
        ranks = min(model.router.moe_router_topk, sizes["ep"]) * sizes["etp"]
        seen = ranks * rows
    filled = saved_routers.filled_rows(share)
    computed = rows if filled is None else filled
    stream = computed * model.routed_size * size
    router, weights = saved_routers.router(share, own)
    places: tuple[Piece, ...] = (Piece("places", seen * INDEX, INDEX),)
    if not moe.moe_permute_fusion:
        places = (Piece("order", (rows if gathers else choices) * INDEX, INDEX), *places)
    arrives, leaves = list[Region](), list[Region]()
    if travel:
        here, back_ = (Piece(f"order {way}", rows * INDEX, INDEX) for way in ("here", "back"))
        arrives.append(Region("arrive", (here,), awaits=True))
        leaves.append(Region("leave", (back_,), sends=True))
    act = activation(share, computed, moe.moe_ffn_hidden_size // sizes["etp"], "expert ")
    rows_ = Piece("rows", stream, size)
    joined = Piece("all weights", seen * share.main, share.main) if gathers else weights
    back = (rows if gathers else choices) * model.routed_size * size
    come: tuple[Piece, ...] = ()
    if filled is not None:
        come = (Piece("places in capacity", rows * INDEX, INDEX),)
    down, up = list[Region](), list[Region]()
    if moe.moe_latent_size is not None:
        latents = Piece("latents", own * moe.moe_latent_size * size, size)
        held = 0 if share.normed in router.saved else share.stream
        down.append(Region("down", (share.normed,), latents.size + held))
        # Shared experts put off the same gradient, unless it is gathered or scaled for them.
        alike = share.outer == share.tokens and not moe.moe_shared_expert_gate
        shared = moe.moe_shared_expert_intermediate_size is not None and alike
        up.append(Region("up", (latents,), latents.size + (0 if shared else share.stream)))
    return [
        router,
        *down,
        Region("dispatch", places, sends=travel),
        *arrives,
        *([Region("fill", come)] if come else []),
        Region("in", (rows_,), rows_.size + (act[0].size or act[-1].size), offloaded="expert_fc1"),
        Region(
            "act",
            act[:-1],
            inputs=act[:1],
            outputs=act[-1:],
            recomputed="moe_act",
            offloaded="moe_act",
        ),
        Region("out", act[-1:], act[-1].size + stream),
        *leaves,
        Region("combine", (Piece("outputs", back, size), joined, *places), awaits=travel),
        *up,
    ]
