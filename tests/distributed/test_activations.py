"""What ranks of a layout keep: planned bytes against what autograd saves while they run."""

from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.core import rng, saved_tensors
from megatron.core.mesh import Mesh
from megatron.core.models import language_model
from megatron.core.models.mtp import Ahead
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.cross_entropy import cross_entropy
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training.arguments import parse
from megatron.training.build import build_run_optimizer
from megatron.training.config import RunConfig
from megatron.training.plan import activations
from megatron.training.plan.memory import MemoryPlan
from megatron.training.processes import setup
from megatron.training.program import Program
from megatron.training.verification import equality
from megatron.training.verification.equality import Case
from tests.harness import Pool

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 96 --micro-batch-size 2 "
    "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--device cpu --dry-run"
)
ROPE = "--position-embedding-type rope --group-query-attention --num-query-groups 2"
NONE = "--position-embedding-type none"
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --kv-lora-rank 20 --q-lora-rank 24"
)
TP2, CP2, PP2 = (
    f"--dry-run-world-size 2 --{kind}-parallel-size 2"
    for kind in ("tensor-model", "context", "pipeline-model")
)
WHOLE = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
PARTS = "--recompute-granularity selective --recompute-modules"
MOVED = "--min-offloaded-tensor-size 0 --fine-grained-activation-offloading --offload-modules"
EXPERTS = "--num-experts 4 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 48"
# Each token goes to every expert, so that all ranks have equally many rows.
TRAVEL = (
    "--dry-run-world-size 4 --num-experts 4 --moe-router-topk 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
    "--global-batch-size 20"
)
FILLED = "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"
BALANCED = "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
FLAT = {
    "tp2": TP2,
    "tp2 sp": f"{TP2} --sequence-parallel --bf16",
    "tp2 sp, latents": f"{TP2} --sequence-parallel {LATENT}",
    "tp2 sp, pieces": f"{TP2} --sequence-parallel --logits-at-once 1000",
    "tp2, ahead": f"{TP2} {ROPE} --mtp-num-layers 2",
    "tp2 sp, ahead": f"{TP2} --sequence-parallel --bf16 {LATENT} --mtp-num-layers 1",
    "tp2, experts": f"{TP2} --num-experts 4",
    "tp2, bounded": f"{TP2} --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
    "tp2, bounded SwiGLU": f"{TP2} --num-experts 4 --swiglu --activation-func-clamp-value 7",
    "tp2, added": f"{TP2} --geglu --glu-linear-offset 1",
    "tp2 sp, experts": f"{TP2} --sequence-parallel --num-experts 4 --bf16 --swiglu "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 48",
    "tp2, latents of experts": f"{TP2} --num-experts 4 --moe-latent-size 24",
    "tp2 sp, latents of experts": f"{TP2} --sequence-parallel --num-experts 4 --bf16 --swiglu "
    "--moe-latent-size 24 --moe-shared-expert-intermediate-size 48",
    "tp2, experts in places": f"{TP2} --num-experts 4 --moe-permute-fusion",
    "tp2, experts routed at once": f"{TP2} --num-experts 4 --moe-router-fusion",
    "tp2, sigmoids routed at once": f"{TP2} --num-experts 4 --moe-router-fusion "
    "--moe-permute-fusion --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall",
    "tp2, softmax routed at once": f"{TP2} --num-experts 4 --bf16 --moe-router-fusion "
    "--moe-router-pre-softmax --moe-router-topk 1",
    "tp2 sp, filled experts": f"{TP2} --sequence-parallel --num-experts 4 {FILLED}",
    "tp2, filled experts of each": f"{TP2} --num-experts 4 {FILLED} --bf16 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-router-topk 4 "
    "--moe-token-dispatcher-type alltoall",
    # Experts of two ranks, microbatches of three: those of some ranks get tokens of two.
    "ring of 3, filled experts of 2": "--dry-run-world-size 6 --context-parallel-size 3 "
    f"--num-experts 4 {FILLED} --expert-model-parallel-size 2 --moe-router-topk 4 "
    "--moe-token-dispatcher-type alltoall",
    "ring, ahead": f"{CP2} {ROPE} --mtp-num-layers 2 --hidden-dropout 0",
    "ring": f"{CP2} {ROPE}",
    "ring in bf16": f"{CP2} --bf16 --qk-layernorm",
    "ring with a window": f"{CP2} --window-size 20,0",
    "ring under a soft cap": f"{CP2} --attention-softcap 30",
    "ring, latents": f"{CP2} {LATENT}",
    "all-gather": f"{CP2} --cp-comm-type all_gather --swiglu",
    "all-to-all": f"{CP2} --cp-comm-type a2a {ROPE}",
    "all-to-all in bf16": f"{CP2} --cp-comm-type a2a --bf16",
    "all-to-all by layer": f"{CP2} --cp-comm-type a2a p2p all_gather a2a",
    "tp2, shared inputs": f"{TP2} {WHOLE} uniform --distribute-saved-activations",
    "tp2 sp, parts": f"{TP2} --sequence-parallel --bf16 {PARTS} core_attn layernorm mlp",
    "tp2 sp, latents made again": f"{TP2} --sequence-parallel {LATENT} {PARTS} mla_up_proj",
    "tp2 sp, moved": f"{TP2} --sequence-parallel {MOVED} attn_norm core_attn attn_proj",
    "ring, core made again": f"{CP2} {ROPE} --recompute-activations",
    "ring, moved": f"{CP2} {ROPE} --cpu-offloading-num-layers 3 --min-offloaded-tensor-size 0",
    "all-to-all, core made again": f"{CP2} --cp-comm-type a2a {ROPE} --recompute-activations",
    "two levels": "--dry-run-world-size 4 --context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2",
    "tp2 sp cp2": "--dry-run-world-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
    f"--context-parallel-size 2 {ROPE}",
}
SCHEDULES = {
    "gpipe": "--pipeline-schedule gpipe",
    "1f1b": "",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "zb-h1": "--pipeline-schedule zb-h1",
    "zb-v": "--pipeline-schedule zb-v",
    "laid out": "--pipeline-model-parallel-layout Ettt||t|L",
    "1f1b, whole layers": f"{WHOLE} uniform",
    "interleaved, parts": f"--num-virtual-stages-per-pipeline-rank 2 {PARTS} core_attn layernorm",
    "zb-h1, whole layers": f"--pipeline-schedule zb-h1 {WHOLE} uniform",
    "zb-v, parts": f"--pipeline-schedule zb-v {PARTS} mlp layernorm core_attn",
    "1f1b, inputs moved": f"{WHOLE} block {MOVED} layer_input",
    "gpipe, moved": f"--pipeline-schedule gpipe {MOVED} attn_norm core_attn attn_proj",
    "1f1b, experts": f"{EXPERTS} --swiglu",
    "zb-h1, experts": f"--pipeline-schedule zb-h1 {EXPERTS} --moe-shared-expert-gate",
    "zb-h1, latents": "--pipeline-schedule zb-h1 --num-experts 4 --moe-latent-size 24",
    "zb-h1, latents, shared": f"--pipeline-schedule zb-h1 {EXPERTS} --moe-latent-size 24",
    "zb-h1, latents made again": f"--pipeline-schedule zb-h1 {EXPERTS} --moe-latent-size 24 "
    f"--moe-shared-expert-gate {PARTS} moe",
    "1f1b, experts made again": f"{EXPERTS} {PARTS} moe layernorm --moe-permute-fusion",
    "zb-h1, experts made again": f"--pipeline-schedule zb-h1 {EXPERTS} {PARTS} moe "
    "--moe-router-fusion",
    "1f1b, activations of experts": f"{EXPERTS} --swiglu {PARTS} moe_act shared_experts",
    "gpipe, experts moved": f"--pipeline-schedule gpipe {EXPERTS} {MOVED} expert_fc1 moe_act",
    "zb-h1, routers in fp64": f"--pipeline-schedule zb-h1 {EXPERTS} --moe-router-dtype fp64 "
    f"{BALANCED}",
    "zb-h1, jitter": f"--pipeline-schedule zb-h1 {EXPERTS} --moe-input-jitter-eps 0.1",
    "1f1b, jitter made again": f"{EXPERTS} --moe-input-jitter-eps 0.1 {PARTS} moe {BALANCED}",
    "zb-h1, filled experts": f"--pipeline-schedule zb-h1 {EXPERTS} {FILLED} --swiglu",
    "1f1b, experts alone made again": f"--num-experts 4 {PARTS} moe",
    "zb-h1, in bf16": "--pipeline-schedule zb-h1 --bf16",
    "zb-h1, experts in bf16": f"--pipeline-schedule zb-h1 {EXPERTS} --bf16",
    "1f1b, experts alone made again in bf16": f"--num-experts 4 --bf16 {PARTS} moe",
    "zb-h1, norms made again": f"--pipeline-schedule zb-h1 {EXPERTS} {PARTS} layernorm",
    "zb-h1, experts and norms made again": f"--pipeline-schedule zb-h1 {EXPERTS} --bf16 {PARTS} "
    "moe layernorm",
    "zb-h1, activations of experts": f"--pipeline-schedule zb-h1 {EXPERTS} {PARTS} moe_act",
    "1f1b, gate made again": f"{EXPERTS} --moe-shared-expert-gate {PARTS} shared_experts",
    "zb-h1, gate made again": f"--pipeline-schedule zb-h1 {EXPERTS} --moe-shared-expert-gate "
    f"{PARTS} shared_experts",
    "combined 1f1b": f"{TRAVEL}",
    "combined interleaved": f"{TRAVEL} --num-virtual-stages-per-pipeline-rank 2",
    "combined, delayed": f"{TRAVEL} --delay-wgrad-compute --swiglu",
    "combined, parts": f"{TRAVEL} {PARTS} moe_act layernorm core_attn",
    "combined, shared beside": f"{TRAVEL} --moe-shared-expert-overlap "
    f"--moe-shared-expert-intermediate-size 48 {PARTS} shared_experts",
    "ahead": f"{NONE} --mtp-num-layers 2 --pipeline-schedule zb-h1",
    "ahead, laid out": f"{NONE} --mtp-num-layers 1 --pipeline-model-parallel-layout Ettt||t|mL",
}
WITHIN = 0.001
ABOUT = ("zb-h1, routers in fp64",)
"""Planned a little too low."""
MASK = 2 * 96 * 4
"""Bytes of a microbatch's loss mask."""


def config(text: str) -> RunConfig:
    return parse(f"{SMALL} {text}".split()).config


def mesh_of(run: RunConfig) -> Mesh:
    return setup.connected_mesh(run, torch.device("cpu"))


def one_forward(rank: int, run: RunConfig) -> int:
    """Return the bytes that one microbatch saves on a rank that holds all layers."""
    mesh, samples = mesh_of(run), run.training.micro_batch_size
    local = run.data.seq_length // mesh.cp.size
    vocabulary = resolve_vocabulary(run.tokenizer, 100, mesh.tp.size)
    (chunk,) = pretrain_gpt.build_model(run, mesh, vocabulary, run.stages)
    rng.initialize(chunk, 1)
    known = list(chunk.parameters())
    if chunk.rotary is not None:
        known += chunk.rotary(local, None)
    tokens, labels = (torch.randint(0, 100, (samples, local)) for _ in range(2))
    with saved_tensors.counting(known) as meter:
        key = DropoutKey(1, 1, 1, mesh.cp.coordinate)
        losses = chunk(tokens, labels, dropout=key, ahead=ahead(run, samples, local))
        total = (losses * torch.ones_like(losses)).sum()
    assert total.requires_grad
    return meter.now


def ahead(run: RunConfig, samples: int, local: int) -> Ahead | None:
    """Return tokens and labels for every depth of multi-token prediction."""
    depths = run.model.mtp.depths
    if not depths:
        return None
    return Ahead(*(torch.randint(0, 100, (samples, local, depths)) for _ in range(3)))


@pytest.mark.parametrize("name", FLAT)
def test_planned_bytes_are_those_that_autograd_saves(pool: Pool, name: str) -> None:
    run = config(FLAT[name])
    rows = resolve_vocabulary(run.tokenizer, 100, run.parallel.tensor_model_parallel_size)
    planned = activations.footprint(run, rows.padded_rows, run.stages[0], 2).kept
    measured = pool.run(run.process.world_size, one_forward, run)
    # The first ranks of a ring see less where a window would reach before the sample.
    assert planned == pytest.approx(max(measured), rel=WITHIN)


def one_iteration(rank: int, run: RunConfig) -> int:
    """Return the most bytes that are saved at once on a rank during an iteration."""
    program = Program(
        build_model=pretrain_gpt.build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    with pytest.MonkeyPatch.context() as patch, saved_tensors.counting([]) as meter:

        def build(*arguments: Any) -> Optimizer:
            optimizer = build_run_optimizer(*arguments)
            for buffer in optimizer.data_parallel.buffers:
                meter.ignore([buffer.data, buffer.grad])
            return optimizer

        def of_logits(logits_SBv: Tensor, *arguments: Any) -> Tensor:
            saved_tensors.see(logits_SBv)  # where exponentials have another dtype there are both
            return cross_entropy(logits_SBv, *arguments)

        patch.setattr(equality, "build_run_optimizer", build)
        patch.setattr(language_model, "cross_entropy", of_logits)
        equality.train(Case(config=run, program=program, vocabulary=100), mesh_of(run))
    return meter.most


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_fullest_moment_of_a_schedule(pool: Pool, name: str) -> None:
    run = config(f"{PP2} --global-batch-size 10 {SCHEDULES[name]}")
    plan = MemoryPlan(run, resolve_vocabulary(run.tokenizer, 100, 1).padded_rows)
    world = run.process.world_size
    measured = pool.run(world, one_iteration, run)[:: world // 2]
    for planned, most in zip(plan.ranks(), measured, strict=True):
        assert planned.activations == pytest.approx(most, rel=WITHIN)
    if name.startswith(("1f1b, ", "zb-h1, ")) and name not in ABOUT:
        found = zip(plan.ranks(), measured, strict=True)
        first, last = (planned.activations - most for planned, most in found)
        # On the last stage masks are read before and freed after what is counted with them.
        assert first == 0 and abs(last) <= MASK
