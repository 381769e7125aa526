"""What process groups are made with; NCCL itself is not here, so its options are a fake's."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.grid import ParallelConfig
from megatron.core.mesh import GroupOptions, Mesh
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.process_config import FlightRecorderConfig, ProcessConfig
from megatron.training.processes import setup
from megatron.training.processes.flight_recorder import record_collectives
from megatron.training.processes.group_settings import group_settings, read_settings

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data"
).split()


def process(**given: Any) -> ProcessConfig:
    return ProcessConfig.resolve(**given)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    return str(path)


def test_settings_come_from_the_file_and_from_the_list_of_groups(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "dp_cp:\n  max_ctas: 16\n  min_ctas: 4\n  net_name: Socket\n"
        "hcp: {cga_cluster_size: 2}\ntp_dp: {max_ctas: 1}\n",
    )
    config = process(
        nccl_communicator_config_path=path, high_priority_stream_groups=("dp_cp", "tp", "gtp")
    )
    assert group_settings(config) == {
        "dp_cp": {
            "max_ctas": 16,
            "min_ctas": 4,
            "net_name": "Socket",
            "is_high_priority_stream": True,
        },
        "cp_inner": {"cga_cluster_size": 2},
        "cp_outer": {"cga_cluster_size": 2},
        "tp": {"is_high_priority_stream": True},
    }
    # With several instances of the optimizer, Megatron-LM's group is that of one of them.
    assert set(group_settings(process(high_priority_stream_groups=("intra_dp_cp",)))) == {
        "dp_cp",
        "dp_inner",
    }
    assert (
        group_settings(process())
        == {}
        == group_settings(process(nccl_communicator_config_path=written(tmp_path, "")))
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp: [1", ("not YAML",)),
        ("- dp", ("settings by group",)),
        ("dp: 3", ("dp must hold settings",)),
        ("dpp: {max_ctas: 1}", ("no group dpp", "did you mean pp or dp")),
        ("zzz: {max_ctas: 1}", ("no group zzz", "choose from tp, cp")),
        ("dp: {max_cta: 1}", ("no setting max_cta", "cga_cluster_size, min_ctas, max_ctas")),
        ("dp: {max_ctas: 0}", ("max_ctas", "at least 1", "not 0")),
        ("dp: {max_ctas: true}", ("max_ctas", "not True")),
        ("dp: {max_ctas: '8'}", ("max_ctas", "not '8'")),
        ("dp: {net_name: 3}", ("net_name", "not 3")),
        ("dp: {is_high_priority_stream: 1}", ("true or false, not 1",)),
        ("dp: {min_ctas: 9, max_ctas: 8}", ("min_ctas (9) is above max_ctas (8)",)),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(
    text: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_settings(path)
    for part in ("--nccl-communicator-config-path", path, *parts):
        assert part in str(caught.value)
    # On the CPU and in a plan just as well.
    for more in (["--device", "cpu"], ["--dry-run"]):
        with pytest.raises(UserError, match="--nccl-communicator-config-path"):
            parse([*RUN, *more, "--nccl-communicator-config-path", path], world_size=2)


def test_a_missing_file_stops_a_run_and_not_a_plan(tmp_path: Path) -> None:
    flags = ["--nccl-communicator-config-path", str(tmp_path / "absent.yaml")]
    with pytest.raises(UserError, match="absent.yaml: cannot be read"):
        parse([*RUN, *flags], world_size=2)
    parse([*RUN, *flags, "--dry-run"])
    with pytest.raises(UserError, match="no group tpp; did you mean tp"):
        parse([*RUN, *flags, "--dry-run", "--high-priority-stream-groups", "tpp"])


class FakeOptions:
    """What `ProcessGroupNCCL.Options` lets one set."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self._timeout = timedelta(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], dict[str, Any]]]:
    """Let a world of 8 make its groups on a fake backend, and return what each was made with."""
    calls: list[tuple[list[int], dict[str, Any]]] = []

    def new_group(ranks: list[int], **given: Any) -> object:
        calls.append((ranks, given))
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    fake = SimpleNamespace(Options=FakeOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    return calls


def layout() -> ParallelConfig:
    return ParallelConfig.resolve(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def test_each_group_gets_its_settings_and_the_time_limit(
    made: list[tuple[list[int], dict[str, Any]]], tmp_path: Path
) -> None:
    path = written(tmp_path, "dp_cp: {max_ctas: 16, cga_cluster_size: 2}\npp: {net_name: IB}\n")
    config = process(
        nccl_communicator_config_path=path,
        high_priority_stream_groups=("tp",),
        distributed_timeout_minutes=3,
    )
    options = setup.group_options(config, "nccl")
    Mesh.create(layout(), torch.device("cpu"), options=options)
    limit = timedelta(minutes=3, seconds=30)  # after the watchdog, which knows who is to blame
    assert {given["timeout"] for _, given in made} == {limit}
    by_axis: dict[str, set[tuple[Any, ...]]] = {}
    for ranks, given in made:
        assert len(ranks) > 1
        found = given.get("pg_options")
        if found is None:
            shown: tuple[Any, ...] = ()
        else:
            assert found._timeout == limit
            shown = (found.is_high_priority_stream, *sorted(vars(found.config).items()))
        by_axis.setdefault(given["group_desc"], set()).add(shown)
    # Of axes with the same ranks, those with the same settings share a group.
    assert by_axis == {
        "tp": {(True,)},
        "dp+edp": {()},
        "pp": {(False, ("net_name", "IB"))},
        "dp_cp": {(False, ("cga_cluster_size", 2), ("max_ctas", 16))},
        "etp+etp_ep": {()},
        "ends": {()},
    }


def test_on_the_cpu_groups_get_the_time_limit_alone(
    made: list[tuple[list[int], dict[str, Any]]],
) -> None:
    config = process(high_priority_stream_groups=("tp",), distributed_timeout_minutes=3)
    Mesh.create(layout(), torch.device("cpu"), options=setup.group_options(config, "gloo"))
    assert made and all(
        given == {"timeout": timedelta(minutes=3, seconds=30), "group_desc": given["group_desc"]}
        for _, given in made
    )


def test_without_options_torch_chooses() -> None:
    assert GroupOptions().arguments("tp", "etp") == {"timeout": None, "group_desc": "tp+etp"}


def test_the_flight_recorder_is_set_up_where_the_environment_says_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    environ: dict[str, str] = {}
    record_collectives(FlightRecorderConfig.resolve(), environ, said.append)
    assert environ == {} and said == []
    config = FlightRecorderConfig.resolve(
        flight_recorder_dump_path=str(tmp_path),
        flight_recorder_trace_buffer_size=50,
        flight_recorder_include_stack_trace=True,
        flight_recorder_dump_on_timeout=False,
    )
    record_collectives(config, environ, said.append)
    assert environ == {
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "collectives_rank_"),
        "TORCH_FR_BUFFER_SIZE": "50",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_INCLUDE_STACK_TRACE": "1",
        "TORCH_INCLUDE_ONLY_ACTIVE": "1",
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1",
    }
    assert "TORCH_FR_BUFFER_SIZE=50" in said[0]


def test_what_the_environment_says_of_the_flight_recorder_stays() -> None:
    said: list[str] = []
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_INCLUDE_STACK_TRACE": "0"}
    config = FlightRecorderConfig.resolve(flight_recorder_dump_path="/x/trace_")
    record_collectives(config, environ, said.append)
    assert environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7" and "TORCH_FR_BUFFER_SIZE" not in environ
    assert environ["TORCH_INCLUDE_STACK_TRACE"] == "0"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == "/x/trace_"
    assert "already set: TORCH_FR_BUFFER_SIZE, TORCH_INCLUDE_STACK_TRACE" in said[0]
