"""Progress on a terminal and in a log file."""

import io

import pytest

from megatron.core import progress
from megatron.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_bar_on_a_terminal_and_lines_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for stream in (Terminal(), io.StringIO()):
        shown = Progress(1000, every=10, stream=stream)
        clock.now += 3
        shown.update(250, 10, lambda seconds: f"10 records in {seconds:.0f} s")
        shown.close()
        text = stream.getvalue()
        assert "25.0% | 10 records in 3 s | 0:00:09 left" in text
        assert ("\r" in text) == stream.isatty()
        assert text.count("\n") == (0 if stream.isatty() else 1)
        assert ("[#####               ]" in text) == stream.isatty()


def test_a_log_gets_a_line_every_so_many_steps_and_one_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    shown = Progress(100, every=10, stream=stream)
    for step in range(1, 101):
        clock.now += 1 / 16
        shown.update(step, step, lambda seconds: "going on")
    shares = [float(line.split("%")[0]) for line in stream.getvalue().splitlines()]
    assert shares == list(range(10, 101, 16))
