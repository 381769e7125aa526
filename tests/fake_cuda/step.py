"""One rank's training step on fake CUDA tensors, in a world of any size, without CUDA.

    python -m tests.fake_cuda.step GUARD.so < CASES

Each line of CASES is a JSON object: rank, world_size, flags, and "reads" where the forward step
shall read a value of the device. For each a JSON object comes out; one whose step waited for the
device holds nothing but "waited", the operator that did.

Fake tensors have shapes, dtypes and devices but no memory, and the process group is one that only
pretends. So this finds what would fail on a GPU before any number is computed: tensors of two
devices in one operation, a read of a device's value (which would stall its stream), a collective
over tensors that do not fit; and it counts what is communicated.
"""

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROWS = 4096
"""Of the vocabulary, on any layout."""


def load(guard: str) -> None:
    """Load the guard; torch must not be imported yet."""
    assert "torch" not in sys.modules, "the guard comes before torch"
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(guard)


def run(rank: int, world_size: int, flags: list[str], reads: bool = False) -> dict[str, Any]:
    """Return what one step held and communicated, or the operator that waited for the device."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        return step(rank, world_size, flags, reads)
    except DataDependentOutputException as error:
        return {"waited": str(error.func)}
    finally:
        dist.destroy_process_group()


def step(rank: int, world_size: int, flags: list[str], reads: bool) -> dict[str, Any]:
    """Run one step and return what it held and communicated."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import pretrain_gpt
    from megatron.core import comm
    from megatron.core.tokenizers.vocabulary import Vocabulary
    from megatron.training.arguments import parse
    from megatron.training.build import build_chunks, build_passes, build_run_optimizer
    from megatron.training.planner import Planner
    from megatron.training.processes import setup
    from megatron.training.state import TrainState
    from megatron.training.timers import Timers

    config = parse(flags, "pretrain_gpt", world_size=world_size).config
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    device = torch.device("cuda", 0)
    mesh = setup.connected_mesh(config, device)
    vocabulary = Vocabulary(ids_in_use=ROWS, rows=ROWS, padded_rows=ROWS)

    def forward_step(model: Any, batch: Any, x_SBH: Any, dropout: Any) -> Any:
        if reads:
            batch["loss_mask"].sum().item()
        return pretrain_gpt.forward_step(model, batch, x_SBH, dropout)

    with FakeTensorMode():
        chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model, draws=False)
        optimizer = build_run_optimizer(config, chunks, mesh)
        passes = build_passes(config, mesh, chunks, forward_step, Timers(0))
        samples, sequence = config.training.micro_batch_size, config.data.seq_length
        tokens = torch.zeros(samples, sequence, dtype=torch.int64, device=device)
        mask = torch.ones(samples, sequence, device=device)
        plan, count, nominal = Planner(config, mesh).after(TrainState())
        batches = [{"tokens": tokens, "labels": tokens, "loss_mask": mask}] * count
        for _ in range(2):  # shared-out weights are gathered ahead from the second on
            optimizer.zero_grad()
            with comm.counting() as traffic:
                passes.train(
                    batches,
                    count,
                    passes.accumulator(),
                    divisor=nominal,
                    key_of=lambda number: None,  # type: ignore[arg-type,return-value]
                    before_gradients=optimizer.data_parallel.begin,
                    after_gradients=optimizer.data_parallel.finish,
                )
                optimizer.data_parallel.reduce_gradients()
                optimizer.step(1.0, lr=plan.learning_rate, weight_decay=plan.weight_decay)
        tensors = [t for chunk in chunks for p in chunk.parameters() for t in (p, p.grad)]
        devices = sorted({str(tensor.device) for tensor in tensors})
        memory = optimizer.memory()
    counted = {
        f"{axis} {op}": [traffic.calls[axis, op], size]
        for (axis, op), size in traffic.bytes.items()
    }
    return {"devices": devices, "memory": memory, "traffic": counted, "microbatches": count}


if __name__ == "__main__":
    load(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
