"""Rules of a model's sizes: what layers, positions and samples need of each other."""

from collections.abc import Mapping
from typing import Any

from megatron.core.config import as_words
from megatron.core.datasets.noise_shape import check_random_spans
from megatron.core.utils import UserError, divisors
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule
from megatron.training.wording import nearest_of

ENCODER_DECODER = "pretrain_t5"
"""The program that trains an encoder with a decoder."""

CALLED: Mapping[str, Mapping[str, str]] = {
    ENCODER_DECODER: {"seq_length": "--encoder-seq-length"},
}
"""Program -> setting -> the flag by which its users know it, where that is not the first one."""


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
    position, data = config.model.position, config.data
    rows = position.max_position_embeddings
    length = "--encoder-seq-length" if config.model.has_two_stacks else "--seq-length"
    for name, seq in (
        (length, data.seq_length),
        ("--decoder-seq-length", data.t5.decoder_seq_length or 0),
    ):
        if position.position_embedding_type == "learned_absolute" and rows < seq:
            raise UserError(
                f"--max-position-embeddings ({rows}) is less than {name} ({seq}); raise it to "
                f"{seq} or shorten the sequence (learned positions end at the table's last row)"
            )


def experts_are_shared_out_by_us(config: RunConfig, origins: Origins) -> None:
    """What replicas of experts share out is not for torch; instances get equally many of them."""
    if config.model.moe.num_experts is None:
        return
    if config.replicas.use_torch_fsdp2:
        raise UserError(
            "--use-torch-fsdp2 knows one set of replicas, and experts (--num-experts "
            f"{config.model.moe.num_experts}) have their own; use --use-megatron-fsdp"
        )
    instances = config.replicas.num_distributed_optimizer_instances
    replicas = config.axis_sizes["edp"] if instances > 1 else 1
    if instances > 1 and replicas % instances:
        raise UserError(
            f"--num-distributed-optimizer-instances ({instances}) must divide the {replicas} "
            "replicas of experts (processes / (--expert-model-parallel-size "
            f"{config.parallel.expert_model_parallel_size} x --expert-tensor-parallel-size "
            f"{config.parallel.expert_tensor_parallel_size} x --pipeline-model-parallel-size "
            f"{config.parallel.pipeline_model_parallel_size})); choose one of "
            f"{as_words(divisors(replicas))}"
        )


def samples_are_the_models(config: RunConfig, origins: Origins) -> None:
    """A second stack needs samples that have something for it, an encoder alone masked words."""
    layers = config.model.stacks.decoder_num_layers
    if layers is not None and config.data.t5.decoder_seq_length is None:
        raise UserError(
            f"--decoder-num-layers ({layers}) is of an encoder-decoder (pretrain_t5.py), which "
            "needs --decoder-seq-length; for a decoder alone use --num-layers and --seq-length"
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


def random_spans_fit(config: RunConfig, origins: Origins) -> None:
    """Texts with random spans fit encoder and decoder, and have a sentinel for each span.

    Those that --vocab-extra-ids asks for are there before the tokenizer is looked at.
    """
    data = config.data
    ours = data.dataloader_type != "external" and data.t5.decoder_seq_length is not None
    if ours and data.t5.span_corruption == "random_spans":
        check_random_spans(data, config.tokenizer.vocab_extra_ids or None)


def check_given(values: Mapping[str, Any], program: str) -> None:
    """Refuse settings that do not make samples for an encoder-decoder, of a program that trains it.

    This comes before they are resolved: what follows from the missing length says less.

    Raises:
        UserError: the decoder's length is missing.
    """
    if program == ENCODER_DECODER and values.get("decoder_seq_length") is None:
        raise UserError(
            f"{program}.py trains an encoder and a decoder: give --decoder-seq-length, the tokens "
            "that the decoder reads of a sample, beside --encoder-seq-length"
        )


def check_program(config: RunConfig, program: str) -> None:
    """Refuse samples of another kind of model than a program trains.

    Raises:
        UserError: samples are for a decoder, an encoder or both, and the model is not.
    """
    is_encoder = config.data.bert.masked_words
    if program == "pretrain_gpt" and is_encoder:
        raise UserError(
            "--masked-words makes samples for an encoder alone, and pretrain_gpt.py trains a "
            "decoder; run pretrain_bert.py, or drop it"
        )
    if program == "pretrain_bert" and not is_encoder:
        raise UserError(
            "masked_words false: pretrain_bert.py trains an encoder alone, which reads no other "
            "samples; run pretrain_gpt.py, or drop it"
        )
    length = config.data.t5.decoder_seq_length
    if length is not None and program != ENCODER_DECODER:
        raise UserError(
            f"--decoder-seq-length ({length}) makes samples for an encoder and a decoder, which "
            f"{ENCODER_DECODER}.py trains; for a decoder alone give --seq-length and leave it out"
        )


MODEL_RULES: tuple[Rule, ...] = (
    samples_are_the_models,
    random_spans_fit,
    heads_fill_the_hidden_size,
    rotated_channels_are_pairs,
    positions_reach_the_sequence,
    experts_are_shared_out_by_us,
)
