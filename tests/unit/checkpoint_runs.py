"""Toy runs whose checkpoints tests look at."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.optimizer.schedule import Progress, build_schedule
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init, Region, Sharding, whole
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import load as checkpoint_load
from megatron.training.checkpoints import save as checkpoint_save
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import Loaded
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.state import TrainState

MESH = Mesh.serial()


FP32, FP64, BF16, FP16 = (
    PrecisionConfig.resolve(),
    PrecisionConfig.resolve(fp64=True),
    PrecisionConfig.resolve(bf16=True),
    PrecisionConfig.resolve(fp16=True),
)


SCALED = PrecisionConfig.resolve(
    use_precision_aware_optimizer=True, exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16"
)


NORMAL = Init("normal", 0.5)


class Toy(nn.Module):
    """A padded table, a matrix and a vector: a shape of each kind."""

    def __init__(self, precision: PrecisionConfig, seed: int, rows: int = 8) -> None:
        super().__init__()
        dtype = getattr(torch, precision.params_dtype)
        box = ((0, 5), (0, 3))
        self.table = self._make(Sharding((5, 3), (Region(box, box),), NORMAL), (rows, 3), dtype)
        self.matrix = self._make(whole((4, 3), NORMAL, matrix=True), (4, 3), dtype)
        self.bias = self._make(whole((4,), NORMAL, decay=False), (4,), dtype)
        sharding.name_parameters(self)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
            self.table[5:] = 0

    @staticmethod
    def _make(record: Sharding, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        return sharding.attach(nn.Parameter(torch.empty(shape, dtype=dtype)), record)


class Run:
    """A toy run: its gradients depend on the iteration alone."""

    def __init__(
        self, folder: Path, precision: PrecisionConfig = FP32, seed: int = 1, **config: Any
    ) -> None:
        rows = config.pop("rows", 8)
        rule = config.pop("optimizer", "adam")
        schedule_flags = {
            name: config.pop(name) for name in list(config) if name.endswith("param_scheduler")
        }
        self.lr = config.pop("lr", 0.1)
        self.model = Toy(precision, seed, rows)
        self.optimizer: Optimizer = build_optimizer(
            OptimizerConfig(optimizer=rule), [self.model], MESH, precision
        )
        self.schedule_config = ScheduleConfig(lr=self.lr, lr_warmup_iters=3, **schedule_flags)
        self.schedule = build_schedule(self.schedule_config, 0.01, train_iters=10)
        self.config = CheckpointConfig(**{"save": str(folder), "load": str(folder), **config})
        self.state, self.lines = TrainState(), []
        self.loaded: Loaded | None = None
        self.extra: dict[str, Any] = {}

    @property
    def facts(self) -> RunFacts:
        return RunFacts(
            config={"lr": self.lr, "split": (9, 1), **self.extra},
            schedule=self.schedule,
            tokenizer="abc",
            vocabulary=5,
            vocabulary_rows=5,
            objective="tokens",
        )

    @property
    def as_saved(self) -> CheckpointedRun:
        return CheckpointedRun(
            self.config, MESH, [self.model], self.optimizer, self.facts, self.lines.append
        )

    def train(self, until: int) -> "Run":
        while self.state.iteration < until:
            draw = torch.Generator().manual_seed(100 + self.state.iteration)
            self.optimizer.zero_grad()
            for parameter in self.model.parameters():
                grad = torch.randn(parameter.shape, generator=draw)
                parameter.grad.copy_(grad)
            self.model.table.grad[5:] = 0
            rate = self.schedule.learning_rate(Progress(self.state.iteration + 1, 0))
            self.optimizer.step(1.0, lr=rate, weight_decay=0.01)
            self.state.iteration += 1
            self.state.consumed_samples += 4
        return self

    def save(self) -> checkpoint_save.Saved:
        return checkpoint_save.save_checkpoint(self.as_saved, self.state)

    def load(self) -> "Run":
        self.loaded = checkpoint_load.load_checkpoint(self.as_saved, self.schedule_config)
        self.state, self.schedule = self.loaded.state, self.loaded.schedule
        return self

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def states(self) -> dict[str, Tensor]:
        return {state.key: state.values().clone() for state in self.optimizer.tensors()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
