"""Upcycling goes with routers whose weights have one sum, and whose slices stay together."""

import pytest

from megatron.core.config import as_json
from megatron.training.arguments import parse
from tests.unit.test_rules import DRY, plan, refused

DENSE = "--moe-use-upcycling --load dense"
EXPERTS = f"{DENSE} --num-experts 8"
SLICES = "--moe-router-topk 4 --moe-upcycling-granularity 2"
SLICED = f"{EXPERTS} {SLICES} --moe-ffn-hidden-size 48"
SIGMOID = "--moe-router-score-function sigmoid"
GROUPS = "--moe-router-num-groups"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (DENSE, "give --num-experts"),
        ("--moe-use-upcycling --num-experts 4", "--pretrained-checkpoint"),
        (f"{EXPERTS} --moe-upcycling-granularity 0", "--moe-upcycling-granularity"),
        (f"{EXPERTS} --moe-latent-size 8", "leave --moe-latent-size out"),
        (f"{EXPERTS} --moe-shared-expert-intermediate-size 8", "exclude each other"),
        (f"{EXPERTS} --moe-router-pre-softmax", "leave it out"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "choose aux_loss"),
        (f"{EXPERTS} {SIGMOID} --moe-router-topk 1", "of at least 2"),
        (f"{EXPERTS} {SLICES} --ffn-hidden-size 96", "give --moe-ffn-hidden-size, the dense"),
        (f"{SLICED} --moe-router-topk 3", "--moe-router-topk (3) must be a multiple"),
        (f"{SLICED} --num-experts 9", "--num-experts (9) must be a multiple"),
        (f"{SLICED} {GROUPS} 8 --moe-router-group-topk 4", "groups (1) must be a multiple"),
        (f"{SLICED} --moe-n-hash-layers 1", "drop one of them"),
        (f"{SLICED} --moe-router-force-load-balancing", "drop one of them"),
    ],
)
def test_routers_whose_outputs_would_differ_are_refused(words: str, said: str) -> None:
    assert said in refused(words)


@pytest.mark.parametrize(
    "words",
    [
        EXPERTS,
        SLICED,
        f"{EXPERTS} --moe-router-pre-softmax --moe-router-topk 8",
        f"{SLICED} {SIGMOID} {GROUPS} 4 --moe-router-group-topk 4",
        f"{EXPERTS} --moe-n-hash-layers 1",
    ],
)
def test_others_are_planned(words: str) -> None:
    plan(words)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (EXPERTS, False),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.25", True),
        (f"{EXPERTS} --moe-expert-capacity-factor 3.9", True),
        # Every token of a microbatch finds room in any of 8 experts, of which it visits 2.
        (f"{EXPERTS} --moe-expert-capacity-factor 4", False),
        (f"{EXPERTS} --moe-expert-capacity-factor -1", False),
        ("--num-experts 8 --moe-expert-capacity-factor 1.25", False),
    ],
)
def test_dropped_choices_are_a_warning(words: str, warned: bool) -> None:
    found = [note for note in plan(words).reports if "--moe-expert-capacity-factor" in note]
    assert len(found) == warned
    assert not warned or ("warning" in found[0] and "4 or more" in found[0])


def test_a_granularity_alone_has_no_effect() -> None:
    lines = plan("--num-experts 4 --moe-upcycling-granularity 2").lines()
    assert any("--moe-upcycling-granularity" in line for line in lines)


def test_the_checkpoint_gives_the_dense_model_and_the_run_its_experts() -> None:
    dense = plan("--ffn-hidden-size 96 --swiglu").config.flatten()
    words = f"{DRY} {EXPERTS} --use-checkpoint-args".split()
    config = parse(words, stored_config=lambda folder, step: as_json(dense)).config
    assert config.model.moe.num_experts == 8 and config.model.mlp.swiglu
    assert config.model.moe.moe_ffn_hidden_size == 96
