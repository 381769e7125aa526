"""What a run is told about its processes: where they compute and how they are connected."""

from typing import Literal

from megatron.core.config import Config, check_at_least, check_at_most, option

MOST_PROCESSES = 10_000_000
"""Of a planned run: a hundred times the largest ones."""


class FlightRecorderConfig(Config):
    """What NCCL's flight recorder keeps of the last collectives, for the case of a hang."""

    flight_recorder_dump_path: str | None = option(None, metavar="PREFIX")
    """Record collectives, and write each rank's to PREFIX followed by its rank when one times out;
    read by torch's ``torchfrtrace``."""

    flight_recorder_trace_buffer_size: int = option(2000)
    """Collectives that a rank remembers."""

    flight_recorder_dump_on_timeout: bool = option(
        True, aliases={"--disable-flight-recorder-dump-on-timeout": False}
    )
    """Write them when a collective times out."""

    flight_recorder_include_stack_trace: bool = option(False)
    """Write where in the program each was called."""

    flight_recorder_include_only_active: bool = option(
        True, aliases={"--disable-flight-recorder-include-only-active": False}
    )
    """Write only those that have not ended."""

    flight_recorder_extra_dump_on_exec: bool = option(
        True, aliases={"--disable-flight-recorder-extra-dump-on-exec": False}
    )
    """Write them also when a process fails otherwise."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "flight_recorder_trace_buffer_size")


class ProcessConfig(Config):
    """Devices, processes and their connections."""

    device: Literal["auto", "cpu", "cuda"] = option("auto")
    """Where to compute; ``auto`` is CUDA where there is a device, else the CPU."""

    distributed_backend: Literal["auto", "nccl", "gloo"] = option("auto")
    """Library for collectives; ``auto`` is NCCL on CUDA and gloo on the CPU."""

    distributed_timeout_minutes: int = option(10)
    """Minutes after which a collective that nobody answers is an error."""

    distributed_timeout_seconds_after_init: int | None = option(None)
    """The same in seconds once the first iteration is done, when nothing is slow any more."""

    nccl_communicator_config_path: str | None = option(None, metavar="FILE")
    """YAML with settings of NCCL's communicators by group, such as ``dp: {max_ctas: 16}``."""

    high_priority_stream_groups: tuple[str, ...] = option((), metavar="GROUP")
    """Groups that communicate on CUDA streams of high priority, such as ``tp`` or ``dp_cp``."""

    world_size: int = option(1, flag="--dry-run-world-size")
    """Processes that a dry run plans for; a run takes this from its launcher."""

    flight_recorder: FlightRecorderConfig

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            "world_size",
            "distributed_timeout_minutes",
            "distributed_timeout_seconds_after_init",
        )
        check_at_most(self, MOST_PROCESSES, "world_size")
