"""A training step on fake CUDA tensors, up to 6,144 ranks: devices, shapes, waits, bytes held."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan import traffic
from megatron.training.plan.memory import MemoryPlan
from tests.fake_cuda.step import ROWS

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 2"
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --untie-embeddings-and-output-weights"
)
LARGE = (
    "--num-layers 16 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    f"--num-query-groups 8 --seq-length 8192 --bf16 --micro-batch-size 1 {LLAMA}"
)
TP2, PP2, CP2 = (
    f"--{name}-size 2"
    for name in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
)
CASES = {
    "one": (0, 1, SMALL),
    "tp dropout": (1, 2, f"{SMALL} {TP2}"),
    "tp sp pp dp": (
        5,
        8,
        f"{SMALL} {TP2} {PP2} --sequence-parallel --overlap-grad-reduce --global-batch-size 4",
    ),
    "tp overlap": (1, 2, f"{SMALL} {TP2} --sequence-parallel --tp-comm-overlap"),
    "shared groups": (
        2,
        4,
        f"{SMALL} {LLAMA} --num-query-groups 2 --tensor-model-parallel-size 4",
    ),
    "window sink cap": (
        1,
        2,
        f"{SMALL} {LLAMA} --num-query-groups 4 {TP2} --window-size 16,0 --softmax-type learnable "
        "--attention-softcap 20",
    ),
    "fp16 stream": (
        1,
        4,
        f"{SMALL} {TP2} {PP2} --no-bf16 --fp16 --fp32-residual-connection --fp16-lm-cross-entropy",
    ),
    "alibi": (0, 1, f"{SMALL} --position-embedding-type alibi --apply-layernorm-1p"),
    "latent mtp": (
        0,
        1,
        f"{SMALL} --position-embedding-type rope --multi-latent-attention --q-lora-rank 64 "
        "--kv-lora-rank 32 --mtp-num-layers 1",
    ),
    "muon, shared out": (
        1,
        4,
        f"{SMALL} {LLAMA} --num-query-groups 4 {TP2} --optimizer dist_muon "
        "--muon-scalar-optimizer lion --muon-tp-mode distributed",
    ),
    "moments with scales": (
        1,
        2,
        f"{SMALL} --use-distributed-optimizer --use-precision-aware-optimizer "
        "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
    ),
    "layers made again": (
        3,
        4,
        f"{SMALL} {TP2} {PP2} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --distribute-saved-activations",
    ),
    "parts made again": (
        1,
        2,
        f"{SMALL} {TP2} --sequence-parallel --recompute-granularity selective "
        "--recompute-modules core_attn layernorm mlp",
    ),
    "interleaved": (1, 2, f"{SMALL} {PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "zb-h1": (0, 2, f"{SMALL} {PP2} --pipeline-schedule zb-h1"),
    "zb-v": (0, 2, f"{SMALL} {PP2} --pipeline-schedule zb-v"),
    "ring": (1, 2, f"{SMALL} {LLAMA} --num-query-groups 4 {CP2} --attention-dropout 0"),
    "gathered": (1, 2, f"{SMALL} {CP2} --cp-comm-type all_gather --attention-dropout 0"),
    "ulysses": (1, 2, f"{SMALL} {CP2} --cp-comm-type a2a --attention-dropout 0"),
    "two levels": (
        3,
        4,
        f"{SMALL} --context-parallel-size 4 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2 --attention-dropout 0",
    ),
    # 128 positions and 2,048 rows of the vocabulary: 262,144 logits, in three pieces.
    "loss by pieces": (1, 2, f"{SMALL} {TP2} --logits-at-once 100000"),
    "6144": (
        4711,
        6144,
        f"{LARGE} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
        "--global-batch-size 96 --sequence-parallel --overlap-grad-reduce",
    ),
}
COMMON = "--lr 1e-3 --mock-data --train-iters 3"


def words(name: str) -> list[str]:
    return f"{CASES[name][2]} {COMMON}".split()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in one process."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, to build a guard for fake CUDA devices")
    if torch.cuda.is_available():
        pytest.skip("needs a torch without CUDA: with one, tests/gpu runs the real thing")
    guard, base = tmp_path_factory.mktemp("guard") / "guard.so", Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O1", "-shared", "-fPIC"),
            *(f"-I{base / 'include'}", str(ROOT / "tests/fake_cuda/guard.cpp")),
            *("-o", str(guard), f"-L{base / 'lib'}", "-lc10", "-ltorch_cpu"),
        ],
        check=True,
    )
    cases = [
        {"rank": rank, "world_size": world, "flags": words(name)}
        for name, (rank, world, _) in CASES.items()
    ]
    cases.append({**cases[0], "reads": True})
    lines = map(json.dumps, cases)
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.step", str(guard)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    names = [*CASES, "planted"]
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(results: dict[str, Any], name: str) -> None:
    assert "waited" not in results[name]


def test_a_planted_read_of_a_devices_value_is_found(results: dict[str, Any]) -> None:
    assert results["planted"] == {"waited": "aten._local_scalar_dense.default"}


@pytest.mark.parametrize("name", CASES)
def test_everything_is_on_the_device(results: dict[str, Any], name: str) -> None:
    assert results[name]["devices"] == ["cuda:0"]


def config_of(name: str) -> RunConfig:
    return parse(words(name), "pretrain_gpt", world_size=CASES[name][1]).config


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_the_plan_says(results: dict[str, Any], name: str) -> None:
    config = config_of(name)
    planned = MemoryPlan(config, ROWS).ranks()[coordinates(config, name)["pp"]].fixed
    held = results[name]["memory"]
    assert {key: size for key, size in held.items() if size} == {
        key: size for key, size in planned.items() if size
    }


@pytest.mark.parametrize("name", CASES)
def test_a_rank_sends_what_the_plan_says(results: dict[str, Any], name: str) -> None:
    config, result = config_of(name), results[name]
    at = coordinates(config, name)
    planned = traffic.expected(config, ROWS, result["microbatches"], at)
    # The step here leaves out what the loop sums over the world.
    assert {key: tuple(cost) for key, cost in result["traffic"].items() if "world" not in key} == {
        f"{axis} {op}": tuple(cost) for (axis, op), cost in planned.items() if axis != "world"
    }


def coordinates(config: RunConfig, name: str) -> dict[str, int]:
    rank, world, _ = CASES[name]
    return config.parallel.grids(world)[0].coordinates(rank)
