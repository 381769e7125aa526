"""What a microbatch keeps: planned bytes against tensors that autograd saves on the CPU."""

import pytest
import torch

import pretrain_gpt
from megatron.core import rng, saved_tensors
from megatron.core.kernels import blocked, ring_block
from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.transformer.moe.balance import Balance
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import activations, attention_bytes

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 96 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --device cpu --dry-run"
)
GROUPED = "--group-query-attention --num-query-groups 2"
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --kv-lora-rank 20"
)
ROUTED = "--num-experts 16"
SIGMOID = "--moe-router-score-function sigmoid"
MODELS = [
    "",
    "--bf16",
    "--fp64",
    "--hidden-dropout 0 --attention-dropout 0",
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    f"--untie-embeddings-and-output-weights {GROUPED}",
    f"--swiglu --bf16 --position-embedding-type rope {GROUPED} --normalization RMSNorm",
    "--softmax-type learnable --kv-channels 24 --add-qkv-bias",
    "--softmax-type off-by-one --no-bias-gelu-fusion",
    "--qk-layernorm --geglu",
    f"--qk-layernorm --geglu {GROUPED} --bf16",
    "--qk-l2-norm --quick-geglu --position-embedding-type none",
    "--squared-relu --qk-layernorm --normalization RMSNorm",
    "--relu",
    "--relu --bf16 --disable-bias-linear --recompute-granularity selective --recompute-modules mlp",
    "--geglu-tanh",
    "--attention-softcap 30",
    "--window-size 20,0 --attention-dropout 0",
    "--window-size 20,0 --window-attn-skip-freq 2",
    "--position-embedding-type alibi --embedding-multiplier 3 --logit-multiplier 2",
    "--logit-softcap 10 --bf16",
    "--logits-at-once 1000 --bf16",
    "--fp16",
    "--fp16 --fp16-lm-cross-entropy",
    "--fp32-residual-connection --bf16",
    f"--fp32-residual-connection --fp16 --normalization RMSNorm --qk-layernorm {GROUPED}",
    "--position-embedding-type rope --reset-position-ids",
    "--reset-position-ids --openai-gelu",
    "--attention-backend unfused --attention-dropout 0",
    "--attention-backend unfused",
    "--attention-backend unfused --attention-softcap 30 --bf16",
    f"--attention-backend unfused --position-embedding-type rope {GROUPED}",
    LATENT,
    f"{LATENT} --q-lora-rank 24 --qk-layernorm --normalization RMSNorm",
    f"{LATENT} --reset-position-ids --bf16",
    f"{LATENT} --attention-backend unfused",
    "--num-experts 4",
    "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --bf16 --swiglu",
    "--num-experts 4 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 48 --geglu --fp64 "
    "--moe-shared-expert-gate --normalization RMSNorm",
    "--num-experts 4 --moe-latent-size 24",
    "--num-experts 4 --moe-latent-size 24 --bf16 --swiglu --moe-shared-expert-intermediate-size 48",
    f"{ROUTED} --bf16 --moe-router-dtype fp32",
    f"{ROUTED} --moe-router-dtype fp64 --moe-aux-loss-coeff 0.1",
    f"{ROUTED} --bf16 --moe-input-jitter-eps 0.1 --moe-shared-expert-intermediate-size 48",
    f"{ROUTED} --fp64 --moe-input-jitter-eps 0.1 --moe-router-topk-scaling-factor 2",
    f"{ROUTED} --moe-z-loss-coeff 0.1 --moe-aux-loss-coeff 0.1 --bf16",
    f"{ROUTED} --moe-router-pre-softmax --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.1",
    f"{ROUTED} {SIGMOID} --moe-router-enable-expert-bias --moe-permute-fusion",
    f"{ROUTED} {SIGMOID} --moe-router-topk 1 --moe-router-pre-softmax",
    f"{ROUTED} {SIGMOID} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--bf16 --moe-router-dtype fp32 --moe-router-topk-scaling-factor 2.5",
    f"{ROUTED} --moe-router-score-function sqrtsoftplus --moe-router-topk 3",
    f"{ROUTED} --moe-router-score-function sqrtsoftplus --moe-aux-loss-coeff 0.1 --bf16",
    f"{ROUTED} --moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 0.1",
    f"{ROUTED} --moe-router-force-load-balancing",
    f"{ROUTED} --moe-router-fusion --moe-router-topk-scaling-factor 2 --moe-aux-loss-coeff 0.1",
    f"{ROUTED} --moe-router-fusion {SIGMOID} --moe-router-dtype fp64 --moe-z-loss-coeff 0.1",
    f"{ROUTED} --moe-router-fusion --moe-router-pre-softmax --moe-z-loss-coeff 0.1 --bf16",
    f"{ROUTED} --moe-router-fusion --moe-router-dtype fp64",
    f"{ROUTED} --moe-expert-capacity-factor 4",
    f"{ROUTED} --moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity",
    f"{ROUTED} --moe-expert-capacity-factor 1e308 --moe-pad-expert-input-to-capacity",
    f"{ROUTED} --moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity --bf16 --swiglu",
    f"{ROUTED} --moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity --geglu "
    "--moe-router-topk 1 --moe-router-pre-softmax --moe-latent-size 24",
]
WITHIN = 0.001


def config(text: str) -> RunConfig:
    return parse(f"{SMALL} {text}".split()).config


def saved(run: RunConfig, stage: Stage) -> int:
    """Return the bytes that the forward of one microbatch saves in one stage."""
    mesh, samples, length = Mesh.serial(), run.training.micro_batch_size, run.data.seq_length
    vocabulary = resolve_vocabulary(run.tokenizer, 100, 1)
    (chunk,) = pretrain_gpt.build_model(run, mesh, vocabulary, [stage])
    rng.initialize(chunk, 1)
    optimizer = build_optimizer(run.optimizer, [chunk], mesh, run.precision)
    known = [x for b in optimizer.data_parallel.buffers for x in (b.data, b.grad)]
    if chunk.rotary is not None and not run.data.reset_position_ids:
        known += chunk.rotary(length, None)  # made once for all microbatches
    positions = torch.arange(length).repeat(samples, 1) if run.data.reset_position_ids else None
    bounds = torch.arange(0, samples * length + 1, length // 2, dtype=torch.int32)
    tokens, labels = (torch.randint(0, 100, (samples, length)) for _ in range(2))
    dtype = getattr(torch, run.residual_dtype)
    if run.model.moe.num_experts is not None:
        chunk.balance = Balance(None, run.model.router.loss_weights, torch.tensor(1.0))
    x = None if stage.is_first else torch.randn(length, samples, 64, dtype=dtype)
    with saved_tensors.counting(known) as meter:
        out = chunk(
            tokens,
            labels,
            x_SBH=x if x is None else x.requires_grad_(),
            position_ids_BS=positions,
            packing=Packing(bounds) if run.data.reset_attention_mask else None,
            dropout=DropoutKey(1, 1, 1),
        )
        if stage.is_last:
            out = (out * torch.ones(samples, length, dtype=out.dtype)).sum()
    assert out.requires_grad
    return meter.now


@pytest.mark.parametrize("text", MODELS)
def test_planned_bytes_are_those_that_autograd_saves(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(text)
    (stage,) = run.stages
    planned = activations.footprint(run, 128, stage, 2).kept
    assert planned == pytest.approx(saved(run, stage), rel=WITHIN)


@pytest.mark.parametrize(
    ("layers", "is_first", "is_last"),
    [
        (range(1), True, False),
        (range(1, 3), False, False),
        (range(2, 3), False, True),
        (range(3, 3), False, True),
        (range(0), True, False),
    ],
)
def test_a_stage_keeps_what_it_owns(
    layers: range, is_first: bool, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stage = config(""), Stage(layers, is_first, is_last)
    planned = activations.footprint(run, 128, stage, 2).kept
    assert planned == pytest.approx(saved(run, stage), rel=WITHIN)


def test_documents_are_planned_as_if_each_filled_its_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config("--reset-attention-mask")
    (stage,) = run.stages
    planned, measured = (
        activations.footprint(run, 128, stage, 2).kept,
        saved(run, stage),
    )
    assert measured < planned < 1.2 * measured


def test_a_long_sample_keeps_no_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or none: the tiled op computes them again where there are more than it keeps."""
    monkeypatch.setattr(blocked, "KEPT", 50_000)
    monkeypatch.setattr(attention_bytes, "PROBABILITIES", 50_000)
    attention_bytes._tiles.cache_clear()
    for length in (96, 128):
        run = config(f"--seq-length {length} --attention-dropout 0 --micro-batch-size 1")
        (stage,) = run.stages
        planned = activations.footprint(run, 128, stage, 1).kept
        assert planned == pytest.approx(saved(run, stage), rel=WITHIN)


def test_the_constants_are_those_of_the_kernels() -> None:
    assert attention_bytes.TILE == blocked.TILE == ring_block.TILE
    assert attention_bytes.RING_SCORES == ring_block.SCORES
    assert attention_bytes.PROBABILITIES == blocked.KEPT == ring_block.KEPT


def test_fused_attention_on_a_gpu_keeps_no_scores_but_for_a_mask() -> None:
    """By hand, for one layer of 64 positions, 2 samples, 4 heads of 16, in bf16."""

    def attention(text: str) -> int:
        words = SMALL.replace("--device cpu", "--bf16 --num-layers 1 --seq-length 64")
        run = parse(f"{words} {text}".split()).config
        heads = attention_bytes.Heads(4, 4, 16, 16)
        given = [attention_bytes.Piece("mixed", 2 * 64 * 3 * 64 * 2, 2)] * 3
        own = attention_bytes.Texts(64, 64, causal=True)
        saved = attention_bytes.saved(run, 0, 2, heads, given, own)
        pieces = {piece.name: piece for piece in saved}
        return sum(piece.size for piece in pieces.values())

    plain = 2 * 64 * 3 * 64 * 2 + 2 * 64 * 4 * 4  # queries, keys, values; a sum for each head
    assert attention("") == plain
    assert attention("--position-embedding-type alibi") == plain + 4 * 64 * 64 * 2
    assert attention("--reset-attention-mask") == plain + 2 * 64 * 64 * 2


def test_activations_grow_with_what_they_hold_and_shrink_with_what_splits_them() -> None:
    def kept(text: str) -> int:
        run = parse(f"{SMALL.replace('--device cpu', '')} {text}".split()).config
        (stage,) = run.stages
        return activations.footprint(run, 128, stage, 2).kept

    base = kept("")
    assert kept("--seq-length 192") == 2 * base
    assert kept("--bf16") < base
    assert kept("--hidden-dropout 0") < base
    two = "--dry-run-world-size 2"
    tensor = kept(f"{two} --tensor-model-parallel-size 2")
    assert base / 2 < tensor < base
    assert kept(f"{two} --tensor-model-parallel-size 2 --sequence-parallel") < tensor
    # An all-to-all leaves every token as it is, and the output is kept on both sides of it.
    halved = kept(f"{two} --context-parallel-size 2 --cp-comm-type a2a")
    assert halved == base / 2 + 3 * 2 * 48 * 64 * 4
