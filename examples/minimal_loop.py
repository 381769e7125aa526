"""A loop of your own over `megatron.core`: own data, own model, no flags of the trainer.

    python examples/minimal_loop.py                                      one process
    torchrun --nproc-per-node 4 examples/minimal_loop.py --tp 2          TP 2 x DP 2, equal losses

Three things make it parallel. Layers that are cut take a mesh. Every parameter has a record of what
it is in the whole model: layers attach theirs, `make_parameter` attaches yours. And the loss is a
sum over this rank's tokens, divided once by those of the global batch, in the optimizer's step.
(So a term of yours that is no such sum, a regulariser for one, is to be divided by `mesh.dp.size`.)

Shapes: B samples, S positions, H hidden, n heads of this rank, D head size, v rows of the
vocabulary on this rank.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core import comm, rng, sharding
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.cross_entropy import cross_entropy
from megatron.core.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    VocabularyRows,
)

TEXT = Path(__file__).resolve().parent.parent / "data" / "shakespeare.jsonl"
V, H, D, LAYERS, S, BATCH = 256, 64, 16, 2, 64, 16
INIT = sharding.Init("normal", 0.05)


class Block(nn.Module):
    """Attention and a feed-forward unit side by side: both read the same norm."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        column, row = layers.ColumnParallelLinear.even, layers.RowParallelLinear.even
        self.qkv = column(H, 3 * H, mesh, dtype, INIT, parts=3)  # each rank has whole heads
        self.out = row(H, H, mesh, dtype, INIT)
        self.up = column(H, 4 * H, mesh, dtype, INIT)
        self.down = row(4 * H, H, mesh, dtype, INIT)

    def forward(self, x_SBH: Tensor) -> Tensor:
        x_SBH = F.rms_norm(x_SBH, (H,))
        heads = [y.unflatten(2, (-1, D)).permute(1, 2, 0, 3) for y in self.qkv(x_SBH).chunk(3, 2)]
        y_BnSD = F.scaled_dot_product_attention(*heads, is_causal=True)
        y_SBH: Tensor = self.out(y_BnSD.permute(2, 0, 1, 3).flatten(2))
        return y_SBH + self.down(F.gelu(self.up(x_SBH)))


class Decoder(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp, self.rows = mesh.tp, VocabularyRows(V, V, mesh)
        self.tokens = VocabParallelEmbedding(self.rows, H, INIT, mesh, dtype)
        table = sharding.whole((S, 1, H), INIT, replicated=("tp",))
        self.positions = layers.make_parameter(table, (S, 1, H), mesh, dtype)
        self.blocks = nn.ModuleList(Block(mesh, dtype) for _ in range(LAYERS))

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_SBH = self.tokens(tokens_BS) + self.positions
        for block in self.blocks:
            x_SBH = x_SBH + block(x_SBH)
        x_SBH = F.rms_norm(x_SBH, (H,))
        logits_SBv = layers.linear(x_SBH, self.tokens.weight, None, self.tp, False)
        return cross_entropy(logits_SBv, labels_BS.t(), self.rows, self.tp)


def batches(mesh: Mesh, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels of this replica: every rank draws all samples, and keeps its own."""
    text = torch.tensor(list(TEXT.read_bytes()[:100_000]))
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - S, (BATCH,), generator=drawn)
        mine = starts[mesh.dp.coordinate :: mesh.dp.size]
        text_BS = torch.stack([text[start : start + S + 1] for start in mine.tolist()])
        yield text_BS[:, :-1].to(mesh.device), text_BS[:, 1:].to(mesh.device)


def main() -> None:
    """Train, and print the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fp64", action="store_true", help="to compare layouts")
    flags = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = Mesh.create(ParallelConfig.resolve(tensor_model_parallel_size=flags.tp), device)

    precision = PrecisionConfig.resolve(fp64=flags.fp64)
    model = Decoder(mesh, getattr(torch, precision.params_dtype))
    rng.initialize(model, seed=1234)  # the same model on every layout
    optimizer = build_optimizer(OptimizerConfig.resolve(), [model], mesh, precision)
    for step, (tokens_BS, labels_BS) in enumerate(batches(mesh, flags.steps), 1):
        optimizer.zero_grad()
        loss = model(tokens_BS, labels_BS).sum()
        loss.backward()  # once per microbatch, if there are several: gradients add up
        optimizer.data_parallel.reduce_gradients()
        optimizer.step(1 / (BATCH * S), lr=3e-3, weight_decay=0.1)
        total = loss.detach()
        comm.all_reduce(total, mesh.dp)
        if mesh.rank == 0:
            print(f"step {step}: loss {total.item() / (BATCH * S)!r}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
