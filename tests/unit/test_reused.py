"""Memory that large results take in turns: who may lie where, and that nobody is overwritten."""

import copy
import mmap
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core import rng
from megatron.core.kernels import matmul, reused
from megatron.core.kernels.reused import Reused
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from tests.unit.test_backends import run_of

F32, F64 = torch.float32, torch.float64
LARGE = reused.SMALLEST // 4
needs_system = pytest.mark.skipif(
    not reused.ANONYMOUS, reason="the system has no private memory without a file: nothing is kept"
)


def taken(memory: Reused, *shape: int, dtype: torch.dtype) -> Tensor:
    found = memory.take(*shape, dtype=dtype)
    assert found is not None and found.dtype == dtype and found.shape == shape
    return found


@needs_system
def test_a_later_result_lies_where_an_earlier_one_lay() -> None:
    memory = Reused()
    first = taken(memory, 2, LARGE, dtype=F32)
    place, part = first.data_ptr(), first[1]
    assert first.shape == (2, LARGE) and first.is_contiguous() and part.dtype == F32
    del first
    other = taken(memory, 2, LARGE, dtype=F32)  # the part is still there
    assert other.data_ptr() != place
    del part
    assert taken(memory, LARGE, dtype=F64).data_ptr() == place
    del other
    assert len(memory._free) == 2


@needs_system
def test_places_of_other_sizes_are_given_up() -> None:
    memory = Reused()
    found = []
    for size in (1, 3, 2, 1, 3, 1):  # in units of LARGE; two thirds are near enough
        taken(memory, size * LARGE, dtype=F32).fill_(1.0)
        found.append([len(block) // reused.SMALLEST for block in memory._free])
    assert found == [[1], [3], [3], [1], [3], [1]]


def test_small_ones_and_systems_without_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Reused()
    assert memory.take(LARGE - 1, dtype=F32) is None and memory.take(0, dtype=F32) is None
    monkeypatch.setattr(reused, "ANONYMOUS", 0)
    assert memory.take(2 * LARGE, dtype=F32) is None


@needs_system
@pytest.mark.parametrize("asked", ["1", "0"])
def test_a_system_without_large_pages_goes_on(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class WithoutLargePages(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            tried.append(advice)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutLargePages)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", asked)
    assert (taken(Reused(), LARGE, dtype=F32).fill_(2.0) == 2.0).all()
    assert bool(tried) == (asked == "1" and hasattr(mmap, "MADV_HUGEPAGE"))


@needs_system
def test_tensors_that_are_but_a_shape_or_elsewhere_take_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reused, "SMALLEST", 1)
    monkeypatch.setattr(Reused, "take", lambda *_, **__: pytest.fail("it was asked for a place"))
    with FakeTensorMode():
        assert matmul.linear(torch.empty(3, 4), torch.empty(5, 4), None, Reused()).shape == (3, 5)
    x, weight = torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta")
    assert matmul.linear(x, weight, None, Reused()).is_meta


@needs_system
def test_a_process_may_end_with_a_result() -> None:
    program = (
        "import torch; from megatron.core.kernels.reused import Reused; memory = Reused(); "
        f"kept = memory.take({LARGE}, dtype=torch.float32).fill_(1.0); print(kept[-1].item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0\n", "")


@needs_system
def test_a_copy_of_its_owner_has_its_own() -> None:
    memory = Reused()
    taken(memory, LARGE, dtype=F32)
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert other._free == [] and len(memory._free) == 1


@needs_system
def test_results_outlive_their_owner() -> None:
    memory = Reused()
    x, gone = (taken(memory, LARGE, dtype=F32).fill_(3.0) for _ in range(2))
    del gone
    free = weakref.ref(memory._free[0])
    del memory
    assert free() is None and (x == 3.0).all()


@needs_system
def test_threads_do_not_share_a_place() -> None:
    memory, clashes = Reused(), []

    def use(value: float) -> None:
        for _ in range(20):
            x = taken(memory, LARGE, dtype=F32)
            x[::4096] = value
            if not (x[::4096] == value).all():
                clashes.append(value)

    threads = [threading.Thread(target=use, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes and len(memory._free) <= 8  # a thread has its next one before it lets go


@needs_system
@pytest.mark.parametrize("shape", [(3, 2, 5), (4, 5)])
def test_a_product_in_it_is_the_product(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reused, "SMALLEST", 1)
    memory = Reused()
    x, weight, bias = (torch.randn(*s, dtype=F64) for s in (shape, (7, 5), (7,)))
    for lies in (x, x.transpose(0, -2)):
        y = matmul.linear(lies, weight, None, memory)
        torch.testing.assert_close(y, F.linear(lies, weight), rtol=1e-14, atol=1e-14)
    del y
    assert memory._free
    torch.testing.assert_close(
        matmul.linear(x, weight, bias, memory), F.linear(x, weight, bias), rtol=0, atol=0
    )


@needs_system
def test_nobodys_logits_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches before their backwards, and logits that somebody keeps."""
    tokens = torch.arange(12).view(2, 6)
    found = []
    for smallest in (1, reused.SMALLEST):
        monkeypatch.setattr(reused, "SMALLEST", smallest)
        model = GPTModel(run_of("").model, Mesh.serial(), vocab_size=32, dtype=F64)
        rng.initialize(model, 3)
        kept = model(tokens).detach()
        assert model.output_layer is not None and not model.output_layer.memory._free
        losses = [model(tokens + shift, tokens + 1) for shift in (0, 0, 1)]
        model(tokens, tokens)
        for loss in losses[::-1]:
            loss.sum().backward()
        found.append([kept, *losses, *(weight.grad for weight in model.parameters())])
        del losses, loss
        assert bool(model.output_layer.memory._free) == (smallest == 1)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
