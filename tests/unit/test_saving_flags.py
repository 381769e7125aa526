"""Flags of recomputation and offload: what they mean, what is refused, what has no effect."""

import re

import pytest

from megatron.core.utils import UserError
from megatron.training.arguments import ParsedRun, parse
from megatron.training.checkpoints import settings
from megatron.training.config import RunConfig
from megatron.training.plan import operations_gpt
from megatron.training.plan.report import report

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100"
)
LATENT = "--multi-latent-attention --position-embedding-type rope"
TP2 = "--dry-run --dry-run-world-size 2 --tensor-model-parallel-size 2"
PP2 = "--dry-run --dry-run-world-size 2 --pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
FINE = "--fine-grained-activation-offloading --offload-modules"


def run(text: str) -> ParsedRun[RunConfig]:
    return parse(f"{BASE} {text}".split())


@pytest.mark.parametrize(
    ("text", "granularity", "modules"),
    [
        ("", None, ()),
        ("--recompute-activations", "selective", ("core_attn",)),
        (f"--recompute-activations {SELECTIVE}", "selective", ("core_attn",)),
        (f"{SELECTIVE} --recompute-modules mlp layernorm", "selective", ("mlp", "layernorm")),
        (FULL, "full", ()),
        (f"{FULL} --recompute-modules mlp", "full", ()),
        ("--recompute-modules mlp", None, ()),
    ],
)
def test_what_is_recomputed(text: str, granularity: str | None, modules: tuple[str, ...]) -> None:
    recompute = run(text).config.model.recompute
    assert (recompute.granularity, recompute.modules) == (granularity, modules)


@pytest.mark.parametrize(
    ("old", "method", "count"),
    [
        ("--checkpoint-activations", "uniform", 1),
        ("--checkpoint-activations --checkpoint-num-layers 3", "uniform", 3),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", "block", 2),
        ("--activations-checkpoint-method uniform", "uniform", 1),
        (
            "--checkpoint-activations --deepspeed-activation-checkpointing --partition-activations",
            "uniform",
            1,
        ),
    ],
)
def test_old_spellings_mean_whole_layers(old: str, method: str, count: int) -> None:
    recompute = run(old).config.model.recompute
    assert recompute.granularity == "full"
    assert (recompute.recompute_method, recompute.recompute_num_layers) == (method, count)


def test_old_spellings_give_way_to_new_ones() -> None:
    recompute = run(f"--checkpoint-activations {FULL.replace('uniform', 'block')}").config.model
    assert recompute.recompute.recompute_method == "block"
    words = f"{TP2} {FULL} --distribute-checkpointed-activations"
    assert run(words).config.model.recompute.distribute_saved_activations


REFUSED = {
    "--recompute-activations --recompute-granularity full": "asks for --recompute-granularity "
    "selective, not full; drop one",
    "--recompute-granularity full --recompute-num-layers 1": "needs --recompute-method: uniform",
    "--recompute-granularity full --recompute-method block": "needs --recompute-num-layers",
    f"{FULL} --recompute-num-layers 0": "(0): a unit has at least 1 layer; with --recompute-method "
    "block 0 recomputes none",
    f"{FULL} --recompute-num-layers -1": "--recompute-num-layers (-1) must not be negative",
    f"{SELECTIVE} --recompute-method uniform": "--recompute-method (uniform) is for whole layers",
    f"{SELECTIVE} --recompute-num-layers 2": "--recompute-num-layers (2) is for whole layers",
    f"{SELECTIVE} --recompute-modules moe mlp": "--recompute-modules moe: parts of experts, but "
    "the model is dense; leave them out",
    f"{SELECTIVE} --recompute-modules mla_up_proj": "is for --multi-latent-attention; drop it",
    f"{SELECTIVE} --recompute-modules attention": "is one of core_attn, layernorm, mla_up_proj",
    f"{TP2} {SELECTIVE} --distribute-saved-activations": "give --recompute-granularity full",
    f"{FULL} --distribute-saved-activations": "give --tensor-model-parallel-size above 1",
    f"{TP2} --sequence-parallel {FULL} --distribute-saved-activations": "exclude each other: with "
    "the latter each rank holds its share",
    "--cpu-offloading-num-layers 4": "(4) must be less than --num-layers (4)",
    "--cpu-offloading-num-layers -1": "must not be negative",
    f"--cpu-offloading-num-layers 2 {SELECTIVE}": "and --recompute-granularity selective exclude "
    "each other",
    f"{PP2} --cpu-offloading-num-layers 2": "does not go with --pipeline-model-parallel-size (2)",
    f"--cpu-offloading-num-layers 2 {FINE} core_attn": "moves whole layers, "
    "--fine-grained-activation-offloading parts of every layer; drop one",
    "--fine-grained-activation-offloading": "needs --offload-modules",
    f"{FINE} attn_proj": "add core_attn",
    f"{FINE} expert_fc1 core_attn": "--offload-modules expert_fc1: parts of experts",
    f"{FINE} layer_input": "is what --recompute-granularity full keeps",
    f"{FULL} {FINE} layer_input mlp_norm": "--offload-modules mlp_norm: with "
    "--recompute-granularity full a layer keeps its input alone",
    f"{FINE} core_attn --recompute-activations": "--offload-modules core_attn and "
    "--recompute-modules core_attn take the same activations; drop one",
    f"{LATENT} {FINE} core_attn {SELECTIVE} --recompute-modules mla_up_proj": "--recompute-modules "
    "mla_up_proj take the same",
    f"{FINE} qkv_linear {SELECTIVE} --recompute-modules layernorm": "take the same activations",
    f"{FINE} core_attn --activation-offload-fraction 0.5": "name fewer --offload-modules",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_go_together_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(UserError) as caught:
        run(text)
    assert REFUSED[text] in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"{LATENT} {SELECTIVE} --recompute-modules mla_up_proj layernorm mlp {FINE} attn_norm",
        f"{FULL} {FINE} layer_input",
        f"{PP2} {FINE} core_attn attn_proj",
        f"{FINE} core_attn --activation-offload-fraction 1",
        f"--dry-run --num-experts 8 {SELECTIVE} --recompute-modules moe_act {FINE} expert_fc1",
    ],
)
def test_what_goes_together(text: str) -> None:
    assert run(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--recompute-method uniform", "no --recompute-granularity"),
        ("--recompute-num-layers 2", "no --recompute-granularity"),
        ("--recompute-modules mlp core_attn", "no --recompute-granularity"),
        (f"--recompute-modules mlp {FULL}", "--recompute-granularity full takes whole layers"),
        ("--offload-modules core_attn", "no --fine-grained-activation-offloading"),
        ("--min-offloaded-tensor-size 7", "nothing is offloaded"),
        (f"{FULL} --skip-train", "--skip-train"),
    ],
)
def test_settings_without_effect_are_named(text: str, reason: str) -> None:
    notes = " ".join(run(text).lines())
    assert f"{text.split()[0]} ({reason})" in notes


def test_a_plan_lists_what_is_made_again_and_what_waits_in_the_host() -> None:
    text = report(run(f"--dry-run {FULL} {FINE} layer_input --min-offloaded-tensor-size 1"), "test")
    table = text.splitlines()[text.splitlines().index("memory per rank:") + 1 :]
    header, sizes = (re.split(r"\s{2,}", line.strip()) for line in table[:2])
    # 4 inputs of 64 tokens with 64 channels in fp32
    assert dict(zip(header, sizes, strict=True))["host"] == "64.00 KiB"
    assert "more (--recompute-granularity 32.1%), which no log counts" in text
    small = report(run("--dry-run --cpu-offloading-num-layers 2"), "test")
    assert "activations are not offloaded: none has the elements of --min-offload" in small
    assert "are not offloaded" not in text
    pieces = report(run("--dry-run --logits-at-once 100"), "test")
    assert "the head's logits, which are not kept but made in pieces (--logits-at-once)" in pieces
    plain = report(run("--dry-run"), "test")
    assert "host" not in plain and "which no log counts" not in plain


def again(words: str) -> float:
    """Return the multiply-adds for a token that are made again."""
    config = run(words).config
    parts = operations_gpt.recomputed_flops_per_sample(config, 128)
    return sum(parts.values()) / 2 / config.data.seq_length


def test_operations_that_are_made_again_by_hand() -> None:
    """64 channels; attention's products with half of 32 positions, and an MLP of 256 channels."""
    projections, core, mlp = 4 * 64 * 64, 2 * 64 * 16, 2 * 64 * 256
    layer = projections + core + mlp
    assert again("") == 0
    assert again(FULL) == again(f"{PP2} {FULL}") == 4 * layer
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    assert again(block) == layer and again(f"{PP2} {block}") == 2 * layer
    assert again("--recompute-activations") == 4 * core
    assert again(f"{SELECTIVE} --recompute-modules mlp layernorm core_attn") == 4 * (core + mlp)
    ahead = "--mtp-num-layers 2 --position-embedding-type rope"
    joins = 3 * 64 + 2 * 64 * 64
    assert again(f"{FULL} {ahead}") == 6 * layer + 2 * joins
    assert again(f"{block} {ahead}") == layer
    assert again("--logits-at-once 100") == 64 * 128
    sizes = (
        "--q-lora-rank 8 --kv-lora-rank 6 --qk-head-dim 5 --qk-pos-emb-head-dim 4 --v-head-dim 3"
    )
    up = 8 * 4 * 9 + 6 * 4 * 8
    words = f"{LATENT} {sizes} {SELECTIVE} --recompute-modules mla_up_proj"
    assert again(words) == 4 * up
    assert again(f"{words} core_attn") == 4 * (up + 4 * (9 + 3) * 16)


def test_throughput_counts_no_operation_twice() -> None:
    model = run(FULL).config.model
    plain = run("").config.model
    assert operations_gpt.flops_per_sample(model, 32, 128) == operations_gpt.flops_per_sample(
        plain, 32, 128
    )


def test_a_checkpoint_does_not_decide_what_is_kept() -> None:
    model = run("").config.model
    chosen = {*model.recompute.flatten(), *model.offload.flatten()}
    assert not chosen & {*settings.architecture(), *settings.adopted()}
