"""Choices that only exist on CUDA: what stands for them on the CPU, and where they are refused."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from megatron.core.config import Config, as_words
from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins
from megatron.training.wording import flag

T = TypeVar("T", bound=Config)


# Choices that only exist on CUDA: name, values, what stands for them on the CPU.
_CUDA_ONLY = (
    ("process", "distributed_backend", ("nccl",), "gloo"),
    ("model", "transformer_impl", ("transformer_engine", "apex"), "auto"),
    ("model", "attention_backend", ("flash", "fused"), "auto"),
    ("model.fusion", "cross_entropy_fusion_impl", ("te",), "native"),
    ("model.moe", "moe_token_dispatcher_type", ("flex",), "alltoall"),
)


NCCL_ONLY = (
    "nccl_communicator_config_path",
    "high_priority_stream_groups",
    "flight_recorder_dump_path",
)
"""Settings of NCCL, which have no effect under --device cpu."""


def cuda_only(config: RunConfig) -> list[str]:
    """Return the choices of a run that only exist on CUDA, as flags."""
    return [words for words, *_ in _chosen(config)]


def _chosen(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each choice as a flag, where it stands, and what stands for it on the CPU."""
    for part, name, values, substitute in _CUDA_ONLY:
        chosen = attrgetter(f"{part}.{name}")(config)
        if chosen in values and (part != "model.moe" or config.model.moe.num_experts is not None):
            yield f"{flag(name)} {chosen}", f"{part}.{name}", substitute


def _with(config: T, path: str, value: object) -> T:
    """Return a config with another value for one setting of those that it nests."""
    name, _, rest = path.partition(".")
    changed = _with(getattr(config, name), rest, value) if rest else value
    return replace(config, **{name: changed})


def map_to_cpu(config: RunConfig, origins: Origins) -> tuple[RunConfig, list[str]]:
    """Return the run with the CPU reference for CUDA's choices, and a line that lists them.

    Only ``--device cpu`` asks for this; any other run is returned as it is.
    """
    chosen = list(_chosen(config))
    if config.process.device != "cpu" or not chosen:
        return config, []
    for _, path, substitute in chosen:
        config = _with(config, path, substitute)
    listed = ", ".join(f"{words} ({substitute})" for words, _, substitute in chosen)
    return config, [f"--device cpu: the CPU reference stands in for {listed}"]


def check_device(config: RunConfig, cuda_is_available: bool) -> None:
    """Refuse a device, or a choice that needs one, that this machine does not have.

    Raises:
        UserError: the run needs CUDA and there is none.
    """
    process = config.process
    needs = cuda_only(config)
    if process.world_size > 1 and process.device != "cpu" and process.distributed_backend != "gloo":
        needs += [
            f"{flag(name)} {as_words(value)}"
            for name, value in process.flatten().items()
            if name in NCCL_ONLY and value
        ]
    if process.device == "cuda":
        needs = ["--device cuda", *needs]
    if needs and not cuda_is_available:
        raise UserError(
            f"{', '.join(needs)}: no CUDA device here; add --device cpu to use the CPU reference"
        )
