"""What a transformer is made of; every choice that changes the function it computes."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import (
    Config,
    as_words,
    check_above,
    check_at_least,
    check_at_most,
    check_not_zero,
    option,
)
from megatron.core.transformer.bert_config import BertConfig
from megatron.core.transformer.fusion_config import FusionConfig
from megatron.core.transformer.layer_pattern import MOST_LAYERS, parse_pattern
from megatron.core.transformer.mla_config import MLAConfig
from megatron.core.transformer.moe.config import MoEConfig
from megatron.core.transformer.moe.router_config import RouterConfig
from megatron.core.transformer.mtp_config import MTPConfig
from megatron.core.transformer.offload_config import OffloadConfig, check_offload
from megatron.core.transformer.position_config import PositionConfig
from megatron.core.transformer.recompute_config import RecomputeConfig
from megatron.core.transformer.stacks_config import StacksConfig
from megatron.core.utils import UserError, divisors

WIDEST = 2**31 - 1
"""Most channels or heads, as many as 32-bit numbers of a kernel count."""
WIDEST_STREAM = WIDEST // 8
"""Largest hidden size, whose MLP is a few times as wide."""


def parse_window(text: str) -> tuple[int, int] | None:
    """Return (left, right) from ``"128,0"`` or ``"(128,0)"``; -1 means no limit on that side."""
    parts = text.strip().strip("()").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise UserError(f"--window-size is LEFT,RIGHT such as 128,0; not {text!r}") from None
    return left, right


class NormConfig(Config):
    """Normalisation before each block and at the end."""

    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm")
    """Kind of normalisation."""

    norm_epsilon: float = option(1e-5, aliases=("--layernorm-epsilon",))
    """Added to the variance."""

    apply_layernorm_1p: bool = option(False)
    """Store each gain as its difference from one, so that weight decay pulls it to one."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "norm_epsilon")


class MLPConfig(Config):
    """The channel block."""

    ffn_hidden_size: int = option(
        derived="4 x --hidden-size; with --swiglu 8/3 of it, rounded to a multiple of 64"
    )
    """Width of the inner layer."""

    swiglu: bool = option(False)
    """Gate the inner layer with SiLU (Shazeer, 2020)."""

    geglu: bool = option(False)
    """Gate the inner layer with GELU."""

    geglu_tanh: bool = option(False)
    """Gate the inner layer with the tanh approximation of GELU, as T5 1.1 does."""

    quick_geglu: bool = option(False)
    """Gate the inner layer with the sigmoid approximation of GELU."""

    relu: bool = option(False)
    """Use max(x, 0), as T5 1.0 does."""

    squared_relu: bool = option(False)
    """Square a ReLU (So et al., 2021)."""

    openai_gelu: bool = option(False)
    """Use the tanh approximation of GELU."""

    activation_func_clamp_value: float | None = option(None)
    """Bound of what a gated unit reads: of the gate from above, of the value on both sides."""

    glu_linear_offset: float = option(0.0)
    """Added to the value of a gated unit before the gate multiplies it."""

    bias_gelu_fusion: bool = option(True, derived="on if linear layers have biases")
    """Compute plain GELU, with the bias before it, in one kernel and by the tanh formula, as
    Megatron-LM's does; off, exactly."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return Megatron's widths, four times hidden or 8/3 for a gated unit, and its GELU."""
        hidden = values["hidden_size"]
        width = int((4 * hidden * 2 / 3) / 64) * 64 or 64 if values["swiglu"] else 4 * hidden
        width = min(max(width, 1), WIDEST)  # the fault of a wrong hidden size is named as such
        return {"ffn_hidden_size": width, "bias_gelu_fusion": values.get("add_bias_linear", True)}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "ffn_hidden_size")
        check_at_most(self, WIDEST, "ffn_hidden_size")
        named = {
            "--swiglu": self.swiglu,
            "--geglu": self.geglu,
            "--geglu-tanh": self.geglu_tanh,
            "--quick-geglu": self.quick_geglu,
            "--relu": self.relu,
            "--squared-relu": self.squared_relu,
            "--openai-gelu": self.openai_gelu,
        }
        chosen = [flag for flag, value in named.items() if value]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)} exclude each other; keep one")
        check_above(self, 0, "activation_func_clamp_value")
        if self.has_bounds and not self.is_gated:
            given = "--activation-func-clamp-value"
            if self.activation_func_clamp_value is None:
                given = "--glu-linear-offset"
            raise UserError(
                f"{given} is for gated units; add --swiglu or --quick-geglu, or drop it"
            )

    @property
    def has_bounds(self) -> bool:
        """A gated unit clamps what it reads, or adds something to its value."""
        return self.activation_func_clamp_value is not None or self.glu_linear_offset != 0

    @property
    def activation(self) -> str:
        """Return the name of the activation in `megatron.core.kernels`."""
        for name in ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "relu", "squared_relu"):
            if getattr(self, name):
                return name
        return "gelu_tanh" if self.openai_gelu or self.bias_gelu_fusion else "gelu"

    @property
    def is_gated(self) -> bool:
        """The first matrix makes a gate and a value."""
        return self.swiglu or self.geglu or self.geglu_tanh or self.quick_geglu


class AttentionConfig(Config):
    """Self-attention."""

    num_attention_heads: int = option()
    """Query heads."""

    group_query_attention: bool = option(False)
    """Share key and value heads between query heads (Ainslie et al., 2023)."""

    num_query_groups: int = option(
        derived="1 with --group-query-attention, else --num-attention-heads"
    )
    """Key and value heads; used with --group-query-attention."""

    kv_channels: int = option(derived="--hidden-size / --num-attention-heads")
    """Channels of a head."""

    attention_dropout: float = option(0.1)
    """Dropout on attention probabilities."""

    add_qkv_bias: bool = option(False)
    """Give the query, key and value projections a bias even without other biases."""

    qk_layernorm: bool = option(False)
    """Normalise each head's queries and keys, with learned gains."""

    qk_l2_norm: bool = option(False)
    """Divide each head's queries and keys by their root mean square, without gains."""

    window_size: tuple[int, int] | None = option(None, parse=parse_window, metavar="LEFT,RIGHT")
    """Sliding window: how many tokens to the left and right a token sees; -1 is no limit."""

    window_attn_skip_freq: int | tuple[int, ...] | None = option(None, parse=parse_pattern)
    """Layers with full attention: every N-th, or a pattern with 0 for such a layer."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = option("vanilla")
    """Plain softmax, one with a fixed extra zero logit, or with a learned one per head."""

    attention_softcap: float | None = option(None)
    """Squash attention logits to (-x, x) by x tanh(logit / x)."""

    softmax_scale: float | None = option(None)
    """Factor on query-key products; one over the root of a head's channels when absent."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return one group per head and heads that fill the hidden size."""
        heads, hidden = values["num_attention_heads"], values["hidden_size"]
        derived = {"kv_channels": min(max(hidden // max(heads, 1), 1), WIDEST)}
        # Megatron's default is 1 group, which counts only with the switch.
        derived["num_query_groups"] = 1 if values["group_query_attention"] else heads
        return derived

    def __post_init__(self) -> None:
        sizes = ("num_attention_heads", "num_query_groups", "kv_channels")
        check_at_least(self, 1, *sizes)
        check_at_most(self, WIDEST, *sizes)
        check_above(self, 0, "attention_softcap")
        check_not_zero(self, "softmax_scale")
        window = self.window_size
        if window is not None and not (
            len(window) == 2 and all(isinstance(n, int) and n >= -1 for n in window)
        ):
            raise UserError(
                f"--window-size ({as_words(window)}) must be two numbers of tokens, or -1 for no "
                "limit"
            )
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            fitting = divisors(heads)
            below = max(n for n in fitting if n < groups)  # 1 at the least
            above = min((n for n in fitting if n > groups), default=below)
            choices = " or ".join(map(str, sorted({below, above})))
            raise UserError(
                f"--num-attention-heads ({heads}) must be a multiple of --num-query-groups "
                f"({groups}); try --num-query-groups {choices}"
            )
        if self.qk_layernorm and self.qk_l2_norm:
            raise UserError("--qk-layernorm and --qk-l2-norm exclude each other; drop one")
        if not 0.0 <= self.attention_dropout < 1.0:
            raise UserError(f"--attention-dropout ({self.attention_dropout}) must lie in [0, 1)")

    def layer_window(self, layer: int) -> tuple[int, int] | None:
        """Return the window of layer ``layer`` (from 0), or None for full attention."""
        skip = self.window_attn_skip_freq
        if self.window_size is None:
            return None
        if skip is None:
            return self.window_size
        if isinstance(skip, int):
            return None if (layer + 1) % skip == 0 else self.window_size
        return self.window_size if skip[layer] else None


class InitConfig(Config):
    """How weights start."""

    init_method_std: float = option(0.02)
    """Standard deviation of normal initial weights."""

    embedding_init_method_std: float = option(derived="--init-method-std")
    """Standard deviation of the embedding and of an untied head."""

    init_method_xavier_uniform: bool = option(False)
    """Draw from a uniform distribution of Glorot's width instead."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "init_method_std", "embedding_init_method_std")

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let embeddings start as other weights do."""
        return {"embedding_init_method_std": values["init_method_std"]}


class TransformerConfig(Config):
    """A stack of layers, what goes in and what comes out."""

    num_layers: int = option(aliases=("--encoder-num-layers",))
    """Transformer layers; of an encoder-decoder, the encoder's."""

    hidden_size: int = option()
    """Width of the residual stream."""

    attention: AttentionConfig
    mla: MLAConfig
    mtp: MTPConfig
    mlp: MLPConfig
    moe: MoEConfig
    router: RouterConfig
    norm: NormConfig
    position: PositionConfig
    stacks: StacksConfig
    init: InitConfig
    recompute: RecomputeConfig
    offload: OffloadConfig
    fusion: FusionConfig
    bert: BertConfig

    hidden_dropout: float = option(0.1)
    """Dropout on the embedding and on what each block adds."""

    add_bias_linear: bool = option(True, aliases={"--disable-bias-linear": False})
    """Give every linear layer a bias."""

    untie_embeddings_and_output_weights: bool = option(False)
    """Give the output head a matrix of its own."""

    embedding_multiplier: float = option(1.0)
    """Factor on the embedding's output."""

    logit_multiplier: float = option(1.0)
    """Factor on the logits."""

    logit_softcap: float | None = option(None)
    """Squash logits to (-x, x) by x tanh(logit / x)."""

    logits_at_once: int = option(2**27)
    """Logits of a rank above which head and loss work on pieces of the sequence, whose logits are
    made again in backward; 0 for all at once."""

    label_smoothing: float = option(0.0)
    """Share of each target that is spread evenly over the vocabulary (Szegedy et al., 2016), in
    training; losses of evaluations are without."""

    fp32_residual_connection: bool = option(False)
    """Keep the residual stream in fp32 under --bf16 or --fp16; blocks read it in half."""

    fp16_lm_cross_entropy: bool = option(False)
    """Keep the exponentials of the logits in fp16 under --fp16; sums and losses stay in fp32."""

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = option("auto")
    """Implementation of attention; `auto` takes the fastest there is."""

    transformer_impl: Literal["auto", "local", "transformer_engine", "apex"] = option("auto")
    """Implementation of norms and activations: the fastest of this project's, or what a package
    has of them."""

    @property
    def routed_size(self) -> int:
        """Channels that routed experts read and write: the latent's, where there is one."""
        return self.moe.moe_latent_size or self.hidden_size

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_layers", "hidden_size")
        check_at_most(self, MOST_LAYERS, "num_layers")
        check_at_most(self, WIDEST_STREAM, "hidden_size")
        check_at_least(self, 0, "logits_at_once")
        check_above(self, 0, "logit_softcap")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"--label-smoothing ({self.label_smoothing}) must lie in [0, 1)")
        check_not_zero(self, "embedding_multiplier", "logit_multiplier")
        if not 0.0 <= self.hidden_dropout < 1.0:
            raise UserError(f"--hidden-dropout ({self.hidden_dropout}) must lie in [0, 1)")
        self._check_patterns()
        if self.mla.multi_latent_attention:
            self._check_latent_attention()
        if self.mtp.depths and not self.has_two_stacks:  # those have none: see _check_stacks
            self._check_multi_token_prediction()
        if self.bert.encoder_alone:
            self._check_encoder_alone()
        if "mla_up_proj" in self.recompute.modules and not self.mla.multi_latent_attention:
            raise UserError(
                "--recompute-modules mla_up_proj is for --multi-latent-attention; drop it"
            )
        self._check_experts()
        self._check_stacks()
        check_offload(self.offload, self.recompute, self.num_layers)

    @property
    def all_layers(self) -> int:
        """Return the number of layers of all stacks."""
        return self.num_layers + (self.stacks.decoder_num_layers or 0)

    @property
    def has_two_stacks(self) -> bool:
        """Return whether this is an encoder with a decoder."""
        return self.stacks.decoder_num_layers is not None

    def layer_is_causal(self, layer: int) -> bool:
        """Return whether a layer's tokens see those before them only: not those of an encoder."""
        is_encoders = self.has_two_stacks and layer < self.num_layers
        return not (is_encoders or self.bert.encoder_alone)

    def visible_share(self, layer: int) -> float:
        """Return the share of all pairs of a query and a key that see each other in a layer."""
        return 0.5 if self.layer_is_causal(layer) else 1.0

    def _check_stacks(self) -> None:
        """Refuse what an encoder-decoder has not."""
        if not self.has_two_stacks:
            if self.position.position_embedding_type == "relative":
                raise UserError(
                    "--position-embedding-type relative is for an encoder-decoder "
                    "(--decoder-seq-length); give rope or alibi, or another"
                )
            return
        attention = self.attention
        excluded = {
            "--group-query-attention": attention.group_query_attention,
            "--window-size": attention.window_size is not None,
            "--softmax-type": attention.softmax_type != "vanilla",
            "--attention-softcap": attention.attention_softcap is not None,
            "--qk-layernorm": attention.qk_layernorm,
            "--qk-l2-norm": attention.qk_l2_norm,
            "--position-embedding-type alibi": self.position.position_embedding_type == "alibi",
            "--no-rope-freq": self.position.no_rope_freq is not None,
            "--multi-latent-attention": self.mla.multi_latent_attention,
            "--mtp-num-layers": self.mtp.depths > 0,
            "--num-experts": self.moe.num_experts is not None,
            "--cpu-offloading-num-layers or --offload-modules": self.offload.is_on,
        }
        found = [flag for flag, given in excluded.items() if given]
        if found:
            raise UserError(
                f"{' and '.join(found)}: an encoder-decoder (--decoder-seq-length) does not have "
                "this yet; leave it out"
            )

    def _check_experts(self) -> None:
        self.moe.check_layers(self.num_layers)
        if self.moe.num_experts is not None:
            self.router.check_experts(self.moe.num_experts)
        hashed = self.router.moe_n_hash_layers
        if self.moe.num_experts is not None and hashed > self.num_layers:
            raise UserError(
                f"--moe-n-hash-layers ({hashed}) must not exceed --num-layers ({self.num_layers}); "
                "it counts layers from the first one, dense ones too"
            )

    def _check_latent_attention(self) -> None:
        excluded = {
            "--group-query-attention": self.attention.group_query_attention,
            "--qk-l2-norm": self.attention.qk_l2_norm,
            "--rotary-interleaved": self.position.rotary_interleaved,
            "--position-embedding-type alibi": self.position.position_embedding_type == "alibi",
        }
        for flag, given in excluded.items():
            if given:
                raise UserError(f"--multi-latent-attention and {flag} exclude each other; drop one")
        if self.mla.rope_type == "yarn":
            check_above(self.position, 1, "rotary_base")

    def _check_encoder_alone(self) -> None:
        excluded = {
            f"--mtp-num-layers {self.mtp.depths}": self.mtp.depths > 0,
            f"--num-experts {self.moe.num_experts}": self.moe.num_experts is not None,
        }
        for flag, given in excluded.items():
            if given:
                raise UserError(
                    f"{flag} is for a decoder, and --masked-words (pretrain_bert.py) asks for an "
                    "encoder alone; drop one of them"
                )

    def _check_multi_token_prediction(self) -> None:
        depths = self.mtp.depths
        if self.position.position_embedding_type == "learned_absolute":
            raise UserError(
                f"--mtp-num-layers ({depths}) does not go with learned positions, as in "
                "Megatron-LM; give --position-embedding-type rope, or drop it"
            )
        if depths > self.num_layers:
            raise UserError(
                f"--mtp-num-layers ({depths}) must not exceed --num-layers ({self.num_layers}): "
                "each is made like the decoder's layer of the same number"
            )

    def _check_patterns(self) -> None:
        for flag, value in (
            ("--no-rope-freq", self.position.no_rope_freq),
            ("--window-attn-skip-freq", self.attention.window_attn_skip_freq),
        ):
            if isinstance(value, tuple) and len(value) != self.num_layers:
                raise UserError(
                    f"{flag} names {len(value)} layers, --num-layers is {self.num_layers}"
                )
            if isinstance(value, int) and value < 1:
                raise UserError(f"{flag} ({value}) must be at least 1")
            if isinstance(value, tuple) and not set(value) <= {0, 1}:
                raise UserError(f"{flag} ({as_words(value)}): a pattern holds 0 and 1 only")
