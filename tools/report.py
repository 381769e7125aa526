"""Draw training runs on one HTML page: loss, gradient norm, rate, speed, memory, restarts.

    python tools/report.py RUN [RUN ...] [--output report.html] [--name LABEL ...]

A RUN is a metrics file (``--metrics-file`` of a training run), a folder that holds one, or a log
with Megatron's training lines, ours or Megatron-LM's own. Several runs are drawn over each other.
The page needs no network and no script: its charts are inline SVG.
"""

import html
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, option
from megatron.core.utils import UserError, atomic_path, check_file
from megatron.training.arguments import parse_tool, run_main

PROGRAM = "report"

COLORS = ("#1f6feb", "#d1442f", "#2f9e44", "#9c36b5", "#e8890c", "#0b7285", "#5c5f66", "#c2255c")
CHARTS = (
    ("lm_loss", "Training loss (nats per token)", False),
    ("valid_loss", "Validation loss (nats per token)", False),
    ("grad_norm", "Gradient norm before clipping", True),
    ("clipped_grad_norm", "Gradient norm after clipping", True),
    ("learning_rate", "Learning rate", False),
    ("tokens_per_second", "Tokens per second", False),
    ("elapsed_ms", "Time per iteration (ms)", False),
    ("memory_bytes", "Memory (bytes)", False),
    ("loss_scale", "Loss scale", True),
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 260, 70, 14, 14, 34
MOST_POINTS = 1500

LOG_FIELDS = {
    "lm_loss": "lm loss",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "elapsed_ms": "elapsed time per iteration (ms)",
    "loss_scale": "loss scale",
    "consumed_samples": "consumed samples",
}
ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
VALIDATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: ([-+.\deEnaif]+)")
NUMBER = r"\s*([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"


@dataclass
class Run:
    """Points of every series by iteration, and where attempts began."""

    name: str
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    experts: tuple[int, list[dict[str, Any]]] | None = None
    """Of the last iteration that tells them: its number, and the loads of each layer's experts."""

    def add(self, key: str, iteration: int, value: object) -> None:
        """Keep a point; what is no number (null, text) is left out."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.series.setdefault(key, []).append((iteration, float(value)))

    def take(self, iteration: int, row: Mapping[str, Any]) -> None:
        """Keep a whole row of metrics."""
        for key, value in row.items():
            if key not in ("iteration", "attempt"):
                self.add(key, iteration, value)
        if row.get("experts"):
            self.experts = iteration, row["experts"]

    def rewind(self, iteration: int) -> None:
        """Drop points from ``iteration`` on: an earlier attempt went further than it saved."""
        for key, points in self.series.items():
            self.series[key] = [point for point in points if point[0] < iteration]


def read_metrics(lines: Iterable[str], run: Run, path: Path) -> None:
    """Read one JSON object per line; a later attempt replaces what it repeats."""
    attempt = last = None
    others: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            iteration = int(row["iteration"])
        except (ValueError, KeyError, TypeError):
            others.append(number)  # a killed run leaves a torn line
            continue
        if row.get("split") == "valid":
            run.add("valid_loss", iteration, row.get("lm_loss"))
            continue
        if "planned_bytes" in row:  # a report of memory
            continue
        resumed = attempt is not None and row.get("attempt", attempt) != attempt
        if resumed or (last is not None and iteration <= last):
            run.rewind(iteration)
            run.restarts.append(iteration)
        attempt, last = row.get("attempt", attempt), iteration
        run.take(iteration, row)
    if others and run.series:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        print(f"{path}:{others[0]}{more}: not a metrics row, left out", file=sys.stderr)


def read_log(lines: Iterable[str], run: Run) -> None:
    """Read Megatron's training and validation lines out of a log."""
    patterns = {key: re.compile(re.escape(name) + ":" + NUMBER) for key, name in LOG_FIELDS.items()}
    last = None
    for line in lines:
        if (match := VALIDATION.search(line)) is not None:
            run.add("valid_loss", int(match[1]), float(match[2]))
        elif (match := ITERATION.search(line)) is not None:
            iteration = int(match[1])
            if last is not None and iteration <= last:
                run.rewind(iteration)
                run.restarts.append(iteration)
            last = iteration
            for key, pattern in patterns.items():
                if (value := pattern.search(line)) is not None:
                    run.add(key, iteration, float(value[1]))


def read_run(path: Path, name: str) -> Run:
    """Read a metrics file, a folder that holds one, or a log.

    Raises:
        UserError: there is no such file, or nothing in it that could be drawn.
    """
    if path.is_dir():
        found = sorted(path.rglob("*.jsonl"))
        if len(found) != 1:
            raise UserError(f"{path} holds {len(found)} metrics files (*.jsonl); name one")
        path = found[0]
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a metrics file, its folder, or a log")
    run = Run(name)
    with path.open(encoding="utf-8", errors="replace") as lines:
        if next((line for line in lines if line.strip()), "").lstrip().startswith("{"):
            lines.seek(0)
            read_metrics(lines, run, path)
        else:
            lines.seek(0)
            read_log(lines, run)
    if not run.series:
        raise UserError(
            f"{path} has neither metrics rows nor training lines; give the file that "
            "--metrics-file wrote, or the training log"
        )
    return run


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most `MOST_POINTS` points, keeping each stretch's lowest and highest."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / (MOST_POINTS / 2))
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that span [low, high]."""
    raw = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between 10**low and 10**high."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [value for value in values if low <= math.log10(value) <= high]
    return inside if len(inside) <= 8 else [v for v in inside if f"{v:e}"[0] == "1"]


@dataclass(frozen=True)
class Scale:
    """From data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    logarithmic: bool

    def place(self, iteration: float, value: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        value = math.log10(value) if self.logarithmic else value
        across = (iteration - self.x[0]) / (self.x[1] - self.x[0])
        up = (value - self.y[0]) / (self.y[1] - self.y[0])
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )


def scale_of(curves: list[list[tuple[int, float]]], logarithmic: bool) -> Scale:
    """Return a scale that shows every point, with some air above and below."""
    xs = [x for curve in curves for x, _ in curve]
    ys = [math.log10(y) if logarithmic else y for curve in curves for _, y in curve]
    low, high = min(ys), max(ys)
    air = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Scale(
        (min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1),
        (low - air, high + air),
        logarithmic,
    )


def chart(key: str, title: str, logarithmic: bool, runs: list[Run]) -> str:
    """Return one chart as SVG, or nothing when no run has the series."""
    drawn = []
    for number, run in enumerate(runs):
        points = [p for p in run.series.get(key, []) if math.isfinite(p[1])]
        if points:
            drawn.append((number, run, thin(points)))
    if not drawn:
        return ""
    logarithmic = logarithmic and all(y > 0 for _, _, points in drawn for _, y in points)
    scale = scale_of([points for _, _, points in drawn], logarithmic)
    parts = [grid_lines(scale)]
    for number, run, points in drawn:
        color = COLORS[number % len(COLORS)]
        for iteration in run.restarts:
            if scale.x[0] <= iteration <= scale.x[1]:
                x = scale.place(iteration, 10 ** scale.y[0] if logarithmic else scale.y[0])[0]
                parts.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                    f'stroke="{color}" stroke-dasharray="2 4"><title>resumed at iteration '
                    f"{iteration}</title></line>"
                )
        path = " ".join("{:.1f},{:.1f}".format(*scale.place(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) <= 60:
            parts += [dot(*scale.place(*point), color, *point) for point in points]
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg></figure>'
    )


def dot(x: float, y: float, color: str, iteration: int, value: float) -> str:
    """Return a point that tells its value when pointed at."""
    title = f"<title>iteration {iteration}: {value:.6g}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}">{title}</circle>'


def grid_lines(scale: Scale) -> str:
    """Return the axes' lines and numbers."""
    parts = []
    for value in log_ticks(*scale.y) if scale.logarithmic else ticks(*scale.y):
        y = scale.place(scale.x[0], value)[1]
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    base = 10 ** scale.y[0] if scale.logarithmic else scale.y[0]
    for tick in ticks(*scale.x):
        x = scale.place(tick, base)[0]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{tick:g}</text>')
    return "".join(parts)


def summary(runs: list[Run]) -> str:
    """Return a table of each run's last values."""
    rows = []
    for number, run in enumerate(runs):
        every = [point for points in run.series.values() for point in points]
        cells = [str(max(iteration for iteration, _ in every)), str(len(run.restarts))]
        for key in ("lm_loss", "valid_loss", "tokens_per_second"):
            points = run.series.get(key)
            cells.append(f"{points[-1][1]:.6g}" if points else "–")
        best = run.series.get("valid_loss")
        cells.append(f"{min(value for _, value in best):.6g}" if best else "–")
        color = COLORS[number % len(COLORS)]
        name = f'<td><b style="color:{color}">■</b> {html.escape(run.name)}</td>'
        rows.append(f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    heads = (
        "run",
        "last iteration",
        "restarts",
        "loss",
        "validation loss",
        "tokens/s",
        "best validation loss",
    )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(rows)}</table>"


def expert_loads(run: Run) -> str:
    """Return a table of the tokens of each expert, a row for each layer; "" without experts.

    A cell is the darker, the closer it is to the layer's fullest.
    """
    if run.experts is None:
        return ""
    iteration, layers = run.experts
    rows = []
    for layer in layers:
        tokens = layer["tokens"]
        most = max(*tokens, 1)
        cells = (
            f'<td style="background:rgba(31,111,235,{0.6 * count / most:.2f})">{int(count)}</td>'
            for count in tokens
        )
        rows.append(f"<tr><th>layer {int(layer['layer'])}</th>{''.join(cells)}</tr>")
    title = f"{html.escape(run.name)}: tokens of each expert in iteration {iteration}"
    return f"<h2>{title}</h2><div class=wide><table>{''.join(rows)}</table></div>"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1640px; padding: 0 1rem }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1.2rem }
figure { margin: 0; border: 1px solid #d8dbe0; border-radius: 8px; padding: .6rem }
figcaption { font-weight: 600; padding-left: .4rem }
svg text { font: 11px system-ui, sans-serif; fill: #5c5f66 } .grid { stroke: #eceef1 }
table { border-collapse: collapse; margin-bottom: 1.2rem }
.wide { overflow-x: auto } h2 { font-size: 1.1rem }
td, th { padding: .3rem .9rem; border-bottom: 1px solid #e4e7eb; text-align: left }
"""


def page(runs: list[Run]) -> str:
    """Return the whole report."""
    known = {key for key, _, _ in CHARTS}
    hidden = {"consumed_samples", "consumed_tokens", "first_sample", "last_sample", "skipped"}
    others = sorted({key for run in runs for key in run.series} - known - hidden)
    charts = [*CHARTS, *((key, key.replace("_", " "), False) for key in others)]
    drawn = "".join(chart(key, title, log, runs) for key, title, log in charts)
    loads = "".join(map(expert_loads, runs))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Training report</title>'
        f"<style>{STYLE}</style><h1>Training report</h1>{summary(runs)}<main>{drawn}</main>{loads}"
        "</html>"
    )


class ReportConfig(Config):
    """What to draw."""

    runs: tuple[str, ...] = option((), metavar="RUN")
    """Metrics files, folders that hold one, or logs; may also come first, without the flag."""

    name: tuple[str, ...] = option((), metavar="LABEL")
    """Labels of the runs, in order; by default their paths."""

    output: str = option("report.html", metavar="FILE")
    """The page."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError(
                "name what to draw: a metrics file (of --metrics-file), a folder that holds one, "
                "or a training log"
            )
        if len(self.name) > len(self.runs):
            raise UserError(f"--name gives {len(self.name)} labels for {len(self.runs)} runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and return the exit code.

    Raises:
        UserError: something that the user can fix.
    """
    config = parse_tool(argv, ReportConfig, PROGRAM, leading="runs").config
    check_file("--output", config.output)
    if not Path(config.output).absolute().parent.is_dir():
        raise UserError(f"--output {config.output}: there is no such folder; make it first")
    names = [*config.name, *config.runs[len(config.name) :]]
    try:
        runs = [read_run(Path(path), name) for path, name in zip(config.runs, names, strict=True)]
    except OSError as error:
        raise UserError(str(error)) from None
    with atomic_path(config.output) as path:
        path.write_text(page(runs), encoding="utf-8")
    print(f"{PROGRAM}: wrote {config.output}")
    return 0


if __name__ == "__main__":
    run_main(main, PROGRAM)
