"""The report reads metrics files and Megatron's logs, and says what it cannot read."""

import json
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from tools import report

LOG = """\
 [2026-01-31 12:00:00] iteration       10/     100 | consumed samples:          320 | \
elapsed time per iteration (ms): 123.4 | learning rate: 1.000000E-04 | global batch size:    32 | \
lm loss: 8.123456E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |
 validation loss at iteration 10 | lm loss value: 7.5E+00 | lm loss PPL: 1.8E+03 |
something else
 [2026-01-31 12:00:01] iteration       20/     100 | consumed samples:          640 | \
elapsed time per iteration (ms): 100.0 | learning rate: 2.0E-04 | lm loss: nan | grad norm: inf |
"""


def test_megatrons_log_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG)
    run = report.read_run(path, "log")
    assert run.series["lm_loss"][0] == (10, 8.123456)
    assert run.series["grad_norm"][0] == (10, 1.234)
    assert run.series["valid_loss"] == [(10, 7.5)]
    assert run.series["elapsed_ms"] == [(10, 123.4), (20, 100.0)]
    assert "<polyline" in report.page([run])


def write_metrics(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": i, "lm_loss": 9.0, "attempt": 0} for i in (1, 2, 3)]
    rows += [{"iteration": i, "lm_loss": 5.0, "attempt": 1} for i in (3, 4)]
    write_metrics(path, rows)
    run = report.read_run(tmp_path, "folder")
    assert run.series["lm_loss"] == [(1, 9.0), (2, 9.0), (3, 5.0), (4, 5.0)]
    assert run.restarts == [3]


def test_tokens_of_each_expert_are_those_of_the_last_iteration(tmp_path: Path) -> None:
    def row(iteration: int, tokens: list[int]) -> dict[str, object]:
        layer = {"layer": 2, "tokens": tokens, "imbalance": 1.5, "idle": 0.0}
        return {"iteration": iteration, "lm_loss": 2.0, "experts": [layer]}

    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [row(1, [11, 13]), row(2, [30, 0])])
    page = report.page([report.read_run(path, "a<b")])
    assert "a&lt;b: tokens of each expert in iteration 2" in page and "layer 2" in page
    assert '0.60)">30</td>' in page and '0.00)">0</td>' in page and ">13</td>" not in page
    write_metrics(path, [{"iteration": 1, "lm_loss": 2.0}])
    assert "tokens of each expert" not in report.page([report.read_run(path, "dense")])


def test_null_and_torn_rows_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [{"iteration": 1, "lm_loss": 2.0, "mfu": None}])
    path.write_text(path.read_text() + '{"iteration": 2, "lm_lo')
    run = report.read_run(path, "torn")
    assert run.series == {"lm_loss": [(1, 2.0)]}
    assert "metrics.jsonl:2" in capsys.readouterr().err


def test_a_page_of_two_runs_names_both_and_escapes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_metrics(tmp_path / f"{name}.jsonl", [{"iteration": i, "lm_loss": i} for i in (1, 2)])
    output = tmp_path / "report.html"
    arguments = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--name", "<first>"]
    assert report.main([*arguments, "--output", str(output)]) == 0
    text = output.read_text()
    assert "&lt;first&gt;" in text and "<first>" not in text and "b.jsonl" in text


@pytest.mark.parametrize("content", [None, b"nothing to see\n", b"\xff\xfe\x00"])
def test_what_is_no_run_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="x.log"):
        report.main([str(path), "--output", str(tmp_path / "r.html")])
    assert not (tmp_path / "r.html").exists()


def test_more_names_than_runs_are_refused() -> None:
    with pytest.raises(UserError, match="2 labels for 1 runs"):
        report.main(["a.jsonl", "--name", "one", "two"])


def test_long_runs_keep_their_spikes() -> None:
    points = [(i, 1.0) for i in range(100_000)]
    points[54_321] = (54_321, 99.0)
    thinned = report.thin(points)
    assert len(thinned) <= report.MOST_POINTS + 2 and (54_321, 99.0) in thinned


def test_wrong_use_is_said_once_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="name what to draw: a metrics file.*or a training log"):
        report.main([])
    settings = tmp_path / "settings.json"
    settings.write_text('{\n  "a": 1,\n  "b": 2\n}\n')
    with pytest.raises(UserError, match="neither metrics rows nor training lines"):
        report.main([str(settings), "--output", str(tmp_path / "r.html")])
    assert capsys.readouterr().err == ""
    write_metrics(tmp_path / "m.jsonl", [{"iteration": 1, "lm_loss": 2.0}])
    with pytest.raises(UserError, match="there is no such folder"):
        report.main([str(tmp_path / "m.jsonl"), "--output", str(tmp_path / "out" / "r.html")])
    assert not (tmp_path / "out").exists()
