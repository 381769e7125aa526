"""Rules of a model's sizes: what its layers and positions need of each other."""

from megatron.core.utils import UserError, divisors
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule
from megatron.training.wording import nearest_of


def heads_fill_the_hidden_size(config: RunConfig, origins: Origins) -> None:
    """Unless --kv-channels says otherwise, heads share the hidden size."""
    hidden, heads = config.model.hidden_size, config.model.attention.num_attention_heads
    if config.model.mla.multi_latent_attention:
        return  # its heads have sizes of their own
    if origins["kv_channels"] in ("derived", "default") and hidden % heads:
        raise UserError(
            f"--hidden-size ({hidden}) is not divisible by --num-attention-heads ({heads}); try "
            f"{nearest_of(divisors(hidden), heads)} heads, or set --kv-channels"
        )


def rotated_channels_are_pairs(config: RunConfig, origins: Origins) -> None:
    """Rotary positions turn channels two by two."""
    if config.model.mla.multi_latent_attention:
        _latent_channels_are_pairs(config)
        return
    position, head_size = config.model.position, config.model.attention.kv_channels
    width = position.rotated_channels(head_size)
    if position.is_rotary and (width < 2 or width % 2):
        raise UserError(
            f"--rotary-percent ({position.rotary_percent}) of --kv-channels ({head_size}, "
            f"{origins['kv_channels']}) makes {width} channels that rotate; their number must be "
            "even and at least 2"
        )


def _latent_channels_are_pairs(config: RunConfig) -> None:
    """With YaRN all rotary channels of a head of multi-latent attention turn."""
    position, latent = config.model.position, config.model.mla
    channels = width = latent.qk_pos_emb_head_dim
    share = ""
    if latent.rope_type == "rope":
        width = position.rotated_channels(channels)
        share = f"--rotary-percent ({position.rotary_percent}) of "
    if width < 2 or width % 2:
        raise UserError(
            f"{share}--qk-pos-emb-head-dim ({channels}) makes {width} channels that rotate; their "
            "number must be even and at least 2"
        )


def positions_reach_the_sequence(config: RunConfig, origins: Origins) -> None:
    """A learned table has a row for each position."""
    position, seq = config.model.position, config.data.seq_length
    rows = position.max_position_embeddings
    if position.position_embedding_type == "learned_absolute" and rows < seq:
        raise UserError(
            f"--max-position-embeddings ({rows}) is less than --seq-length ({seq}); raise it to "
            f"{seq} or shorten the sequence (learned positions end at the table's last row)"
        )


def experts_are_shared_out_by_us(config: RunConfig, origins: Origins) -> None:
    """What replicas of experts share out is not for torch, nor in several instances."""
    if config.model.moe.num_experts is None:
        return
    if config.replicas.use_torch_fsdp2:
        raise UserError(
            "--use-torch-fsdp2 knows one set of replicas, and experts (--num-experts "
            f"{config.model.moe.num_experts}) have their own; use --use-megatron-fsdp"
        )
    instances = config.replicas.num_distributed_optimizer_instances
    if instances > 1:
        raise UserError(
            f"--num-distributed-optimizer-instances ({instances}) does not go with experts yet "
            f"(--num-experts {config.model.moe.num_experts}); leave it at 1"
        )
    if "muon" in config.optimizer.rules:
        raise UserError(
            "--optimizer muon does not update matrices of experts yet (--num-experts "
            f"{config.model.moe.num_experts}); use --optimizer adam"
        )


def samples_are_the_models(config: RunConfig, origins: Origins) -> None:
    """A decoder alone is not given what an encoder-decoder reads."""
    length = config.data.t5.decoder_seq_length
    if length is not None:
        raise UserError(
            f"--decoder-seq-length ({length}) makes samples for an encoder and a decoder, and such "
            "a model comes in a later version; for a decoder alone give --seq-length and leave it "
            "out"
        )
    samples, model = config.data.bert, config.model.bert
    if samples.masked_words != model.encoder_alone:
        raise UserError(
            f"--encoder-alone ({model.encoder_alone}) says what reads the samples, and "
            f"--masked-words ({samples.masked_words}) whether these are of masked words; leave the "
            "first out, which follows from the second"
        )
    if model.sentence_order_head and not (model.encoder_alone and samples.bert_binary_head):
        raise UserError(
            "--sentence-order-head says of samples of masked words whether two parts are in order; "
            "leave it out, since it follows from --masked-words and --bert-no-binary-head"
        )


MODEL_RULES: tuple[Rule, ...] = (
    samples_are_the_models,
    heads_fill_the_hidden_size,
    rotated_channels_are_pairs,
    positions_reach_the_sequence,
    experts_are_shared_out_by_us,
)
