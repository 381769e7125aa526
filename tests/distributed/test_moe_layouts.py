"""A mixture of experts on every layout is the serial one: losses, norms, gradients, weights."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import parse
from megatron.training.program import Program
from megatron.training.verification import equality, outcomes
from megatron.training.verification.outcomes import Outcome
from megatron.training.verification.small_run import VOCABULARY
from tests import deepep_stand_in
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics
from tools.verify_layout import closed_form

IDS, ITERATIONS = VOCABULARY, 2
# Epsilon is far above rounding, or Adam would make steps of it.
BASE = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-2 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {IDS - 1} --make-vocab-size-divisible-by 8 "
    "--attention-dropout 0 --hidden-dropout 0 --fp64 --init-method-std 0.2 --device cpu "
    "--adam-eps 1e-3 --num-experts 8 --moe-ffn-hidden-size 20"
)
SIGMOID = (
    "--moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 1.5 --moe-router-load-balancing-type none "
    "--moe-n-hash-layers 1 --swiglu"
)
BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
VARIANTS = {
    "plain": "--moe-router-topk 2 --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.05",
    "rich": (
        "--position-embedding-type rope --untie-embeddings-and-output-weights --swiglu "
        "--normalization RMSNorm --disable-bias-linear --group-query-attention "
        "--num-query-groups 2 --no-calculate-per-token-loss --moe-router-topk 3 "
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 0.2 0.3 --moe-layer-freq [0]+[1]*3 "
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
    ),
    "biased": SIGMOID,
    "ahead": (
        "--position-embedding-type rope --moe-router-topk 2 --moe-aux-loss-coeff 0.3 "
        "--mtp-num-layers 2 --eod-mask-loss --moe-shared-expert-intermediate-size 12"
    ),
    "latent": (
        "--moe-latent-size 10 --moe-router-topk 2 --moe-aux-loss-coeff 0.3 --swiglu "
        "--moe-shared-expert-intermediate-size 12"
    ),
}
FURTHER = {"plain": 2, "rich": 2, "biased": 0, "ahead": 3, "latent": 1}
"""Auxiliary losses of each."""
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
CHECKED = "--check-weight-hash-across-dp-replicas-interval 1"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
A2A, FLEX = (f"--moe-token-dispatcher-type {kind}" for kind in ("alltoall", "flex"))
INSTANCES = "--num-distributed-optimizer-instances 2"
LAYOUTS = [
    (2, f"{EP} 2"),
    (2, f"{EP} 2 {A2A}"),
    (2, f"{TP} 2"),
    (2, f"{TP} 2 {ETP} 1 {EP} 2 {A2A}"),
    (2, f"{TP} 2 {ETP} 1 --sequence-parallel"),
    (2, f"{ETP} 2 {A2A}"),
    (4, f"{TP} 2 --sequence-parallel {EP} 2"),
    (4, f"{TP} 2 --sequence-parallel {EP} 2 {A2A}"),
    (4, f"{PP} 2 {EP} 2 {A2A}"),
    (4, f"{CP} 2 {EP} 4 {A2A}"),
    (4, f"{EP} 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    (4, f"{EP} 2 {A2A} --use-megatron-fsdp"),
    (4, f"{EP} 4 {A2A} --use-megatron-fsdp"),
    (4, f"{EP} 2 {A2A} --data-parallel-sharding-strategy optim_grads"),
    (4, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 {EP} 2 {A2A}"),
    (4, f"{PP} 2 --pipeline-schedule zb-h1 {EP} 2 {A2A}"),
    (4, f"{PP} 2 --pipeline-schedule zb-v {EP} 2"),
    (4, f"{TP} 4 {ETP} 2 {EP} 2 {A2A}"),
    (4, f"{TP} 4 {ETP} 2 {EP} 2 --sequence-parallel --moe-grouped-gemm"),
    (4, f"{TP} 2 {CP} 2 {EP} 2 {A2A}"),
    (2, f"{EP} 2 {A2A} --recompute-granularity selective --recompute-modules moe layernorm"),
    (2, f"{EP} 2 --recompute-granularity selective --recompute-modules moe_act core_attn"),
    (
        2,
        f"{TP} 2 {A2A} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2",
    ),
    (
        2,
        f"{EP} 2 {A2A} --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act "
        "--min-offloaded-tensor-size 1",
    ),
    (8, f"{TP} 2 --sequence-parallel {PP} 2 {EP} 4 {ETP} 1 {A2A} --use-distributed-optimizer"),
    (2, f"{EP} 2 {A2A} --moe-permute-fusion"),
    (4, f"{TP} 2 {EP} 2 {ETP} 2 {FLEX} --moe-permute-fusion"),
    (4, f"{EP} 4 {FLEX} --recompute-granularity selective --recompute-modules moe"),
    (2, f"{EP} 2 --moe-permute-fusion"),
    (8, f"{TP} 2 {CP} 2 {PP} 2 {EP} 2 {ETP} 2 --use-tp-pp-dp-mapping {A2A}"),
    (4, f"{TP} 2 --sequence-parallel {EP} 2 {A2A} --moe-router-fusion"),
    (4, f"{EP} 2 {A2A} --use-distributed-optimizer {INSTANCES}"),
    (
        8,
        f"{TP} 2 --sequence-parallel {ETP} 1 {EP} 2 --data-parallel-sharding-strategy optim_grads "
        f"--overlap-grad-reduce {INSTANCES}",
    ),
    (8, f"{TP} 2 {ETP} 1 {EP} 2 {A2A} --use-megatron-fsdp {INSTANCES}"),
    (8, f"{TP} 2 {EP} 4 {A2A} --overlap-grad-reduce --ddp-bucket-size 900"),
    (4, f"{CP} 2 {PP} 2 --num-virtual-stages-per-pipeline-rank 2 {EP} 2 {A2A}"),
    (
        16,
        f"{TP} 2 --sequence-parallel {CP} 2 {PP} 2 {EP} 2 {ETP} 2 {A2A} "
        "--use-distributed-optimizer --moe-permute-fusion",
    ),
    (
        16,
        f"{TP} 2 {PP} 2 --num-virtual-stages-per-pipeline-rank 2 {EP} 4 {ETP} 1 {A2A} "
        "--data-parallel-sharding-strategy optim_grads --overlap-grad-reduce",
    ),
]
USUAL = (0, 3, 7, 8, 11, 15, 20)
"""Numbers of the layouts that every run of the tests tries."""


def model_by_stand_in(*arguments: Any) -> list[GPTModel]:
    """Build the model where the package of --moe-token-dispatcher-type flex is a stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        deepep_stand_in.install(patch)
        chunks = pretrain_gpt.build_model(*arguments)
    # It is imported when the first tokens are there.
    sys.modules["deep_ep"] = SimpleNamespace(Buffer=deepep_stand_in.Buffer)  # type: ignore[assignment]
    return chunks


def outcome(pool: Pool, world: int, words: str) -> tuple[Outcome, list[outcomes.Traffic]]:
    """Return what came out of a layout, and what its ranks should have moved."""
    run = parse(f"{BASE} {words} --dry-run --dry-run-world-size {world}".split()).config
    if FLEX in words:  # which stands for alltoall on the CPU
        moe = replace(run.model.moe, moe_token_dispatcher_type="flex")
        run = replace(run, model=replace(run.model, moe=moe))
    program = Program(
        build_model=model_by_stand_in if FLEX in words else pretrain_gpt.build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    case = equality.Case(config=run, program=program, vocabulary=IDS)
    return equality.run(pool, case), closed_form(run)


@pytest.fixture(scope="module", params=VARIANTS)
def serial(request: pytest.FixtureRequest, pool: Pool) -> tuple[str, Outcome]:
    return request.param, outcome(pool, 1, VARIANTS[request.param])[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(*layout, marks=() if number in USUAL else pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_equals_the_serial_run(
    pool: Pool, serial: tuple[str, Outcome], world: int, layout: str
) -> None:
    variant, expected = serial
    found, moved = outcome(pool, world, f"{VARIANTS[variant]} {layout}")
    # Losses of routers are compared, too.
    assert len(found.losses) == (1 + FURTHER[variant]) * ITERATIONS
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


GRADS, WEIGHTS = (
    f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params")
)


@pytest.mark.parametrize(
    ("variant", "world", "layout"),
    [
        ("plain", 4, f"{EP} 2 {A2A} {GRADS}"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("plain", 4, f"{EP} 2 {A2A} {GRADS} --overlap-grad-reduce"),
                ("rich", 4, f"{EP} 2 {A2A} {WEIGHTS} --overlap-grad-reduce"),
                ("plain", 4, f"{EP} 2 --use-megatron-fsdp"),
                ("ahead", 4, f"{EP} 2 {A2A} {GRADS}"),
                ("plain", 8, f"{PP} 2 --pipeline-schedule zb-v {EP} 2 {A2A} {GRADS}"),
                (
                    "rich",
                    8,
                    f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 {EP} 2 {A2A} {WEIGHTS}",
                ),
            )
        ),
    ],
)
def test_experts_alone_in_their_instance_are_summed_once(
    pool: Pool, variant: str, world: int, layout: str
) -> None:
    """Dense layers share gradients out, microbatch by microbatch; experts share nothing."""
    words = f"{VARIANTS[variant]} --micro-batch-size 1"
    expected, _ = outcome(pool, 1, words)
    found, moved = outcome(pool, world, f"{words} {layout} {INSTANCES}")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


BUCKETS = f"--use-distributed-optimizer {A2A} --ddp-num-buckets 3"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, f"{EP} 2 {BUCKETS}"),
        (2, f"{CP} 2 {EP} 2 {BUCKETS} {OVERLAP}"),
        pytest.param(4, f"{EP} 2 {BUCKETS} {OVERLAP} {INSTANCES}", marks=pytest.mark.slow),
        pytest.param(4, f"{PP} 2 {EP} 2 {BUCKETS} {OVERLAP}", marks=pytest.mark.slow),
        pytest.param(4, f"{EP} 4 {BUCKETS} --optimizer muon", marks=pytest.mark.slow),
    ],
)
def test_experts_with_one_replica_gather_no_weights_in_several_buckets(
    pool: Pool, world: int, layout: str
) -> None:
    """Dense layers share the update of each bucket out; experts' buckets are one rank's own."""
    words = f"{VARIANTS['plain']} --micro-batch-size 1"
    muon = " --optimizer muon" if "muon" in layout else ""
    expected, _ = outcome(pool, 1, words + muon)
    found, moved = outcome(pool, world, f"{words} {layout}")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


MUON = "--optimizer muon --muon-nesterov"


@pytest.mark.parametrize(
    ("variant", "world", "layout"),
    [
        ("rich", 4, f"{ETP} 2 {EP} 2 {A2A}"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("plain", 4, f"{TP} 2 {EP} 2 --use-distributed-optimizer"),
                ("rich", 4, f"{TP} 2 --sequence-parallel {EP} 2 --muon-tp-mode distributed"),
                (
                    "rich",
                    8,
                    f"{PP} 2 {EP} 2 {A2A} --use-distributed-optimizer --ddp-bucket-size 900",
                ),
                ("biased", 4, f"{EP} 2 {A2A} --use-megatron-fsdp"),
                (
                    "plain",
                    8,
                    f"{TP} 2 {EP} 2 {A2A} --use-megatron-fsdp --muon-tp-mode distributed",
                ),
            )
        ),
    ],
)
def test_muon_makes_the_matrix_of_each_expert_orthogonal(
    pool: Pool, variant: str, world: int, layout: str
) -> None:
    words = f"{VARIANTS[variant]} {MUON}"
    serial, _ = outcome(pool, 1, words)
    found, moved = outcome(pool, world, f"{words} {layout}")
    apart = outcomes.compare(found, serial)
    assert apart.are_equal, apart
    assert found.traffic == moved


@pytest.mark.parametrize("more", ["", f"{A2A} --moe-shared-expert-overlap"])
def test_shared_experts_are_made_again_once_where_all_experts_are(pool: Pool, more: str) -> None:
    words = VARIANTS["ahead"]
    expected, _ = outcome(pool, 1, words)
    again = "--recompute-granularity selective --recompute-modules shared_experts moe"
    found, moved = outcome(pool, 2, f"{words} {TP} 2 {again} {more}")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


def test_positions_that_do_not_divide_are_filled_up(pool: Pool) -> None:
    """Ranks along tp route shares of 15 positions: one of them has 7."""
    words = f"{VARIANTS['plain']} --seq-length 15"
    expected, _ = outcome(pool, 1, words)
    found, moved = outcome(pool, 2, f"{words} {TP} 2 {A2A}")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    assert found.traffic == moved


def test_ckpt_02_runs_log_save_and_go_on_with_experts_elsewhere(pool: Pool, tmp_path: Path) -> None:
    words = f"{BASE} {VARIANTS['rich']} {BIASED} --train-iters 4 --eval-interval 2 --eval-iters 1"
    words += " --moe-latent-size 14"
    given = f"{words} --log-interval 1 --num-workers 0 --metrics-file metrics.jsonl --save save"

    def train(folder: str, world: int, more: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        arguments = f"{given} {more}".split()
        ended = launch(pool, world, "pretrain_gpt", *arguments, folder=tmp_path / folder)
        assert [one.code for one in ended] == [0] * world, ended[0].err
        return ended[0].out

    printed = train("whole", 1, "")
    assert printed.count("| seq_load_balancing_loss: ") == 4
    train("parts", 4, f"{PP} 4 --use-distributed-optimizer --exit-interval 1")
    for world, layout, stop in (
        (4, f"{EP} 2 {A2A} --use-megatron-fsdp {INSTANCES} {CHECKED}", 2),
        (4, f"{TP} 2 {ETP} 1 {EP} 4 --sequence-parallel {CHECKED}", 3),
        (1, "", 4),
    ):
        printed = train("parts", world, f"{layout} --load save --exit-interval {stop}")
        assert "weights loaded, optimizer loaded" in printed
    expected = metrics(tmp_path / "whole" / "metrics.jsonl")
    assert {"lm_loss", "global_load_balancing_loss"} <= expected[0].keys()
    assert_rows_equal(metrics(tmp_path / "parts" / "metrics.jsonl"), expected)
    with Checkpoint(tmp_path / "parts" / "save" / "iter_0000004") as checkpoint:
        stored = checkpoint.tensors["model.decoder.layers.1.mlp.experts.linear_fc1.weight"]
        assert stored.shape == (8, 40, 14)
        stored = checkpoint.tensors["model.decoder.layers.1.mlp.fc2_latent_proj.weight"]
        assert stored.shape == (24, 14)
        assert "model.decoder.layers.1.mlp.router.expert_bias" in checkpoint.tensors
    asked = "--load save --device cpu --max-new-tokens 3 --temperature 0 --prompt".split()
    texts = []
    for world, layout in ((1, ""), (2, f"{TP} 2")):
        ended = launch(
            pool,
            world,
            "tools.generate_text",
            *asked,
            "1 2",
            *layout.split(),
            folder=tmp_path / "parts",
        )
        assert ended[0].code == 0, ended[0].err
        texts.append(ended[0].out.splitlines()[-1])
    assert texts[0] == texts[1] and len(texts[0].split()) == 5
