"""What a Hugging Face family says of itself: its settings in ours and back, and its tensors.

A family is written once, for both directions. Its settings need no list of what they cannot
express: a config goes there and back, and whatever comes back otherwise is named.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron.bridge.copies import Copy
from megatron.bridge.settings import Settings
from megatron.core.config import as_json, as_words, specs
from megatron.core.transformer.config import InitConfig, TransformerConfig
from megatron.core.transformer.fusion_config import FusionConfig
from megatron.core.transformer.mla_config import MLAConfig
from megatron.core.transformer.moe.config import MoEConfig
from megatron.core.transformer.moe.router_config import RouterConfig
from megatron.core.transformer.offload_config import OffloadConfig
from megatron.core.transformer.position_config import PositionConfig
from megatron.core.transformer.recompute_config import RecomputeConfig
from megatron.core.utils import UserError

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"

_TRAINING = (
    *("hidden_dropout", "attention_dropout", "label_smoothing"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
)
"""Settings that only training asks for: some families have words for some."""
# How a model is computed or trained, not what it computes; other packages' files do not say it.
_ASIDE = frozenset(
    (
        *_TRAINING,
        *specs(RecomputeConfig),
        *specs(OffloadConfig),
        *specs(FusionConfig),
        *specs(InitConfig),
        *"attention_backend transformer_impl logits_at_once fp32_residual_connection "
        "fp16_lm_cross_entropy mtp_loss_scaling_factor group_query_attention "
        "moe_router_bias_update_rate moe_token_dispatcher_type moe_flex_dispatcher_backend "
        "moe_flex_dispatcher_num_sms moe_grouped_gemm moe_permute_fusion moe_router_fusion "
        "moe_shared_expert_overlap moe_token_drop_policy".split(),
    )
)
_RELATIVE = {name for name in specs(PositionConfig) if name.startswith("relative_")}
_ACTIVATIONS = ("swiglu", "geglu", "quick_geglu", "squared_relu", "openai_gelu", "bias_gelu_fusion")


class Family(ABC):
    """One architecture of the transformers library."""

    architecture: ClassVar[str]
    """Name of its class there."""
    model_type: ClassVar[str]
    head: ClassVar[str] = "lm_head.weight"
    """Its output matrix, which a tied model's file need not have."""
    token_vectors: ClassVar[str]
    same_vectors: ClassVar[tuple[str, ...]] = ()
    """Names under which a file may hold `token_vectors` again."""
    own_head_wins: ClassVar[bool] = False
    """A head that is there and is not the embedding is the model's, whatever its config says."""
    says_tied: ClassVar[str] = '"tie_word_embeddings": true'
    """What a config.json must say whose head is the embedding."""
    kind: ClassVar[str] = "a decoder alone"
    """Which stacks its models have, in the words of `kind_of`."""
    run_settings: ClassVar[Mapping[str, Any]] = {}
    """What else is known of the texts that its models read, as settings of a run of ours."""

    @abstractmethod
    def from_theirs(self, settings: Settings) -> dict[str, Any]:
        """Return flat values of `TransformerConfig`.

        Raises:
            UserError: a setting cannot be expressed in ours; the message names it.
        """

    @abstractmethod
    def to_theirs(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the settings of an architecture, as far as the family has words for it."""

    @abstractmethod
    def copies(self, config: TransformerConfig, rows: int) -> list[Copy]:
        """Return which boxes of their tensors are which of ours, of ``rows`` token vectors."""

    def canonical(self, name: str) -> str | None:
        """Return the name in today's files of a tensor in any file; None for a constant."""
        return name

    def misfits(self, config: TransformerConfig) -> list[str]:
        """Return the settings of ours that this family cannot express, as on a command line."""
        try:
            ours, again = effective(config), effective(self._there_and_back(config))
        except UserError as error:
            return [str(error).removeprefix(f"{self.architecture}: ")]
        # What has no effect there follows from a setting that is named itself.
        both = {name: value for name, value in ours.items() if name in again}
        return _unlike(both, again) or _unlike(ours, again)

    def left_out(self, config: TransformerConfig) -> list[str]:
        """Return the settings of training that this family cannot express, likewise.

        They change nothing that a trained model computes, so they are worth a word and no refusal.
        """
        ours, again = config.flatten(), self._there_and_back(config).flatten()
        return _unlike({name: ours[name] for name in _TRAINING}, again)

    def _there_and_back(self, config: TransformerConfig) -> TransformerConfig:
        theirs = Settings(self.to_theirs(config), self.architecture)
        return TransformerConfig.resolve(**self.from_theirs(theirs))


def _unlike(ours: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    """Return the settings that have not come back as they were, as on a command line."""
    flags = {name: spec.flag for name, spec in specs(TransformerConfig).items()}
    return [
        f"{flags.get(name, name)} {as_words(value)} (it has {as_words(again.get(name))})"
        for name, value in ours.items()
        if as_json(again.get(name)) != as_json(value)
    ]


def effective(config: TransformerConfig) -> dict[str, Any]:
    """Return the settings that decide what a model computes, by name."""
    flat = {name: value for name, value in config.flatten().items() if name not in _ASIDE}
    for name in _ACTIVATIONS:
        del flat[name]
    flat["activation"] = config.mlp.activation
    if config.attention.softmax_scale == config.attention.kv_channels**-0.5:
        flat["softmax_scale"] = None
    if not config.router.is_sinkhorn:  # other kinds differ in what is minimised alone
        flat["moe_router_load_balancing_type"] = None
    idle = _idle(config)
    return {name: value for name, value in flat.items() if name not in idle}


def _idle(config: TransformerConfig) -> set[str]:
    """Return the settings that decide nothing, since others leave them without effect."""
    position, idle = config.position, _idle_with_experts(config)
    if not config.mla.multi_latent_attention:
        idle |= set(specs(MLAConfig)) - {"multi_latent_attention"}
    if not position.is_rotary:
        kept = {"position_embedding_type", "max_position_embeddings", *_RELATIVE}
        idle |= set(specs(PositionConfig)) - kept
    if position.position_embedding_type != "relative":
        idle |= _RELATIVE
    if not position.use_rope_scaling:
        idle.add("rope_scaling_factor")
    if position.position_embedding_type != "yarn":
        idle |= {name for name in specs(PositionConfig) if name.startswith("yarn_")}
    if config.attention.window_size is None:
        idle.add("window_attn_skip_freq")
    if not config.mtp.depths:
        idle |= {name for name in specs(TransformerConfig) if name.startswith("mtp_")}
    if config.add_bias_linear:
        idle.add("add_qkv_bias")
    return idle


def _idle_with_experts(config: TransformerConfig) -> set[str]:
    if config.moe.num_experts is None:
        return {*specs(MoEConfig), *specs(RouterConfig)} - {"num_experts"}
    return {"ffn_hidden_size"} if config.moe.moe_layer_freq == 1 else set()


def choose_by_settings(
    families: Sequence[Family], values: Mapping[str, Any], origin: str
) -> Family:
    """Return the family of a config.json.

    Raises:
        UserError: it is none of ``families``.
    """
    named = values.get("architectures") or []
    for family in families:
        if family.architecture in named or (
            not named and values.get("model_type") == family.model_type
        ):
            return family
    known = ", ".join(family.architecture for family in families)
    found = ", ".join(map(str, named)) or f"model_type {values.get('model_type')}"
    raise UserError(f"{origin} is a model of {found}; those that can be converted are {known}")


def choose_by_config(families: Sequence[Family], config: TransformerConfig) -> Family:
    """Return the family that can express an architecture of ours.

    Raises:
        UserError: none can; the message says what each lacks.
    """
    reasons, kind = [], kind_of(config)
    for family in families:
        misfits = [f"{kind} (it is {family.kind})"]
        if family.kind == kind:
            misfits = family.misfits(config)
        if not misfits:
            return family
        reasons.append(f"{family.architecture}: {'; '.join(misfits)}")
    others = "--to megatron or torch_dist" if kind == Family.kind else "--to megatron"
    raise UserError(
        f"this model, {kind}, is none that transformers' classes known here can compute, so it has "
        f"no form for --to hf; {others} writes it. What each class has not:\n  "
        + "\n  ".join(reasons)
    )


def kind_of(config: TransformerConfig) -> str:
    """Return which stacks a model has, in words."""
    if config.has_two_stacks:
        return "an encoder with a decoder"
    return "an encoder alone" if config.bert.encoder_alone else "a decoder alone"
