"""A small float64 run of the same structure as a user's: what `tools/verify_layout.py` trains.

Every architectural switch, the objective, the optimizer and what changes how ranks communicate are
kept. Sizes shrink, as far as the layout allows: what divides in the user's run divides in the small
one. Precision, dropout, data, tokenizer, schedule and all that only logs or saves are replaced;
what the layout does to the processes comes from the layout alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config import as_words, flag_of, specs
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import round_up
from megatron.training.arguments import build_run
from megatron.training.config import RunConfig
from megatron.training.verification.layout_words import BUCKET, SERIAL, Layout, two_levels

ITERATIONS = 3
VOCABULARY = 61
"""Ids in use, the one that ends documents among them: a prime, so that no layout divides it."""
ADAM_EPS = 1e-3
"""Far above rounding, as `equality` asks: a gradient of 1e-17 makes a step of 1e-14 of the rate."""
MOST_LAYERS, MOST_HEADS, HEAD_SIZES, LENGTH = 8, 16, (4, 8, 16, 32), 32

KEPT_OF_LAYOUT = (
    "use_tp_pp_dp_mapping",
    "tp_comm_overlap",
    "overlap_p2p_comm",
    "deallocate_pipeline_outputs",
    "cp_comm_type",
    "overlap_grad_reduce",
    "ddp_num_buckets",
)
"""Settings of ranks that a small run has on any layout, unless its words say otherwise."""
# What stays the user's: the model, the update rule, the objective, and how ranks communicate.
_KEPT = {
    *specs(TransformerConfig),
    *specs(OptimizerConfig),
    *KEPT_OF_LAYOUT,
    "seed",
    "calculate_per_token_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "masked_words",
    "bert_binary_head",
}
# Sizes of the user's model that follow from smaller ones here.
_FOLLOW = (
    "max_position_embeddings",
    "yarn_original_max_position_embeddings",
    "embedding_init_method_std",
)
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
"""Most of each size of multi-latent attention."""
_REPLACED: Mapping[str, Any] = {
    "fp64": True,
    "fp32_residual_connection": False,
    "fp16_lm_cross_entropy": False,
    "device": "cpu",
    "distributed_backend": "gloo",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    # Larger weights than one starts from: attention far from uniform shows what it should not see.
    "init_method_std": 0.2,
    "adam_eps": ADAM_EPS,
    "min_offloaded_tensor_size": 0,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "train_iters": ITERATIONS,
    "mock_data": True,
    "num_workers": 0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY - 1,  # the end-of-document id comes on top
    "make_vocab_size_divisible_by": 4,
}
# Lion steps by signs, so a gradient that is nothing but rounding makes a whole step; blocks of a
# matrix that are orthogonal by themselves are another update on every layout, as is meant.
_COMPARABLE: Mapping[str, Mapping[Any, Any]] = {
    "optimizer": {"lion": "sgd"},
    "muon_scalar_optimizer": {"lion": "adam"},
    "muon_tp_mode": {"blockwise": "duplicated"},
}
"""What stands for choices of the user's that no two layouts can be compared with."""


_WIDTHS = (
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
)
"""Inner widths, which shrink as the hidden size does."""


class SmallRun:
    """Makes small runs of one user's settings, on any layout.

    Args:
        values: what the user gave, by name.
        layers_at_least: stages that some layout has: as many layers are kept, if there are.

    Raises:
        UserError: the user's model cannot be built.
    """

    def __init__(self, values: Mapping[str, Any], layers_at_least: int = 1) -> None:
        kept = {name: value for name, value in values.items() if name in _KEPT}
        self._kept, self._sizes = kept, values.get("hierarchical_context_parallel_sizes")
        names = ("seq_length", "decoder_seq_length")
        length = {name: values[name] for name in names if name in values}
        one = {"micro_batch_size": 1, "global_batch_size": 1}
        alone = {**kept, **_REPLACED, **length, **one}
        alone.pop("distribute_saved_activations", None)  # there is nobody to share with
        self._user = _built(alone)
        self.values = {**kept, **_REPLACED}
        for name, instead in _COMPARABLE.items():
            if self.values.get(name) in instead:
                self.values[name] = instead[self.values[name]]
        for name in _FOLLOW:
            self.values.pop(name, None)
        self.micro_batch_size = min(values.get("micro_batch_size", 1), 2)
        layers = min(self._user.model.num_layers, max(MOST_LAYERS, layers_at_least))
        self.values |= self._with_layers(layers)
        self._shrink_widths()

    def on(self, layout: Layout, like: Layout | None = None) -> RunConfig:
        """Return the run on a layout.

        Args:
            layout: where it runs.
            like: the layout that the run is to be compared with: it has the same samples. By
                default `layout` itself.

        Raises:
            UserError: the layout cannot hold the run.
        """
        like = like or layout
        sizes = {
            **self._lengths(like),
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.micro_batch_size * like.replicas * 2 * like.size("pp"),
            "world_size": layout.world_size,
        }
        layers = self._with_layers(like.num_layers) if like.num_layers else {}
        if layers and self._user.model.has_two_stacks:  # all of them are laid out
            decoder = layers["num_layers"] // 2
            layers |= {"num_layers": layers["num_layers"] - decoder, "decoder_num_layers": decoder}
        values = {**self.values, **layers, **sizes, **layout.values}
        window = self._user.model.attention.window_size
        if window is not None:
            most = sizes["seq_length"] // 4
            values["window_size"] = tuple(min(side, most) for side in window)
        if values.get("overlap_grad_reduce") and "ddp_num_buckets" not in values:
            values.setdefault("ddp_bucket_size", BUCKET)
        if layout.size("cp") == 1:
            values.pop("cp_comm_type", None)
        elif "a2a+p2p" in values.get("cp_comm_type", ()):
            inner = self._sizes[0] if self._sizes else 1
            levels = two_levels(layout.size("cp"), inner)
            values.setdefault("hierarchical_context_parallel_sizes", levels)
        if layout.size("tp") == 1 or layout.values.get("sequence_parallel"):
            values.pop("distribute_saved_activations", None)
        if layout.size("pp") > 1:
            values.pop("cpu_offloading_num_layers", None)
        return _built(values)

    def reference(self, layout: Layout) -> RunConfig:
        """Return the run on one process that `layout` is compared with."""
        return self.on(SERIAL, like=layout)

    def changes(self, layout: Layout = SERIAL) -> list[str]:
        """Return what is smaller than in the user's run, or another rule, as flags, on a layout."""
        small, user = self.reference(layout).flatten(), self._user.flatten()
        names = (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            *_WIDTHS,
            "seq_length",
            "decoder_num_layers",
            "decoder_seq_length",
            "window_size",
            *_COMPARABLE,
        )
        return [
            f"{flag_of(RunConfig, name)} {as_words(small[name])} ({as_words(user[name])})"
            for name in names
            if small[name] != user[name]
        ]

    def _with_layers(self, layers: int) -> dict[str, Any]:
        """Return the settings that depend on how many of the user's layers there are."""
        found: dict[str, Any] = {"num_layers": layers}
        decoder = self._user.model.stacks.decoder_num_layers
        if decoder is not None:
            found["decoder_num_layers"] = min(decoder, max(layers, MOST_LAYERS))
        if "cpu_offloading_num_layers" in self._kept:
            found["cpu_offloading_num_layers"] = min(
                self._kept["cpu_offloading_num_layers"], layers - 1
            )
        for name in ("no_rope_freq", "window_attn_skip_freq", "cp_comm_type", "moe_layer_freq"):
            pattern = self._kept.get(name)
            if isinstance(pattern, int):
                found[name] = min(pattern, layers)
            elif isinstance(pattern, Sequence) and len(pattern) > layers:
                found[name] = tuple(pattern[:layers])
        return found | self._experts_with(layers, found.get("moe_layer_freq"))

    def _experts_with(self, layers: int, pattern: Any) -> dict[str, Any]:
        """Return settings by which fewer layers have experts too, some of them chosen by score."""
        found: dict[str, Any] = {}
        if isinstance(pattern, tuple) and not any(pattern):
            found["moe_layer_freq"] = (*pattern[:-1], 1)
        hashed = self._kept.get("moe_n_hash_layers", 0)
        if hashed and layers < self._user.model.num_layers:
            found["moe_n_hash_layers"] = min(hashed, layers - 1)
        return found

    def _shrink_widths(self) -> None:
        model = self._user.model
        attention = model.attention
        heads, groups = attention.num_attention_heads, attention.num_query_groups
        heads, groups = _fewer_heads(heads, groups)
        size = next(size for size in (*HEAD_SIZES, attention.kv_channels) if self._rotates(size))
        hidden = heads * size
        self.values |= {"num_attention_heads": heads, "hidden_size": hidden}
        if attention.group_query_attention:
            self.values["num_query_groups"] = groups
        if attention.kv_channels * attention.num_attention_heads != model.hidden_size:
            self.values["kv_channels"] = 2 * size
        else:
            self.values.pop("kv_channels", None)
        if self.values.get("multi_latent_attention"):
            user = self._user.flatten()
            for name, most in _LATENT.items():
                if user[name] is not None:
                    self.values[name] = min(user[name], most)
        for name in _WIDTHS:
            width = self.values.get(name)
            if width is not None:
                unit = math.gcd(width, 48)
                self.values[name] = round_up(width * hidden // model.hidden_size, unit)

    def _rotates(self, head_size: int) -> bool:
        """Return whether pairs of a head's channels can rotate, if any do."""
        position = self._user.model.position
        channels = position.rotated_channels(head_size)
        return not position.is_rotary or (channels >= 2 and channels % 2 == 0)

    def _lengths(self, layout: Layout) -> dict[str, int]:
        """Return how many tokens of a sample are read, by whom."""
        found = {"seq_length": self._sequence(layout, self._user.data.seq_length)}
        decoder = self._user.data.t5.decoder_seq_length
        if decoder is not None:
            found["decoder_seq_length"] = self._sequence(layout, decoder)
        return found

    def _sequence(self, layout: Layout, length: int) -> int:
        """Return a length that the layout divides if it divides the user's, else does not."""
        cp, tp = layout.size("cp"), layout.size("tp")
        unit = math.lcm(
            2 * cp if cp > 1 else 1, cp * tp if layout.values.get("sequence_parallel") else 1
        )
        short = LENGTH if length % unit else round_up(LENGTH, unit)
        return min(length, short)


def _fewer_heads(heads: int, groups: int) -> tuple[int, int]:
    """Return heads and groups divided by a common factor, or heads alone where there is none."""
    if heads <= MOST_HEADS:
        return heads, groups
    for factor in range(2, groups + 1):
        if groups % factor == 0 and heads // factor <= MOST_HEADS:
            return heads // factor, groups // factor
    ratio = heads // groups
    most = max(n for n in range(1, MOST_HEADS + 1) if ratio % n == 0)
    return most, 1


def _built(values: Mapping[str, Any]) -> RunConfig:
    return build_run(values, dict.fromkeys(values, "flag"))
