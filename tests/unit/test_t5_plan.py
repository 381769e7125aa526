"""An encoder-decoder's flags, and its plan, which is counted from configs alone."""

import pytest
import torch

from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.mesh import Mesh
from megatron.core.models.t5 import T5Model, build_stages
from megatron.core.optimizer import groups
from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun, parse
from megatron.training.config import RunConfig
from megatron.training.plan import buffer_plans, operations, parameter_shapes
from megatron.training.plan.report import report

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --encoder-seq-length 32 "
    "--decoder-seq-length 12 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data "
    "--vocab-size 100"
)
BERT = SMALL.replace("--decoder-seq-length 12", "").replace("--encoder-seq", "--seq")
FOUR = "--dry-run-world-size 4"
RELATIVE = "--position-embedding-type relative"
BOTH = "--num-layers (1) + --decoder-num-layers (1)"
CHOICES = [
    "",
    "--decoder-num-layers 2 --kv-channels 24 --untie-embeddings-and-output-weights",
    f"{RELATIVE} --normalization RMSNorm --relu --disable-bias-linear",
    f"{RELATIVE} --geglu-tanh --untie-embeddings-and-output-weights --decoder-num-layers 5",
]
# As scripts have it: the 220M shape, from public repositories.
OLD_SCRIPT = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 "
    "--ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 "
    "--max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 128 --lr 0.0001 "
    "--train-iters 1000000 --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --vocab-extra-ids 100 "
    "--data-path nowhere --vocab-file bert-vocab.txt --data-impl mmap --split 949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 "
    "--distributed-backend nccl --tensor-model-parallel-size 2"
)
NEW_SCRIPT = OLD_SCRIPT.replace(
    "--num-layers 12", "--encoder-num-layers 12 --decoder-num-layers 12"
).replace("--data-impl mmap", "--tokenizer-type BertWordPieceCase --transformer-impl local")


def parsed(text: str = "", base: str = SMALL, program: str = "pretrain_t5") -> ParsedRun[RunConfig]:
    return parse(f"{base} {text} --dry-run".split(), program)


def refused(text: str, base: str = SMALL, program: str = "pretrain_t5") -> str:
    with pytest.raises(UserError) as error:
        parsed(text, base, program)
    return str(error.value)


@pytest.mark.parametrize("text", CHOICES)
def test_every_parameter_is_the_built_models(text: str) -> None:
    run = parsed(text).config
    model, (stage,) = run.model, run.stages
    built = T5Model(model, Mesh.serial(), vocab_size=100, padded_vocab_size=128)
    planned = [(p.name, p.shape) for p in parameter_shapes.stage_parameters(model, 128, stage)]
    assert planned == [(name, tuple(p.shape)) for name, p in built.named_parameters()]
    total = sum(parameter_shapes.parameters_by_kind(model, 128).values())
    assert total == sum(p.numel() for p in built.parameters())


def test_operations_by_hand() -> None:
    """Multiply-adds of one sample, counted matrix by matrix."""
    run = parsed("--num-layers 2 --decoder-num-layers 1").config
    hidden, inner, s, t = 64, 256, 32, 12
    square, mlp = hidden * hidden, 2 * hidden * inner
    encoder = s * (4 * square + mlp) + 2 * s * s * hidden
    decoder = t * (4 * square + mlp) + t * t * hidden
    cross = (2 * t + 2 * s) * square + 2 * s * t * hidden
    head = t * hidden * 128
    expected = 6 * (2 * encoder + decoder + cross + head)
    assert operations.flops_per_sample(run, 128) == expected
    full = parsed(
        "--num-layers 2 --decoder-num-layers 1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"
    ).config
    again = operations.recomputed_flops_per_sample(full, 128)
    assert again == {"recomputation": 2 * (2 * encoder + decoder + cross)}


@pytest.mark.parametrize("script", [OLD_SCRIPT, NEW_SCRIPT])
def test_scripts_plan(script: str) -> None:
    run = parsed("--dry-run-world-size 8", script)
    config = run.config
    assert (config.model.num_layers, config.model.stacks.decoder_num_layers) == (12, 12)
    assert config.model.position.max_position_embeddings == 512
    kind = "LowerCase" if "--data-impl" in script else "Case"
    assert config.tokenizer.tokenizer_type == f"BertWordPiece{kind}"
    assert config.precision.params_dtype == "float16"
    text = report(run, "pretrain_t5")
    assert "each rank moves" in text and "cross-attention" in text
    assert "activations" in text and "largest micro-batch that fits" in text


@pytest.mark.parametrize("text", CHOICES)
@pytest.mark.parametrize("pipeline", ["", "--num-virtual-stages-per-pipeline-rank 2"])
def test_buffers_of_a_pipeline_are_planned_as_they_are_built(text: str, pipeline: str) -> None:
    words = f"{text} {pipeline} --pipeline-model-parallel-size 2 --dry-run-world-size 2"
    run = parsed(words).config
    for rank in range(2):
        mine = [run.stages[at] for at in run.placement.positions(rank)]
        chunks = build_stages(run.model, Mesh.serial(), mine, vocab_size=100, padded_vocab_size=128)
        built = DataParallel(
            chunks, Mesh.serial(), torch.float32, group_of=groups.grouping(run.optimizer)
        ).buffers
        planned = [plan for plans in buffer_plans.chunk_buffers(run, 128, rank) for plan in plans]
        tied = not run.model.untie_embeddings_and_output_weights
        twin = {"output_layer.weight": parameter_shapes.TOKEN_VECTORS} if tied else {}
        assert [[slot.name for slot in buffer.plan.slots] for buffer in built] == [
            [twin.get(slot.name, slot.name) for slot in plan.slots] for plan in planned
        ]
        assert [buffer.plan.size for buffer in built] == [plan.size for plan in planned]


def test_an_encoder_on_some_ranks_and_a_decoder_on_others() -> None:
    words = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank"
    run = parsed(f"{words} 3 --num-layers 4 --decoder-num-layers 3 --dry-run-world-size 4").config
    assert [len(stage.layers) for stage in run.stages] == [2, 1, 1, 3]
    assert "1 to --pipeline-model-parallel-size (4) - 1" in refused(f"{words} 4 {FOUR}")
    assert "gives 3 rank(s) to the decoder, which has 2" in refused(
        f"{words} 1 --decoder-num-layers 2 {FOUR}"
    )
    assert "keep one" in refused(f"{words} 2 --decoder-last-pipeline-num-layers 1 {FOUR}")
    assert "one stage on each rank" in refused(
        f"{words} 2 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 {FOUR}"
    )
    alone = SMALL.replace("--decoder-seq-length 12", "")
    text = refused(f"{words} 2 --num-layers 8 {FOUR}", alone, "pretrain_gpt")
    assert "there is one stack of layers" in text


def test_layers_follow_one_another() -> None:
    assert parsed().config.model.stacks.decoder_num_layers == 3
    assert parsed("--decoder-num-layers 7").config.model.all_layers == 10
    alone = parsed("", SMALL.replace("--decoder-seq-length 12", ""), "pretrain_gpt").config
    assert not alone.model.has_two_stacks and alone.model.all_layers == 3


def test_heads_need_not_fill_the_hidden_size() -> None:
    assert parsed("--kv-channels 40").config.model.attention.kv_channels == 40


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--group-query-attention", "--group-query-attention"),
        ("--num-experts 4", "--num-experts"),
        ("--position-embedding-type alibi", "--position-embedding-type alibi"),
        ("--window-size 4,4", "--window-size"),
        (
            f"{RELATIVE} --context-parallel-size 2 --cp-comm-type a2a --dry-run-world-size 2",
            "--cp-comm-type a2a",
        ),
        (
            "--context-parallel-size 2 --decoder-seq-length 14 --dry-run-world-size 2",
            "--decoder-seq-length (14)",
        ),
        ("--qk-layernorm", "--qk-layernorm"),
        (f"{RELATIVE} --relative-attention-num-buckets 7", "must be even"),
        (f"{RELATIVE} --relative-attention-max-distance 16", "must be above half"),
        ("--max-position-embeddings 31", "is less than --encoder-seq-length (32)"),
        ("--mtp-num-layers 1", "--mtp-num-layers: an encoder-decoder"),
        ("--encoder-pipeline-model-parallel-size 1", "--pipeline-model-parallel-split-rank"),
        ("--encoder-tensor-model-parallel-size 2", "--tensor-model-parallel-size is of both"),
        ("--decoder-seq-length 40 --max-position-embeddings 32", "--decoder-seq-length (40)"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            f"{BOTH} must be at least 4 = --pipeline-model-parallel-size (2) x "
            "--num-virtual-stages-per-pipeline-rank (2)",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            f"{BOTH} is not divisible by --pipeline-model-parallel-size (2) x",
        ),
        (
            "--decoder-first-pipeline-num-layers 3",
            f"--decoder-first-pipeline-num-layers (3) leaves -1 of {BOTH} for the other",
        ),
        ("--pipeline-model-parallel-layout Ett|tL", f"has 3 t, not {BOTH}"),
    ],
)
def test_layers_of_a_pipeline_are_those_of_both_stacks(text: str, words: str) -> None:
    """A message names both flags: their sum is what nobody gave."""
    layout = "--pipeline-model-parallel-size 2 --dry-run-world-size 2"
    said = refused(f"--num-layers 1 --decoder-num-layers 1 {layout} {text}")
    assert words in said


def test_files_say_which_tokenizer_is_meant() -> None:
    """BERT's word pieces for a vocabulary in lines; a pair is GPT-2's; others need a type."""

    def kind(text: str, program: str = "pretrain_t5") -> str | None:
        base = SMALL if program == "pretrain_t5" else BERT
        return parsed(text, base, program).config.tokenizer.tokenizer_type

    for program in ("pretrain_t5", "pretrain_bert"):
        base = SMALL if program == "pretrain_t5" else BERT
        for text in ("", "--vocab-file v.txt", "--vocab-file bert-vocab"):
            assert kind(text, program) == "BertWordPieceLowerCase"
        assert kind("--vocab-file v.json --merge-file m.txt", program) == "GPT2BPETokenizer"
        said = refused("--vocab-file v.json", base, program)
        for part in ("--vocab-file v.json alone", "--merge-file", "--tokenizer-model v.json"):
            assert part in said
        said = refused("--tokenizer-model spiece.model", base, program)
        assert "without --tokenizer-type" in said and "SentencePieceTokenizer" in said
        named = "--tokenizer-type BertWordPieceCase --vocab-file odd.json"
        assert kind(named, program) == "BertWordPieceCase"


def test_programs_are_told_apart() -> None:
    alone = SMALL.replace("--decoder-seq-length 12", "")
    assert "give --decoder-seq-length" in refused("", alone)
    assert "give --decoder-seq-length" in refused(RELATIVE, alone)
    assert "which pretrain_t5.py trains" in refused("", SMALL, "pretrain_gpt")
    text = refused("--decoder-num-layers 2", alone, "pretrain_gpt")
    assert "--decoder-num-layers (2)" in text
    assert "for an encoder-decoder" in refused(RELATIVE, alone, "pretrain_gpt")


def test_a_missing_length_is_called_as_users_of_the_program_call_it() -> None:
    missing = SMALL.replace("--encoder-seq-length 32", "")
    assert refused("", missing) == "required but not given: --encoder-seq-length"
    alone = missing.replace("--decoder-seq-length 12", "")
    assert refused("", alone, "pretrain_gpt") == "required but not given: --seq-length"


def test_settings_of_other_positions_are_named() -> None:
    run = parsed("--relative-attention-num-buckets 16")
    assert any("--relative-attention-num-buckets" in note for note in run.no_effect)


def test_a_plan_refuses_fewer_rows_than_the_tokenizer_has_ids() -> None:
    """As the run does: 256 bytes, two special tokens and 16 marks."""
    words = f"{SMALL} --tokenizer-type ByteLevelTokenizer --vocab-extra-ids 16 --dry-run".split()
    with pytest.raises(UserError, match=r"has 27\d ids but the model's vocabulary has 100 rows"):
        report(parse(words, program="pretrain_t5"), "pretrain_t5")
