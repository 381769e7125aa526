"""Settings that change nothing are named, each with the reason."""

import pytest

from megatron.training.arguments import parse
from megatron.training.config import RunConfig

BASE = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 50 --micro-batch-size 1 --train-iters 3 --lr 1e-2"
)
FULL = "--recompute-granularity full --recompute-method block --recompute-num-layers"


def notes(words: str) -> list[str]:
    return list(parse(f"{BASE} {words}".split(), RunConfig).no_effect)


@pytest.mark.parametrize(
    ("words", "named", "why"),
    [
        ("--apply-wd-to-qk-layernorm", 1, "no --qk-layernorm"),
        ("--lr-warmup-init 1e-3", 1, "no --lr-warmup-iters, -samples or -fraction"),
        ("--log-memory-to-tensorboard", 1, "no --tensorboard-dir and no --wandb-project"),
        ("--log-validation-ppl-to-tensorboard", 1, "no --tensorboard-dir and no --wandb-project"),
        ("--tensorboard-queue-size 5", 1, "no --tensorboard-dir"),
        ("--wandb-exp-name a", 1, "no --wandb-project"),
        ("--bf16 --use-precision-aware-optimizer", 1, "every dtype it chooses is fp32"),
        ("--check-weight-hash-across-dp-replicas-interval 1", 1, "there is one process"),
        ("--bf16 --grad-reduce-in-bf16", 1, "there is one replica"),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0",
            1,
            "--optimizer-offload-fraction is 0",
        ),
        ("--moe-router-topk 3 --moe-aux-loss-coeff 0.1", 2, "no --num-experts"),
        ("--num-experts 4 --moe-token-drop-policy position", 1, "no --moe-expert-capacity-factor"),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1",
            1,
            "no --moe-router-enable-expert-bias",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss",
            1,
            "--moe-aux-loss-coeff is 0",
        ),
        (
            "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 2",
            2,
            "a token may use every group",
        ),
        (
            "--num-experts 4 --moe-layer-freq [0,1,1] --moe-n-hash-layers 1",
            1,
            "the first layer has no experts; dense layers count",
        ),
        (
            "--num-experts 4 --moe-layer-freq [0,0,1] --moe-n-hash-layers 2",
            1,
            "the first 2 layers have no experts; dense layers count",
        ),
        (
            "--num-experts 4 --moe-layer-freq [1,1,0] --moe-n-hash-layers 2 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-bias-update-rate 0.1 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 "
            "--moe-router-load-balancing-type seq_aux_loss --moe-router-num-groups 2 "
            "--moe-router-group-topk 1",
            6,
            "--moe-n-hash-layers 2: every choice follows from the token's id",
        ),
        ("--no-save-optim --no-save-rng --exit-on-failed-save", 3, "no --save"),
        ("--save-interval 3 --save-keep-last 2", 2, "no --save"),
        ("--no-verify-integrity --dist-ckpt-strictness log_all", 2, "no --load"),
        ("--use-checkpoint-opt_param-scheduler", 1, "no --load"),
        ("--override-opt_param-scheduler", 1, "no --load"),
        (
            "--override-opt_param-scheduler --finetune --load x",
            1,
            "--finetune starts a schedule of its own",
        ),
        (
            "--weight-decay 0.5 --weight-decay-incr-style linear --start-weight-decay 0.1 "
            "--end-weight-decay 0.2",
            1,
            "--start-weight-decay and --end-weight-decay stand for it",
        ),
        ("--min-lr 1e-3 --lr-decay-style constant", 1, "--lr-decay-style is constant"),
        ("--async-save --no-ckpt-fully-parallel-save", 2, "no --save"),
        ("--save s --async-ckpt-io-priority 2 --async-save-host-gib 3", 2, "no --async-save"),
        (
            "--save s --async-save --async-save-host-gib 0 --async-ckpt-cpu-priority 3",
            1,
            "--async-save-host-gib 0 leaves nothing to the background",
        ),
        (f"{FULL} 0", 2, "--recompute-num-layers 0 takes no layer"),
        (
            "--dry-run-world-size 2 --dry-run --use-megatron-fsdp "
            "--data-parallel-sharding-strategy no_shard",
            1,
            "--data-parallel-sharding-strategy is no_shard",
        ),
        (
            "--fp16 --skip-train --optimizer muon --clip-grad 2 --decoupled-lr 0.1 "
            "--log-num-zeros-in-grad --param-group-overrides *.mlp.*:lr_mult=2 "
            "--skip-non-finite-iterations 3 --eval-interval 2 --hysteresis 3 --min-lr 1e-4",
            9,
            "--skip-train",
        ),
    ],
)
def test_settings_without_effect_are_named(words: str, named: int, why: str) -> None:
    assert sum(note.endswith(f" ({why})") for note in notes(words)) == named, notes(words)


@pytest.mark.parametrize(
    "words",
    [
        "--qk-layernorm --apply-wd-to-qk-layernorm",
        "--lr-warmup-iters 2 --lr-warmup-init 1e-3",
        "--tensorboard-dir t --log-memory-to-tensorboard --tensorboard-queue-size 5",
        "--save s --no-save-optim --no-save-rng --exit-on-failed-save --save-interval 2",
        "--save s --async-save --async-save-host-gib 1 --async-ckpt-cpu-priority 3",
        "--load s --no-verify-integrity --override-opt_param-scheduler",
        "--min-lr 1e-3 --lr-decay-style cosine",
        f"{FULL} 1",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "--weight-decay 0.5",
        "--num-experts 4 --moe-n-hash-layers 2 --moe-aux-loss-coeff 0.1",
    ],
)
def test_settings_with_effect_are_not(words: str) -> None:
    assert not notes(words)
