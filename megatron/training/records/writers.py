"""Where numbers go besides the log: a JSON-lines file, TensorBoard, Weights & Biases.

Each writer takes whole rows when the metrics are flushed. TensorBoard and W&B get the tags that
people's dashboards already read; both packages are optional and imported only when asked for.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.log_config import LoggingConfig
from megatron.training.records.log_line import perplexity

Row = Mapping[str, Any]
_NOT_IN_FILE = ("loss_names", "group_names")


class Writer(Protocol):
    """Takes what a run measures."""

    def rows(self, rows: Sequence[Row]) -> None:
        """Write training iterations, oldest first."""

    def validation(self, row: Row) -> None:
        """Write the result of one evaluation."""

    def timers(self, iteration: int, samples: int, seconds: Mapping[str, float]) -> None:
        """Write seconds per iteration of the phases of a log interval."""

    def memory(self, row: Row) -> None:
        """Write the bytes of each category on one pipeline rank, measured and planned."""

    def close(self) -> None:
        """Write what is held back."""


class JsonLines:
    """One JSON object per iteration; every number with full precision."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._file = open(path, "a", encoding="utf-8")

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._file.write(_dumps(row))
        self._file.flush()

    def validation(self, row: Row) -> None:
        self._file.write(_dumps(row))
        self._file.flush()

    def timers(self, iteration: int, samples: int, seconds: Mapping[str, float]) -> None:
        """Leave them out: rows are per iteration."""

    def memory(self, row: Row) -> None:
        self.rows([row])

    def close(self) -> None:
        self._file.close()


def last_attempt(path: str | None) -> int | None:
    """Return the attempt of the newest row of a metrics file, or None without one."""
    if path is None or not os.path.exists(path):
        return None
    taken = 65536
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            file.seek(max(0, size - taken))
            for line in reversed(file.read().splitlines()):
                try:
                    return int(json.loads(line)["attempt"])
                except (ValueError, KeyError, TypeError):
                    continue  # half a line, or a row of something else
            if taken >= size:
                return None
            taken *= 8  # lines may be long: they have the loads of all experts


def _end_last_line(path: str) -> None:
    """Cut off half a line that a killed run left."""
    if not os.path.exists(path):
        return
    with open(path, "rb+") as file:
        content_end = size = file.seek(0, os.SEEK_END)
        while content_end > 0:
            start = max(0, content_end - 65536)
            file.seek(start)
            cut = file.read(content_end - start).rfind(b"\n")
            content_end = start + cut + 1
            if cut >= 0:
                break
        if content_end < size:
            file.truncate(content_end)


def _dumps(row: Row) -> str:
    # JSON has no NaN and no infinity; `nan` says that there was one.
    plain = {key: _plain(value) for key, value in row.items() if key not in _NOT_IN_FILE}
    return json.dumps(plain) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tags(row: Row, config: LoggingConfig) -> dict[str, float]:
    """Return a training row under the names of TensorBoard and W&B."""
    named = {
        "learning-rate": row["learning_rate"],
        "decoupled-learning-rate": row.get("decoupled_learning_rate"),
        "batch-size": row["global_batch_size"],
        "loss-scale": row["loss_scale"] if config.log_loss_scale_to_tensorboard else None,
        "grad-norm": row["grad_norm"],
        "grad-norm-clipped": row.get("clipped_grad_norm"),
        "num-zeros": row.get("num_zeros"),
        "params-norm": row.get("params_norm"),
        "iteration-time": row["elapsed_ms"] / 1e3,
        "throughput": row.get("throughput") if config.log_throughput else None,
        "mem-allocated-bytes": row["memory_bytes"] if config.log_memory_to_tensorboard else None,
    }
    named |= {f"grad-norm {name}": row[key] for key, name in row["group_names"].items()}
    for key, name in row["loss_names"].items():
        named[name] = row[key] if not row["skipped"] else None
    named |= expert_tags(row, by_layer=config.moe_per_layer_logging)
    return {name: value for name, value in named.items() if value is not None}


def expert_tags(row: Row, *, by_layer: bool) -> dict[str, float]:
    """Return the loads of experts, and with ``by_layer`` also those, and losses, of each layer.

    Layers count from 0, as in Megatron-LM, whose tags the losses have.
    """
    if "experts" not in row:
        return {}
    named = {
        "moe/imbalance": row["expert_imbalance"],
        "moe/worst_imbalance": row["worst_expert_imbalance"],
        "moe/dropped": row["dropped_choices"],
    }
    if "expert_overload" in row:  # the names are Megatron-LM's
        named["moe/avg_overload_factor"] = row["expert_overload"]
        named["moe/max_overload_factor"] = row["worst_expert_overload"]
    if by_layer:
        for layer in row["experts"]:
            for name, value in layer.items():
                if name not in ("layer", "tokens"):
                    named[f"moe/{name}_layer_{layer['layer']}"] = value
    return named


def validation_tags(row: Row, config: LoggingConfig) -> dict[str, float]:
    """Return a validation row under the names of TensorBoard and W&B."""
    suffix = f" {row['dataset']}" if row.get("dataset") else ""
    named = {}
    for key, name in row["loss_names"].items():
        tag = f"{name} validation{suffix}"
        named[tag] = row[key]
        if config.log_validation_ppl_to_tensorboard:
            named[f"{tag} ppl"] = perplexity(row[key])
    return named


def memory_tags(row: Row) -> dict[str, float]:
    """Return the bytes of one pipeline rank under names for TensorBoard and W&B."""
    where = f" of pipeline rank {row['pipeline_rank']}"
    measured = {f"memory {name}{where}": size for name, size in row["measured_bytes"].items()}
    planned = {f"memory {name}{where} planned": n for name, n in row["planned_bytes"].items()}
    return measured | planned


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: str, config: LoggingConfig, iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"--tensorboard-dir {directory} needs the tensorboard package, which cannot be "
                f"imported ({error}); pip install tensorboard, or drop the flag"
            ) from None
        self._config = config
        # Points past the loaded iteration belong to a future that this run replaces.
        self._writer = SummaryWriter(
            directory,
            max_queue=config.tensorboard_queue_size,
            purge_step=iteration + 1 if iteration else None,
        )

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["iteration"] % self._config.tensorboard_log_interval == 0:
                self._add(tags(row, self._config), row)
                if self._config.moe_per_layer_logging:
                    self._add_experts(row)
        self._writer.flush()

    def validation(self, row: Row) -> None:
        self._add(validation_tags(row, self._config), row)
        self._writer.flush()

    def timers(self, iteration: int, samples: int, seconds: Mapping[str, float]) -> None:
        if self._config.log_timers_to_tensorboard:
            for name, value in seconds.items():
                self._writer.add_scalar(f"{name}-time", value, iteration)

    def memory(self, row: Row) -> None:
        for tag, value in memory_tags(row).items():
            self._writer.add_scalar(tag, value, row["iteration"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, scalars: Mapping[str, float], row: Row) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, row["iteration"])
            self._writer.add_scalar(f"{tag} vs samples", value, row["consumed_samples"])

    def _add_experts(self, row: Row) -> None:
        """Add a histogram of each layer whose bars are the tokens of its experts."""
        for layer in row.get("experts", ()):
            tokens = layer["tokens"]
            self._writer.add_histogram_raw(
                f"moe/tokens_layer_{layer['layer']}",
                min=0,
                max=len(tokens),
                num=sum(tokens),
                sum=sum(expert * count for expert, count in enumerate(tokens)),
                sum_squares=sum(expert**2 * count for expert, count in enumerate(tokens)),
                bucket_limits=[expert + 0.5 for expert in range(len(tokens))],
                bucket_counts=tokens,
                global_step=row["iteration"],
            )


class Wandb:
    """A Weights & Biases run, continued by a resume; `WANDB_MODE=offline` needs no network."""

    ID_FILE = "wandb_run_id"

    def __init__(self, config: LoggingConfig, save: str | None, values: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"--wandb-project {config.wandb_project} needs the wandb package, which cannot be "
                f"imported ({error}); pip install wandb, or drop the flag"
            ) from None
        if not config.wandb_exp_name:
            raise UserError("--wandb-project needs a name for the run: give --wandb-exp-name")
        self._config = config
        directory = config.wandb_save_dir or os.path.join(save or ".", "wandb")
        os.makedirs(directory, exist_ok=True)
        known = Path(save or directory) / self.ID_FILE
        run_id = known.read_text().strip() if known.exists() else None
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=directory,
            id=run_id,
            resume="allow",
            config=dict(values),
        )
        if run_id is None:
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(f"{self._run.id}\n")

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["iteration"] % self._config.tensorboard_log_interval == 0:
                scalars = tags(row, self._config) | {"samples vs steps": row["consumed_samples"]}
                self._run.log(scalars, step=row["iteration"])

    def validation(self, row: Row) -> None:
        self._run.log(validation_tags(row, self._config), step=row["iteration"])

    def timers(self, iteration: int, samples: int, seconds: Mapping[str, float]) -> None:
        if self._config.log_timers_to_tensorboard:
            values = {f"{name}-time": value for name, value in seconds.items()}
            self._run.log(values, step=iteration)

    def memory(self, row: Row) -> None:
        self._run.log(memory_tags(row), step=row["iteration"])

    def close(self) -> None:
        self._run.finish()


def open_writers(config: RunConfig, iteration: int) -> list[Writer]:
    """Return every writer that a run asks for; it goes on from ``iteration``."""
    logging, writers = config.logging, list[Writer]()
    if logging.metrics_file:
        writers.append(JsonLines(logging.metrics_file))
    if logging.tensorboard_dir:
        writers.append(TensorBoard(logging.tensorboard_dir, logging, iteration))
    if logging.wandb_project:
        writers.append(Wandb(logging, config.checkpoint.save, config.flatten()))
    return writers
