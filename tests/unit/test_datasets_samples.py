"""Index arrays against plain walks over the documents, for every option and for odd lengths."""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import blend_index, samples
from megatron.core.datasets.samples import SamplePlan, plan_samples, sample_index
from megatron.core.utils import UserError, atomic_path

ROOT = Path(__file__).resolve().parents[2]


def walk(lengths: list[int], document: list[int], plan: SamplePlan) -> list[tuple[int, int]]:
    """Find the cuts by eating documents one after the other, as Megatron-core describes it."""
    cuts, position, offset = [(0, 0)], 0, 0
    for _ in range(plan.num_samples):
        left = plan.seq_length + plan.extra
        while left:
            here = lengths[document[position]] - offset
            if here >= left:
                offset += left - plan.extra
                left = 0
            elif position == len(document) - 1:
                offset = lengths[document[position]] - plan.extra
                break
            else:
                left -= here
                position, offset = position + 1, 0
        cuts.append((position, offset))
    return cuts


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    seq_length=st.integers(1, 40),
    asked=st.one_of(st.none(), st.integers(1, 40)),
    extra=st.integers(0, 1),
    keep_partial=st.booleans(),
    seed=st.integers(0, 5),
)
def test_cuts_equal_a_walk(
    lengths: list[int],
    seq_length: int,
    asked: int | None,
    extra: int,
    keep_partial: bool,
    seed: int,
) -> None:
    lengths = lengths if any(lengths) else [*lengths, 5]
    plan = plan_samples(sum(lengths), seq_length, asked, extra=extra, keep_partial=keep_partial)
    document = np.tile(np.arange(len(lengths), dtype=np.int32), plan.num_epochs)
    np.random.RandomState(seed).shuffle(document)
    got = sample_index(np.array(lengths, dtype=np.int32), document, plan, None)
    assert got.dtype == np.int32
    assert [tuple(row) for row in got.tolist()] == walk(lengths, document.tolist(), plan)


@given(tokens=st.integers(1, 5000), seq_length=st.integers(1, 300), asked=st.integers(1, 200))
def test_epochs_are_the_fewest_that_suffice(tokens: int, seq_length: int, asked: int) -> None:
    plan = plan_samples(tokens, seq_length, asked)
    assert plan.num_samples >= asked
    need = asked * seq_length + 1
    assert (plan.num_epochs - 1) * tokens < need <= plan.num_epochs * tokens


def test_no_size_means_one_epoch() -> None:
    plan = plan_samples(1000, 64, None)
    assert (plan.num_epochs, plan.num_samples, plan.separate_from) == (1, 15, None)
    assert plan_samples(1000, 64, None, keep_partial=True).num_samples == 16


def test_a_little_used_last_epoch_stays_last() -> None:
    # 100 tokens an epoch, 9 samples of 10 each: 20 samples need 3 epochs, the last for 2 of 9.
    plan = plan_samples(100, 10, 20)
    assert (plan.num_epochs, plan.separate_from) == (3, 19)
    index = samples.build_sample_index(np.full(10, 10, np.int32), (0, 10), plan, 1)
    assert sorted(index.document[-10:]) == list(range(10))
    assert max(index.shuffle[:19]) == 18 and min(index.shuffle[19:]) == 19


def test_the_same_seed_gives_the_same_arrays() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 300).astype(np.int32)
    plan = plan_samples(int(lengths.sum()), 16, 700)
    one, two, other = (samples.build_sample_index(lengths, (0, 300), plan, s) for s in (1, 1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (one.document != other.document).any()


def greedy(weights: list[float], size: int, limits: list[int] | None = None) -> list[int]:
    """Choose members one by one, in plain Python floats."""
    taken, chosen = [0] * len(weights), []
    for i in range(size):
        best, member = -float("inf"), -1
        for m, weight in enumerate(weights):
            lag = weight * max(i, 1) - taken[m]
            if (limits is None or taken[m] < limits[m]) and lag > best:
                best, member = lag, m
        chosen.append(member)
        taken[member] += 1
    return chosen


WEIGHTS = [
    [1.0],
    [0.5, 0.5],
    [1 / 3] * 3,
    [0.5, 0.3, 0.2],
    [0.999, 0.001],
    [1e-5, 1 - 1e-5],
    [0.1] * 10,
    (np.arange(1, 18) / np.arange(1, 18).sum()).tolist(),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("stretched", [False, True])
def test_blends_equal_the_greedy_rule(
    weights: list[float], stretched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 30_000
    monkeypatch.setattr(blend_index, "LOOP_UP_TO", 0 if stretched else size)
    members, numbers = blend_index.blend_by_weight(weights, size, None)
    assert members.tolist() == greedy(weights, size)
    for member in range(len(weights)):
        mine = numbers[members == member]
        assert mine.tolist() == list(range(len(mine)))


@pytest.mark.parametrize("sizes", [[5], [3, 3], [1, 10, 4], [7, 1, 1, 20], [1000, 1, 333]])
def test_blends_of_everything_use_each_sample_once(sizes: list[int]) -> None:
    members, numbers = blend_index.blend_all(sizes, None)
    shares = [size / sum(sizes) for size in sizes]
    assert members.tolist() == greedy(shares, sum(sizes), sizes)
    for member, size in enumerate(sizes):
        assert sorted(numbers[members == member].tolist()) == list(range(size))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> ModuleType:
    """The helper, built from this source tree as an install builds it; kept until that changes."""
    made_from = [ROOT / "setup.py", *sorted((ROOT / "csrc").iterdir())]
    key = hashlib.sha256(sys.version.encode())
    for path in made_from:
        key.update(path.read_bytes())
    kept = pytestconfig.cache.mkdir("index_helpers") / f"{key.hexdigest()[:16]}.so"
    if not kept.exists():
        build(tmp_path_factory.mktemp("build"), kept)
    spec = util.spec_from_file_location("megatron.core.datasets.index_helpers", kept)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, target: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"]
        + ["--build-lib", str(folder), "--build-temp", str(folder / "temp")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr  # without a compiler too
    found = list(folder.rglob("index_helpers*.so"))
    if not found:
        pytest.skip(f"no compiler: {done.stderr[-300:]}")
    with atomic_path(target) as path:
        shutil.copy(found[0], path)


def test_the_compiled_helper_equals_numpy(compiled: ModuleType) -> None:
    random = np.random.default_rng(3)
    for extra in (0, 1):
        for keep_partial in (False, True):
            for seq_length in (1, 7, 64, 5000):
                lengths = random.integers(0, 60, 500).astype(np.int32)
                lengths[-1] = 9
                plan = plan_samples(
                    int(lengths.sum()), seq_length, 50, extra=extra, keep_partial=keep_partial
                )
                document = np.tile(np.arange(500, dtype=np.int32), plan.num_epochs)
                arrays = [sample_index(lengths, document, plan, h) for h in (None, compiled)]
                assert arrays[0].dtype == arrays[1].dtype
                np.testing.assert_array_equal(*arrays)
    both: list[Callable[[Any], Any]] = [
        lambda helper: blend_index.blend_by_weight(WEIGHTS[-1], 50_000, helper),
        lambda helper: blend_index.blend_all([1000, 1, 333], helper),
    ]
    for make in both:
        for a, b in zip(make(None), make(compiled), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_an_install_without_a_compiler_goes_on(tmp_path: Path) -> None:
    environment = {"PATH": "/nowhere", "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"]
        + ["--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so")) and "numpy and torch do the same" in done.stderr


def test_what_does_not_compile_leaves_nothing_of_other_sources(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for package in ("megatron", "megatron/core", "megatron/core/datasets"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    kernels = tmp_path / "megatron" / "core" / "kernels" / "compiled"
    kernels.mkdir(parents=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    stale = [
        kernels / f"cpu_kernels{suffix}",
        tmp_path / "megatron" / "core" / "datasets" / f"index_helpers{suffix}",
    ]
    for path in stale:
        path.write_bytes(b"of other sources")
    environment = {"PATH": "/nowhere", "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True
    )
    assert done.stderr.count("numpy and torch do the same more slowly") == 2
    assert not any(path.exists() for path in stale)


def test_more_samples_than_memory_holds_are_a_plain_error() -> None:
    plan = plan_samples(1000, 10, 10**16)
    with pytest.raises(
        UserError, match=r"the order of 1[0-9,]{20,} samples .* lower --train-iters"
    ):
        samples.build_sample_index(np.full(100, 10), (0, 100), plan, seed=1)
