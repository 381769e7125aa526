"""Draw pipeline schedules on one time scale: who works when, who waits, who holds how much.

    python tools/show_schedule.py [--schedules 1f1b,zb-v] [--stages 4] [--microbatches 8]
        [--chunks 2] [--forward 1] [--backward 2] [--transfer 0] [--output FILE.html]

One row per rank; numbers are microbatches, from 0. Blank stretches are bubble: the dashed line is
where a pipeline that never waits would end. At the right, each rank's most microbatches alive at
once, which is what its activations need. Costs are of a microbatch through all that a rank holds,
so each schedule does the same work. Without --output only the table is printed; a file called .svg
gets the picture alone. Schedules called combined- are those of --overlap-moe-expert-parallel-comm:
a pair is a box in two halves.
"""

import argparse
import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.pipeline_parallel.actions import Action, parts
from megatron.core.pipeline_parallel.schedules import COMBINED, SCHEDULES, Schedule, make_schedule
from megatron.core.pipeline_parallel.simulator import Costs, Timeline, simulate
from megatron.core.utils import UserError, atomic_path, check_file

# Of the first chunk and of later ones.
COLORS = {
    "forward": ("#2f6db5", "#8fbbea"),
    "backward": ("#2c8a57", "#8fd0ac"),
    "backward_input": ("#0f8a8f", "#7fd3d2"),
    "backward_weight": ("#d9861a", "#f6cd8b"),
}
WORDS = {
    "forward": "forward",
    "backward": "backward (both gradients)",
    "backward_input": "input gradient",
    "backward_weight": "weight gradient",
}
WHAT = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward",
    "interleaved": "1f1b, {chunks} chunks per rank",
    "zb-h1": "weight gradients fill the bubble",
    "zb-v": "two chunks per rank in a V",
    "combined-1f1b": "a forward beside a backward",
    "combined-interleaved": "a forward beside a backward, {chunks} chunks per rank",
}
NAMES = (*SCHEDULES, *(f"combined-{name}" for name in COMBINED))
MOST = {"stages": 128, "microbatches": 4096, "chunks": 64, "group_size": 4096}
MOST_BOXES = 2**14
"""Microbatches in all chunks of all ranks."""
LONGEST = 1e100
"""A time so long that sums of it may not be finite."""
SUFFIXES = (".svg", ".html", ".htm")
LEFT, PLOT, GAP, BARS, RIGHT = 62, 880, 36, 120, 40
WIDTH = LEFT + PLOT + GAP + BARS + RIGHT
ROW, HEAD, FOOT = 22, 46, 26

STYLE = """
svg text { font: 11px system-ui, sans-serif; fill: #3c4149 }
svg .name { font-size: 15px; font-weight: 650; fill: #16191d }
svg .note { fill: #6a7079 }
svg .big { font-size: 13px; font-weight: 650; fill: #16191d }
svg .on { fill: #fff; text-anchor: middle; font-weight: 600 }
svg .on.light { fill: #1d2733 }
svg .end { text-anchor: end } svg .mid { text-anchor: middle }
"""
PAGE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #24282e; margin: 1.6rem auto;
       max-width: 1160px }
h1 { font-size: 1.3rem; margin: 0 } p { margin: .3rem 0 1rem; color: #555b64 }
table { border-collapse: collapse; margin: 0 0 1rem }
td, th { padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #e4e7eb; text-align: right }
td:first-child, th:first-child { text-align: left } tr.best td { font-weight: 650 }
"""


def picture(timelines: Sequence[Timeline]) -> str:
    """Return all timelines as one SVG."""
    ideal = min(work(timeline) for timeline in timelines)
    longest = max(timeline.makespan for timeline in timelines)
    most = max(peak(timeline) for timeline in timelines)
    drawn, y = [legend(timelines)], 34.0
    for timeline in timelines:
        drawn.append(f'<g transform="translate(0 {y:.0f})">')
        drawn.append(panel(timeline, PLOT / longest, ideal, most))
        drawn.append("</g>")
        y += HEAD + ROW * len(timeline.spans) + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" '
        f'width="{WIDTH}" height="{y:.0f}" role="img"><style>{STYLE}</style>'
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f5f7"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="#dfe2e7" stroke-width="2"/></pattern></defs>'
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>{"".join(drawn)}</svg>'
    )


def panel(timeline: Timeline, scale: float, ideal: float, most: float) -> str:
    """Return one schedule: its title, a row per rank, and what each rank holds."""
    ranks = len(timeline.spans)
    end, height = LEFT + timeline.makespan * scale, ROW * ranks
    schedule = timeline.schedule
    what = WHAT[schedule.name].format(chunks=schedule.placement.num_chunks)
    bubble = f"bubble {timeline.bubble:.1%}"
    bars = LEFT + PLOT + GAP
    drawn = [
        f'<text x="{LEFT}" y="18" class="name">{html.escape(schedule.name)}'
        f'<tspan dx="10" class="note" font-weight="400" font-size="12">{html.escape(what)}</tspan>'
        f'</text><text x="{LEFT + PLOT}" y="18" class="big end">{bubble}</text>'
        f'<text x="{bars}" y="18" class="big">peak {peak(timeline):g}</text>'
        f'<text x="{bars}" y="34" class="note">microbatches held</text>'
        f'<rect x="{LEFT}" y="{HEAD}" width="{end - LEFT:.1f}" height="{height}" '
        'fill="url(#idle)"/>'
    ]
    numbers = []
    for rank in range(ranks):
        y = HEAD + rank * ROW
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 15}" class="end">rank {rank}</text>')
        for step, start, stop in timeline.spans[rank]:
            halves = parts(step)
            high = (ROW - 2) / len(halves)
            for half, action in enumerate(halves):
                place = (LEFT + start * scale, y + 1 + half * high, (stop - start) * scale, high)
                drawn.append(box(action, *place))
                numbers.append(number(action, *place))
        width = BARS * timeline.peak(rank) / most
        drawn.append(
            f'<rect x="{bars}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" rx="2" '
            f'fill="#8a63b8"/><text x="{bars + width + 5:.1f}" y="{y + 15}">'
            f"{timeline.peak(rank):g}</text>"
        )
    # The line lies over the boxes and under the numbers.
    line, foot = LEFT + ideal * scale, HEAD + height
    drawn.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{HEAD - 6}" y2="{foot + 8}" '
        'stroke="#c92a2a" stroke-width="1.5" stroke-dasharray="4 3"/>'
        f'<rect x="{line:.1f}" y="{foot + 4}" width="{end - line:.1f}" height="4" fill="#c92a2a"/>'
        f'<text x="{end + 6:.1f}" y="{foot + 14}" class="note">'
        f"{timeline.makespan:g} = {ideal:g} + {timeline.makespan - ideal:g}</text>"
    )
    return "".join(drawn + numbers)


def box(action: Action, x: float, y: float, width: float, height: float) -> str:
    """Return one action; pointing at it tells its name."""
    color = COLORS[action.kind][min(action.chunk, 1)]
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{max(width - 0.8, 0.4):.1f}" height="{height:g}" '
        f'rx="1.5" fill="{color}"><title>{html.escape(str(action))}</title></rect>'
    )


def number(action: Action, x: float, y: float, width: float, height: float) -> str:
    """Return an action's microbatch, where there is room for it."""
    size = min(11.0, 0.8 * height, 1.5 * (width - 2) / len(str(action.microbatch)))
    if size < 7:
        return ""
    return (
        f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 0.36 * size:.1f}" '
        f'class="on{" light" * (action.chunk > 0)}" '
        f'style="font-size:{size:.3g}px" pointer-events="none">{action.microbatch}</text>'
    )


def legend(timelines: Sequence[Timeline]) -> str:
    """Return the colors in use and what they stand for."""
    steps = (span.step for t in timelines for spans in t.spans for span in spans)
    kinds = {action.kind for step in steps for action in parts(step)}
    several = any(timeline.schedule.placement.num_chunks > 1 for timeline in timelines)
    drawn, x = [], float(LEFT)
    for kind, (dark, light) in COLORS.items():
        if kind not in kinds:
            continue
        for color in (dark, light) if several else (dark,):
            drawn.append(f'<rect x="{x:.0f}" y="8" width="13" height="13" rx="2" fill="{color}"/>')
            x += 15
        drawn.append(f'<text x="{x + 3:.0f}" y="19">{WORDS[kind]}</text>')
        x += 16 + 6.2 * len(WORDS[kind])
    if several:
        drawn.append(f'<text x="{x:.0f}" y="19" class="note">(light: later chunks)</text>')
        x += 130
    drawn.append(
        f'<rect x="{x:.0f}" y="8" width="22" height="13" fill="url(#idle)" stroke="#dfe2e7"/>'
        f'<text x="{x + 27:.0f}" y="19">waiting</text>'
        f'<line x1="{x + 86:.0f}" x2="{x + 86:.0f}" y1="6" y2="23" stroke="#c92a2a" '
        'stroke-width="1.5" stroke-dasharray="4 3"/>'
        f'<text x="{x + 92:.0f}" y="19">end without bubble</text>'
    )
    return "".join(drawn)


def work(timeline: Timeline) -> float:
    """Return the time that the busiest rank works."""
    return max(timeline.busy(rank) for rank in range(len(timeline.spans)))


def peak(timeline: Timeline) -> float:
    """Return the most microbatches that any rank holds."""
    return max(timeline.peak(rank) for rank in range(len(timeline.spans)))


def rows(timelines: Sequence[Timeline]) -> list[tuple[str, str, str, str]]:
    """Return name, bubble, time and peak of each schedule, for a table."""
    return [
        (t.schedule.name, f"{t.bubble:.1%}", f"{t.makespan:g}", f"{peak(t):g}") for t in timelines
    ]


def page(timelines: Sequence[Timeline], settings: str) -> str:
    """Return a page with the table and the picture."""
    best = min(timeline.makespan for timeline in timelines)
    body = "".join(
        f"<tr{' class=best' if timeline.makespan == best else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for timeline, row in zip(timelines, rows(timelines), strict=True)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Pipeline schedules</title>'
        f"<style>{PAGE}</style><h1>Pipeline schedules</h1><p>{html.escape(settings)}</p>"
        "<table><tr><th>schedule</th><th>bubble</th><th>time</th><th>most microbatches held</th>"
        f"</tr>{body}</table>{picture(timelines)}</html>"
    )


def check(options: argparse.Namespace) -> None:
    """Refuse numbers that make no schedule.

    Raises:
        UserError: names the first of them.
    """
    for name, most in MOST.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            bound = "least 1" if value < 1 else f"most {most}"
            raise UserError(f"--{name.replace('_', '-')} ({value}) must be at {bound}")
    if options.stages * options.microbatches * options.chunks > MOST_BOXES:
        raise UserError(
            f"--stages ({options.stages}) x --microbatches ({options.microbatches}) x --chunks "
            f"({options.chunks}) must be at most {MOST_BOXES}: nobody could see more"
        )
    for name in ("forward", "backward", "backward_weight", "transfer"):
        value = getattr(options, name)
        if not 0 <= value < LONGEST:  # NaN fails too
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} ({value:g}) must be a time: a finite number, 0 or above")
    if options.backward_weight > options.backward:
        raise UserError(
            f"--backward-weight ({options.backward_weight:g}) is a part of --backward "
            f"({options.backward:g}), and must not exceed it"
        )
    if options.forward == options.backward == 0:
        raise UserError("--forward and --backward are both 0; give a time above 0 to one of them")


def build(options: argparse.Namespace) -> list[Timeline]:
    """Return the timelines of the schedules that were asked for."""
    if options.backward_weight is None:
        options.backward_weight = options.backward / 2
    weight = options.backward_weight
    costs = (options.forward, options.backward - weight, weight, options.transfer)
    check(options)
    schedules: list[Schedule] = []
    names = [name.strip() for name in options.schedules.split(",")]
    for name in dict.fromkeys(names):
        if name not in NAMES:
            raise UserError(f"--schedules: {name!r} is none of {', '.join(NAMES)}")
        plain = name.removeprefix("combined-")
        chunks = {"interleaved": options.chunks, "zb-v": 2}.get(plain, 1)
        group = options.group_size if plain == "interleaved" else None
        size = (options.stages, options.microbatches, chunks, group)
        schedules.append(make_schedule(plain, *size, combined=plain != name))
    return [simulate(schedule, Costs(*costs)) for schedule in schedules]


def check_output(output: Path | None) -> None:
    """Refuse a file that could not be written, before the work."""
    if output is None:
        return
    if output.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"--output {output}: the name must end in .svg, .html or .htm, which is what is written"
        )
    check_file("--output", output)


class OneLineParser(argparse.ArgumentParser):
    """Tells an error in one line, as all programs here do."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, without the usage block; exit with 2."""
        self.exit(2, f"show_schedule.py: error: {message}; see --help\n")


def main(argv: list[str] | None = None) -> int:
    """Draw what was asked for, print the table; return the exit code."""
    parser = OneLineParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--schedules",
        default=",".join(SCHEDULES),
        help=f"names, separated by commas (of {', '.join(NAMES)}; all but the last two)",
    )
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="per iteration (8)")
    parser.add_argument("--chunks", type=int, default=2, help="per rank, of interleaved (2)")
    parser.add_argument(
        "--group-size",
        type=int,
        help="--microbatch-group-size-per-virtual-pipeline-stage of interleaved (--stages)",
    )
    parser.add_argument("--forward", type=float, default=1.0, help="time of a forward (1)")
    parser.add_argument("--backward", type=float, default=2.0, help="time of a backward (2)")
    parser.add_argument(
        "--backward-weight", type=float, help="the weight gradient's part of it (half)"
    )
    parser.add_argument("--transfer", type=float, default=0.0, help="time of a message (0)")
    parser.add_argument(
        "--output", type=Path, help="draw a timeline too, into this .svg or .html file"
    )
    options = parser.parse_args(argv)
    try:
        check_output(options.output)
        timelines = build(options)
        settings = (
            f"{options.stages} ranks, {options.microbatches} microbatches; forward "
            f"{options.forward:g}, backward {options.backward:g} (weight gradient "
            f"{options.backward_weight:g}), transfer {options.transfer:g}"
        )
        if options.output is not None:
            svg = options.output.suffix.lower() == ".svg"
            with atomic_path(options.output) as path:
                text = picture(timelines) if svg else page(timelines, settings)
                path.write_text(text, encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"show_schedule.py: error: {error}", file=sys.stderr)
        return 2
    print(settings)
    wide = max(12, *(len(timeline.schedule.name) for timeline in timelines))
    print(f"  {'schedule':<{wide}} {'bubble':>7} {'time':>8} {'held':>6}")
    for name, bubble, time, held in rows(timelines):
        print(f"  {name:<{wide}} {bubble:>7} {time:>8} {held:>6}")
    print(f"wrote {options.output}" if options.output else "--output FILE.html draws them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
