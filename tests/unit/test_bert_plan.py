"""What is planned of an encoder alone is what is built: parameters, saved bytes, operations."""

import pytest
import torch

import pretrain_bert
from megatron.core import rng, saved_tensors
from megatron.core.mesh import Mesh
from megatron.core.models.bert import BertModel
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.sharding import of
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import activations, operations_gpt, parameter_shapes
from megatron.training.plan.report import report

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--dry-run --device cpu"
)
CHOICES = [
    "",
    "--bert-no-binary-head --bf16",
    "--normalization RMSNorm --untie-embeddings-and-output-weights --fp64",
    "--position-embedding-type rope --logits-at-once 1000",
    "--attention-dropout 0 --hidden-dropout 0 --fp32-residual-connection --bf16",
    "--seq-length 160",
    "--seq-length 160 --window-size 20,10 --attention-dropout 0",
    "--seq-length 160 --attention-backend unfused --bf16",
]


def config(text: str = "") -> RunConfig:
    return parse(f"{SMALL} {text}".split(), "pretrain_bert").config


@pytest.mark.parametrize("text", CHOICES)
def test_every_parameter_is_the_built_models(text: str) -> None:
    run = config(text)
    model, (stage,) = run.model, run.stages
    built = BertModel(model, Mesh.serial(), vocab_size=100, padded_vocab_size=128)
    planned = list(parameter_shapes.stage_parameters(model, 128, stage))
    parameters = list(built.named_parameters())
    assert [(p.name, p.shape) for p in planned] == [(n, tuple(p.shape)) for n, p in parameters]
    for mine, (name, parameter) in zip(planned, parameters, strict=True):
        record = of(parameter)
        assert mine.traits.decay == record.decay, name
        assert mine.traits.matrix == record.matrix, name
        assert mine.traits.embedding == record.embedding, name


def saved(run: RunConfig, stage: Stage) -> int:
    """Return the bytes that the forward of one microbatch saves in one stage."""
    samples, length = run.training.micro_batch_size, run.data.seq_length
    vocabulary = resolve_vocabulary(run.tokenizer, 100, 1)
    (chunk,) = pretrain_bert.build_model(run, Mesh.serial(), vocabulary, [stage])
    rng.initialize(chunk, 1)
    optimizer = build_optimizer(run.optimizer, [chunk], Mesh.serial(), run.precision)
    known = [x for b in optimizer.data_parallel.buffers for x in (b.data, b.grad)]
    if chunk.rotary is not None:
        known += chunk.rotary(length, None)  # made once for all microbatches
    batch = {name: torch.randint(0, 100, (samples, length)) for name in ("tokens", "labels")}
    batch["token_types"] = torch.randint(0, 2, (samples, length))
    batch["loss_mask"] = torch.ones(samples, length)
    batch["cu_seqlens"] = torch.arange(0, samples + 1, dtype=torch.int32) * length
    if run.model.bert.sentence_order_head:
        batch["sentence_order"] = torch.zeros(samples, dtype=torch.int64)
    x_SBH = None
    if not stage.is_first:
        dtype = getattr(torch, run.residual_dtype)
        x_SBH = torch.randn(length, samples, 64, dtype=dtype).requires_grad_()
    with saved_tensors.counting(known) as meter:
        out = pretrain_bert.forward_step(chunk, batch, x_SBH, DropoutKey(1, 1, 1))
        if stage.is_last:
            out = (out.losses_BS * out.mask_BS.to(out.losses_BS.dtype)).sum(), out
    assert out is not None
    return meter.now


@pytest.mark.parametrize("text", CHOICES)
@pytest.mark.parametrize("part", ["whole", "first", "last"])
def test_planned_bytes_are_those_that_autograd_saves(text: str, part: str) -> None:
    run = config(text)
    stages = {"whole": run.stages[0], "first": Stage(range(2), True, False)}
    stages["last"] = Stage(range(2, 3), False, True)
    planned = activations.footprint(run, 128, stages[part], 2).kept
    # The order of two samples is a few numbers, which are not planned.
    assert planned == pytest.approx(saved(run, stages[part]), rel=0.003)


def test_operations_by_hand() -> None:
    """Each token meets every weight of a matrix, all keys of its sample, and the vocabulary."""
    hidden, length = 64, 64
    layer = 12 * hidden * hidden + 2 * hidden * length
    each = 3 * layer + hidden * hidden + hidden * 128
    found = operations_gpt.flops_per_sample(config().model, length, 128)
    assert found == 6 * each * length


def test_published_size() -> None:
    """BERT base has 110 million parameters (Devlin et al., 2019)."""
    model = config("--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512")
    count = sum(parameter_shapes.parameters_by_kind(model.model, 30522).values())
    # Theirs, by the transformers library, has a norm behind the embedding, this one a last norm.
    assert count == 110_106_428


def test_a_plan_is_of_an_encoder() -> None:
    run = parse(
        f"{SMALL} --dry-run-world-size 4 --tensor-model-parallel-size 2".split(), "pretrain_bert"
    )
    text = report(run, "pretrain_bert")
    assert "causal" not in text and "head of masked words" in text
