"""Which processes print an error that all of them have."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron.training.processes import startup_error


class Printed:
    """What goes to stderr, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def write(self, text: str) -> None:
        self.pieces.append(text)

    def flush(self) -> None:
        pass


def printed(
    monkeypatch: pytest.MonkeyPatch, processes: Sequence[tuple[Mapping[str, str], str]]
) -> list[str]:
    """Return what processes print that find errors at the same time: environment and text."""
    stderr: Any = Printed()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", stderr)
        patched.setattr(startup_error, "WAIT", 5.0)
        threads = [
            threading.Thread(target=startup_error.print_once, args=(text, environ))
            for environ, text in processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sorted(stderr.pieces)


def under_torchrun(node: int, local_rank: int, port: int) -> dict[str, str]:
    """Return the environment of one of two processes of one of two machines."""
    return {
        "RANK": str(2 * node + local_rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(node),
        "TORCHELASTIC_RUN_ID": "of the test",
        "MASTER_ADDR": "a-host-that-nobody-asks.invalid",
        "MASTER_PORT": str(port),
    }


def test_under_torchrun_each_machine_prints_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "error: --a is wrong\n"
    places = [under_torchrun(node, rank, 4711) for node in (0, 1) for rank in (1, 0)]
    assert printed(monkeypatch, [(place, wrong) for place in places]) == [wrong] * 2


def test_another_error_is_printed_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["error: --a is wrong\n", "error: there is no device 1\n"]
    places = [under_torchrun(0, rank, 4712) for rank in (0, 1)]
    assert printed(monkeypatch, list(zip(places, texts, strict=True))) == texts


def test_one_that_is_alone_with_its_error_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "error: there is no device 1\n"
    assert printed(monkeypatch, [(under_torchrun(1, 1, 4713), text)]) == [text]
