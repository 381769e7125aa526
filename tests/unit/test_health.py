"""What stops a run: spikes, the clock, signals, a file."""

import json
import os
import signal
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from megatron.training import stopping
from megatron.training.failing.failure import RunFailed
from megatron.training.health import Health
from megatron.training.log_config import HealthConfig
from megatron.training.loop_config import TrainingConfig
from megatron.training.records import run_status
from megatron.training.signals import ExitSignal
from megatron.training.stopping import Stopper

SAMPLES = range(8, 12)


def training(**changes: object) -> TrainingConfig:
    values = {"micro_batch_size": 1, "global_batch_size": 1, **changes}
    return TrainingConfig(**values)  # type: ignore[arg-type]


def stopper(save: Path | None = None, now: float = 1000.0, **changes: object) -> Stopper:
    return Stopper(
        training(**changes),
        save=str(save) if save else None,
        started=0.0,
        environ={"SLURM_JOB_END_TIME": "2000"},
        now=lambda: now,
    )


def test_a_spike_stops_only_when_asked_and_after_a_start() -> None:
    health = Health(HealthConfig(check_for_spiky_loss=True))
    for iteration, loss in enumerate([50.0] + 10 * [5.0] + [499.0], start=1):
        health.check_spike(loss, iteration, SAMPLES)
        health.finite(loss)
    with pytest.raises(RunFailed, match="iteration 13: loss 5000 .* samples 8 to 11"):
        health.check_spike(5000.0, 13, SAMPLES)
    quiet = Health(HealthConfig())
    for iteration in range(20):
        quiet.check_spike(1e9 if iteration == 19 else 1.0, iteration, SAMPLES)
        quiet.finite(1.0)


def test_a_good_iteration_resets_the_count_of_bad_ones() -> None:
    health = Health(HealthConfig(skip_non_finite_iterations=1))
    for iteration in (1, 3, 5):
        health.non_finite("loss is nan", iteration, SAMPLES)
        health.finite(1.0)
    health.non_finite("loss is nan", 7, SAMPLES)
    with pytest.raises(RunFailed, match="2 in a row"):
        health.non_finite("loss is nan", 8, SAMPLES)


def test_exit_interval_and_agreed_reasons() -> None:
    one = stopper(exit_interval=4)
    nothing = (False, False, False)
    assert one.reason(3, nothing) is None
    assert one.reason(8, nothing) == "interval"
    assert one.reason(3, (True, True, False)) == "signal"
    assert one.reason(3, (False, False, True)) == "stop file"


def test_minutes_count_from_the_start() -> None:
    assert stopper(now=59.0, exit_duration_in_mins=1).seen() == (False, False, False)
    assert stopper(now=60.0, exit_duration_in_mins=1).seen() == (False, True, False)


def test_auto_keeps_time_for_a_save(tmp_path: Path) -> None:
    before = stopper(tmp_path, now=1850.0, exit_duration_in_mins="auto")
    assert before.seen()[1] is False  # 2 minutes are kept before a save was measured
    assert stopper(tmp_path, now=1881.0, exit_duration_in_mins="auto").seen()[1] is True
    slow = stopper(tmp_path, now=1450.0, exit_duration_in_mins="auto")
    slow.saved(400.0)
    assert slow.seen()[1] is True  # 1.5 x 400 s before the end is 1400


def test_auto_without_a_job_is_refused() -> None:
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME"):
        Stopper(training(exit_duration_in_mins="auto"), save=None, started=0.0, environ={})


def test_a_warning_when_the_job_ends_before_the_next_save(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_END_TIME": "2000"}
    one = stopper(tmp_path, now=1000.0)
    assert one.warning(900.0, environ) is None
    warning = one.warning(1100.0, environ)
    assert warning is not None and "17 minutes" in warning and "--save-interval" in warning
    assert one.warning(1100.0, {}) is None
    assert stopper(tmp_path, exit_duration_in_mins="auto").warning(1100.0, environ) is None


def test_a_stop_file_is_seen_and_obeyed_once(tmp_path: Path) -> None:
    one = stopper(tmp_path)
    assert one.seen() == (False, False, False)
    (tmp_path / stopping.STOP_FILE).touch()
    assert one.seen() == (False, False, True)
    one.obey()
    assert one.seen() == (False, False, False)
    assert not stopping.clear_stop_file(str(tmp_path))


def test_a_later_signal_has_its_default_action_and_an_echo_none() -> None:
    """With a signal that does nothing by default, so that the test lives on."""
    original, now = signal.getsignal(signal.SIGWINCH), 100.0
    with ExitSignal(signal.SIGWINCH, lambda: now) as exit_signal:
        assert not exit_signal.received
        os.kill(os.getpid(), signal.SIGWINCH)
        assert exit_signal.received
        now += 1.0
        os.kill(os.getpid(), signal.SIGWINCH)
        assert signal.getsignal(signal.SIGWINCH) == exit_signal._handle
        now += 10.0
        os.kill(os.getpid(), signal.SIGWINCH)
        assert signal.getsignal(signal.SIGWINCH) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGWINCH) == original


@pytest.mark.parametrize(
    ("reason", "resubmit"),
    [
        ("complete", False),
        ("signal", True),
        ("duration", True),
        ("failure", False),
        ("interrupted", False),
    ],
)
def test_run_status_says_whether_to_resubmit(
    reason: run_status.Reason, resubmit: bool, tmp_path: Path
) -> None:
    run_status.write(str(tmp_path), reason=reason, iteration=3, checkpoint="x", attempt=2)
    written = json.loads((tmp_path / "run_status.json").read_text())
    assert written["resubmit"] is resubmit
    assert run_status.attempt(str(tmp_path)) == 2
    assert run_status.attempt(str(tmp_path / "elsewhere")) is None
    assert run_status.is_complete(str(tmp_path)) == (reason == "complete")
    (tmp_path / "run_status.json").write_text("[]")
    assert run_status.attempt(str(tmp_path)) is None
    assert not run_status.is_complete(str(tmp_path))
