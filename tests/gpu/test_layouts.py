"""Several processes on CUDA train as one does: on one device over gloo, on two over NCCL.

gloo takes CUDA tensors through the host, which is slow and no layout to train with, but everything
above it is what runs over NCCL. NCCL itself, its streams and its order of calls need two devices.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.core.mesh import Mesh
from megatron.training.arguments import read_settings
from megatron.training.processes import setup
from megatron.training.verification import equality
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import Outcome, Share, compare, join
from megatron.training.verification.small_run import SmallRun
from tests.gpu import needs
from tests.gpu.needs import DEVICE
from tests.gpu.test_training import MODEL, VARIANTS
from tests.harness import Pool
from tests.programs import ROOT, Rows, assert_rows_equal, free_port, metrics
from tools.verify_layout import case, closed_form

pytestmark = needs.CUDA

LAYOUTS = [
    ("gpt2", "tp2"),
    ("llama", "tp2 sp"),
    ("gpt2", "pp2 gpipe"),
    ("gpt2", "pp2 1f1b"),
    ("gpt2", "pp2 1f1b --no-overlap-p2p-communication"),
    ("llama", "pp2 vpp2"),
    ("gpt2", "pp2 zb-h1"),
    ("gpt2", "pp2 zb-v"),
    ("llama", "cp2"),
    ("alibi", "cp2 all_gather"),
    ("window", "cp2 a2a"),
    ("packed", "cp2"),
    ("gpt2", "dp2 overlap --ddp-bucket-size 900"),
    ("latent", "tp2 sp"),
    ("gpt2", "dp2 torch_fsdp2"),
    ("llama", "dp2 torch_fsdp2 --torch-fsdp2-no-reshard-after-forward"),
]
LARGE = [("llama", "tp2 sp pp2"), ("gpt2", "tp2 pp2 zb-v dp2 overlap --ddp-bucket-size 900")]


def trained(rank: int, one: equality.Case, backend: str) -> Share:
    device = needs.connect(rank, backend)
    return equality.train(one, setup.connected_mesh(one.config, device))


class Layouts:
    """Layouts on the device, compared with one process on the CPU, which runs once per variant."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._serial: dict[str, Outcome] = {}

    def check(self, variant: str, text: str, backend: str) -> None:
        small = SmallRun(read_settings(f"{MODEL} {VARIANTS[variant]}".split(), "test").values)
        layout = parse_layout(text, "test")
        config, reference = small.on(layout), small.reference(layout)
        if repr(reference) not in self._serial:
            shares = [equality.train(case(reference), Mesh.serial())]
            self._serial[repr(reference)] = join(shares)
        world = config.process.world_size
        shares = self.pool.run(world, trained, case(config), backend, timeout=300.0)
        outcome = join(shares)
        apart = compare(outcome, self._serial[repr(reference)])
        assert apart.largest <= 1e-10, apart
        assert outcome.traffic == closed_form(config)


@pytest.fixture(scope="module")
def layouts(pool: Pool) -> Layouts:
    return Layouts(pool)


@pytest.mark.parametrize(("variant", "text"), [*LAYOUTS, *LARGE], ids=lambda value: value)
def test_over_gloo_on_one_device(layouts: Layouts, variant: str, text: str) -> None:
    layouts.check(variant, text, "gloo")


@needs.TWO_DEVICES
@pytest.mark.parametrize(("variant", "text"), LAYOUTS, ids=lambda value: value)
def test_over_nccl(layouts: Layouts, variant: str, text: str) -> None:
    layouts.check(variant, text, "nccl")


RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 99 "
    "--max-position-embeddings 32 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 3 --lr 5e-3 --eval-interval 2 --eval-iters 2 --log-interval 1 --num-workers 0 "
    f"--attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-3 --fp64 --device {DEVICE}"
)


def started(folder: Path, words: str, processes: int) -> str:
    """Run pretrain_gpt under torchrun and return what it printed."""
    launcher = f"-m torch.distributed.run --nproc-per-node {processes} --master-port {free_port()}"
    flags = f"{RUN} {words} --metrics-file {folder / 'metrics.jsonl'}"
    ended = subprocess.run(
        [sys.executable, *launcher.split(), str(ROOT / "pretrain_gpt.py"), *flags.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("serial")
    started(folder, "", 1)
    return metrics(folder / "metrics.jsonl")


Starter = Callable[[str], str]


@pytest.fixture
def equals(one_process: Rows, tmp_path: Path) -> Starter:
    """Return a function that compares two processes with one."""

    def check(words: str) -> str:
        said = started(tmp_path, words, 2)
        assert_rows_equal(metrics(tmp_path / "metrics.jsonl"), one_process)
        return said

    return check


TP2 = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    "words",
    [
        TP2,
        f"{TP2} --sequence-parallel --tp-comm-overlap",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--overlap-grad-reduce --ddp-bucket-size 5000",
    ],
)
def test_programs_over_gloo_on_one_device(equals: Starter, words: str) -> None:
    said = equals(f"{words} --distributed-backend gloo")
    assert ("--tp-comm-overlap: round a ring" in said) == ("--tp-comm-overlap" in words)


@needs.TWO_DEVICES
@pytest.mark.parametrize(
    "words",
    [
        TP2,
        f"{TP2} --sequence-parallel",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--context-parallel-size 2",
        "--overlap-grad-reduce --ddp-bucket-size 5000",
        "--overlap-grad-reduce --high-priority-stream-groups dp_cp",
    ],
)
def test_programs_over_nccl(equals: Starter, words: str) -> None:
    equals(words)


@needs.TWO_DEVICES
def test_products_beside_their_collectives(equals: Starter) -> None:
    """Through symmetric memory where the devices reach each other's, else round the ring."""
    said = equals(f"{TP2} --sequence-parallel --tp-comm-overlap")
    reach = DEVICE.type == "cuda" and all(
        torch.cuda.can_device_access_peer(one, other)
        for one, other in itertools.permutations(range(torch.cuda.device_count()), 2)
    )
    way = "through symmetric memory" if reach else "round a ring"
    assert f"--tp-comm-overlap: {way}" in said
