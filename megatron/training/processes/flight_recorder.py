"""NCCL's flight recorder: torch reads its settings from the environment, before the first group."""

from collections.abc import MutableMapping
from pathlib import Path

from megatron.core.utils import Say
from megatron.training.process_config import FlightRecorderConfig

DUMP = "TORCH_FR_DUMP_TEMP_FILE"
FORMER = {
    DUMP: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}
"""Names that torch still reads."""


def record_collectives(
    config: FlightRecorderConfig, environ: MutableMapping[str, str], say: Say
) -> None:
    """Set what the flags ask for and the environment does not say, and say what was set.

    Without --flight-recorder-dump-path nothing is set.
    """
    path = config.flight_recorder_dump_path
    if path is None:
        return
    # A folder gets files of a name of their own; torch appends the rank.
    prefix = str(Path(path) / "collectives_rank_") if Path(path).is_dir() else path
    wanted = {
        DUMP: prefix,
        "TORCH_FR_BUFFER_SIZE": config.flight_recorder_trace_buffer_size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": int(config.flight_recorder_dump_on_timeout),
        "TORCH_INCLUDE_STACK_TRACE": int(config.flight_recorder_include_stack_trace),
        "TORCH_INCLUDE_ONLY_ACTIVE": int(config.flight_recorder_include_only_active),
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": int(config.flight_recorder_extra_dump_on_exec),
    }
    kept = [name for name in wanted if name in environ or FORMER.get(name) in environ]
    new = {name: str(value) for name, value in wanted.items() if name not in kept}
    environ.update(new)
    texts = [f"{name}={value}" for name, value in new.items()]
    already = f" (already set: {', '.join(kept)})" if kept else ""
    say(f"--flight-recorder-dump-path: set {', '.join(texts) or 'nothing'}{already}")
