"""Check that layouts train as one process does, on a small copy of your run, before a long job.

    python tools/verify_layout.py FLAGS OF pretrain_gpt.py --layouts "tp2 sp pp2; cp2 dp2"
    python tools/verify_layout.py FLAGS OF pretrain_gpt.py --all 8
    python tools/verify_layout.py FLAGS OF pretrain_gpt.py

A small float64 model with every switch of yours is trained for three iterations on made-up samples,
by one process and then on each layout by processes of this machine's CPU. The flags may be those of
pretrain_t5.py, which --decoder-seq-length tells, or with --masked-words those of pretrain_bert.py.
One row per layout: the largest relative difference to the serial run, of the losses, of every
gradient of the first iteration, of the gradient norms and of every weight in the end; below it what
all ranks together move in one iteration along each axis, beside the closed form. Exit code 0: all
are equal to 1e-10 and move what they should (where the form is a bound, since full experts drop
choices or Sinkhorn's assignment goes on until it is even, it is kept); 1: one is not, does not, or
failed; 2: the command cannot be carried out, or no layout fits the run.

Layouts are words, separated by semicolons:

{words}

With either, flags of yours that make a layout are set aside, since the words say all of it. Where
the words do not say otherwise, these are kept, and the first of the two sizes of a2a+p2p where it
divides cp:

{kept}

With neither, your flags' own layout is checked, on two replicas where that makes at most 16
processes. Stages of different length stay in that order: 7 9 9 7 layers become 1 2 2 1.

    --layouts TEXT    the layouts to check
    --all N           every layout of 2 to N processes, those that the model does not fit left out
    --timeout SECONDS of one layout (120)
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.core.config import flag_of
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import UserError, human_bytes
from megatron.training.arguments import Settings, read_settings, run_main
from megatron.training.config import RunConfig
from megatron.training.plan import traffic
from megatron.training.program import Program
from megatron.training.verification import equality, layout_words
from megatron.training.verification.layout_words import Layout, all_layouts, parse_layouts
from megatron.training.verification.outcomes import TOLERANCE, Outcome, Traffic, compare
from megatron.training.verification.own_layout import OwnLayout, own_layout
from megatron.training.verification.small_run import (
    ITERATIONS,
    KEPT_OF_LAYOUT,
    VOCABULARY,
    SmallRun,
)
from megatron.training.verification.worker_pool import Pool, RankFailed

PROGRAM = "verify_layout"
MOST_OF_ALL = 64
"""Processes: more make thousands of layouts."""
LONGEST = 1e6
"""Seconds."""
WORKERS_KNOW = (
    "pretrain_gpt",
    "pretrain_bert",
    "pretrain_t5",
    "megatron.training.verification.equality",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(words):
        say(help_text())
        return 0
    options, rest = read_options(words)
    settings = read_settings(rest, PROGRAM)
    for line in settings.lines:
        say(line)
    small, layouts, smaller, left_out = plan(settings, options)
    if smaller:
        say(f"smaller than yours: {', '.join(smaller)}")
    if left_out:
        say(f"LEFT OUT of yours: {', '.join(left_out)}")
    say(
        f"float64, dropout 0, vocabulary {VOCABULARY}, {ITERATIONS} iterations; largest relative "
        "differences to one process:"
    )
    width = max(len(layout.text) for layout in layouts)
    with Pool(preload=WORKERS_KNOW) as pool:
        return Check(pool, small, options.timeout, width).run(
            layouts, skips=options.all is not None
        )


def read_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own options, and the flags of the run.

    Raises:
        UserError: an option is wrong or missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--layouts")
    parser.add_argument("--all", type=int)
    parser.add_argument("--timeout", type=float, default=120.0)
    try:
        options, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    if options.layouts is not None and options.all is not None:
        raise UserError("--layouts and --all both say what is checked; keep one")
    if options.all is not None and options.all < 2:
        raise UserError(f"--all ({options.all}) must be at least 2: layouts of 2 to N processes")
    if options.all is not None and options.all > MOST_OF_ALL:
        raise UserError(
            f"--all ({options.all}) must be at most {MOST_OF_ALL}; name larger layouts by --layouts"
        )
    if not 0 < options.timeout <= LONGEST:
        raise UserError(f"--timeout ({options.timeout:g}) must be above 0, and at most {LONGEST:g}")
    return options, rest


class Plan(NamedTuple):
    """What is to be compared."""

    small: SmallRun
    layouts: list[Layout]
    smaller: list[str]
    """What is smaller than in the user's run."""
    left_out: Sequence[str] = ()
    """Flags of the user's that no layout has, with the reason."""


def plan(settings: Settings, options: argparse.Namespace) -> Plan:
    """Return the small run and the layouts to check it on.

    Raises:
        UserError: the flags make no run, or a named layout cannot hold it.
    """
    if options.all is not None:
        small = SmallRun(settings.values, layers_at_least=options.all)
        layouts = all_layouts(options.all, small.values["num_layers"])
        return Plan(small, layouts, small.changes())
    if options.layouts is not None:
        layouts = parse_layouts(options.layouts, PROGRAM)
        small = SmallRun(settings.values, max(map(_stages, layouts)))
        result = Plan(small, layouts, small.changes())
    else:
        own = _own(settings)
        small = SmallRun(settings.values, _stages(own.layout))
        smaller = [*small.changes(own.layout), *own.smaller]
        result = Plan(small, [own.layout], smaller, own.left_out)
    for layout in result.layouts:
        try:
            small.on(layout)
        except UserError as error:
            raise UserError(f"layout {layout.text!r} of the small run: {error}") from None
    return result


def _stages(layout: Layout) -> int:
    return layout.size("pp") * layout.size("vpp")


def _own(settings: Settings) -> OwnLayout:
    """Return the layout of the user's flags.

    Raises:
        UserError: they make none.
    """
    own = own_layout(settings.values)
    if own is None:
        raise UserError(
            "these flags make no layout of several processes; name some: "
            '--layouts "tp2 pp2; cp2 dp2" or --all N (see --help)'
        )
    return own


class Check:
    """Compares layouts of one small run with the serial one, and prints a row for each."""

    def __init__(self, pool: Pool, small: SmallRun, timeout: float, width: int) -> None:
        self.pool, self.small, self.timeout = pool, small, timeout
        self.width = max(width, len("layout"))
        self._serial: list[tuple[RunConfig, Outcome]] = []

    def run(self, layouts: Sequence[Layout], *, skips: bool) -> int:
        """Return the exit code after all layouts.

        Args:
            layouts: to check.
            skips: leave out those that the run does not fit.

        Raises:
            UserError: all are left out.
        """
        equal = f"equal to {TOLERANCE:g}"
        start, counts = time.monotonic(), {equal: 0, "not equal": 0, "left out": 0}
        head = f"{'loss':>8} {'gradients':>9} {'norm':>8} {'weights':>8}"
        say(f"{'':>9} {'layout':<{self.width}} {'world':>5} {head}")
        for number, layout in enumerate(layouts, 1):
            place = f"[{number}/{len(layouts)}]"
            row = f"{place:>9} {layout.text:<{self.width}} {layout.world_size:>5}"
            try:
                config = self.small.on(layout)
            except UserError as error:
                assert skips, layout
                counts["left out"] += 1
                say(f"{row} does not fit: {error}")
                continue
            counts[equal if self._row(row, layout, config) else "not equal"] += 1
        counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        say(f"{counted}; {time.monotonic() - start:.0f} s")
        if counts["left out"] == len(layouts):
            raise UserError("no layout fits the run, so nothing was compared; see the rows above")
        return 1 if counts["not equal"] else 0

    def _row(self, row: str, layout: Layout, config: RunConfig) -> bool:
        """Check one layout, print its row, return whether it is equal."""
        try:
            reference = self._reference(self.small.reference(layout))
            outcome = equality.run(self.pool, case(config), self.timeout)
        except (RankFailed, TimeoutError, AssertionError) as error:
            say(f"{row} FAILED: {error}")
            return False
        apart = compare(outcome, reference)
        numbers = f"{apart.loss:8.1e} {apart.gradients:9.1e} {apart.norm:8.1e} {apart.weights:8.1e}"
        verdict = "equal" if apart.are_equal else f"DIFFERS, most in {apart.worst}"
        if apart.ranks > TOLERANCE:
            verdict += f"; ranks differ by {apart.ranks:.1e} in what they hold alike"
        say(f"{row} {numbers}  {verdict}")
        lines = traffic_lines(config, outcome.traffic)
        for line in lines:
            say(f"{'':>9} {line}")
        return apart.are_equal and not any(line.endswith("DIFFERS") for line in lines)

    def _reference(self, config: RunConfig) -> Outcome:
        """Return the serial outcome; a run that was made before is not made again."""
        for known, outcome in self._serial:
            if known == config:
                return outcome
        outcome = equality.run(self.pool, case(config), self.timeout)
        self._serial.append((config, outcome))
        return outcome


def case(config: RunConfig) -> equality.Case:
    """Return what workers are to train."""
    entry = pretrain_t5 if config.model.has_two_stacks else pretrain_gpt
    if config.model.bert.encoder_alone:
        entry = pretrain_bert
    program = Program(
        build_model=entry.build_model,
        build_datasets=entry.build_datasets,
        forward_step=entry.forward_step,
    )
    return equality.Case(config=config, program=program, vocabulary=VOCABULARY)


def closed_form(config: RunConfig) -> list[Traffic]:
    """Return what each rank should move in one iteration."""
    parallel, world = config.parallel, config.process.world_size
    tp = parallel.tensor_model_parallel_size
    rows = resolve_vocabulary(config.tokenizer, VOCABULARY, tp).padded_rows
    count = config.training.global_batch_size // config.samples_per_pass
    grid, experts = parallel.grids(world)
    edp = {
        rank: number
        for ranks in experts.groups("edp_inner", "edp")
        for number, rank in enumerate(ranks)
    }
    costs = [
        traffic.expected(config, rows, count, {**grid.coordinates(rank), "edp": edp[rank]})
        for rank in range(world)
    ]
    return [{key: (cost.calls, cost.bytes) for key, cost in one.items()} for one in costs]


def traffic_lines(config: RunConfig, counted: Sequence[Traffic]) -> list[str]:
    """Return a line for each axis: bytes that all ranks moved, beside the closed form."""
    expected = closed_form(config)
    axes = dict.fromkeys(axis for one in (*counted, *expected) for axis, _ in one)
    lines = []
    for axis in axes:
        moved, formula = (_bytes_along(axis, ranks) for ranks in (counted, expected))
        pairs = [(_of(axis, a), _of(axis, b)) for a, b in zip(counted, expected, strict=True)]
        if all(a == b for a, b in pairs):
            beside = "as the closed form"
        elif all(_may_be(config, a, b) for a, b in pairs):
            reason = "at most that: full experts drop choices"
            if config.model.router.is_sinkhorn:
                reason = "at least that: nobody knows the rounds of Sinkhorn's assignment before"
            beside = f"closed form: {formula:,} bytes, {reason}"
        else:
            beside = f"closed form: {formula:,} bytes  DIFFERS"
        lines.append(f"{axis:<10} {moved:>12,} bytes ({human_bytes(moved)})  {beside}")
    return lines


def _may_be(config: RunConfig, counted: Traffic, expected: Traffic) -> bool:
    """Return whether a rank may have moved that along an axis, whose closed form is a bound.

    Choices that full experts drop go nowhere, in as many calls; Sinkhorn's assignment adds sums.
    """
    router, axes = config.model.router, {axis for axis, _ in (*counted, *expected)}
    drops = config.model.moe.num_experts is not None and router.capacity_factor is not None
    rounds = config.model.moe.num_experts is not None and router.is_sinkhorn
    if not ((drops and axes == {"etp_ep"}) or (rounds and axes <= {"tp", "cp"})):
        return False
    for key in {*counted, *expected}:
        calls, size = counted.get(key, (0, 0))
        foreseen_calls, foreseen_size = expected.get(key, (0, 0))
        op = key[1]
        if drops and op == "all_to_all":
            fits = calls == foreseen_calls and size <= foreseen_size
        elif rounds and op == "all_reduce":
            fits = calls >= foreseen_calls and size >= foreseen_size
        else:
            fits = (calls, size) == (foreseen_calls, foreseen_size)
        if not fits:
            return False
    return True


def _of(axis: str, counted: Traffic) -> Traffic:
    return {key: value for key, value in counted.items() if key[0] == axis}


def _bytes_along(axis: str, ranks: Sequence[Traffic]) -> int:
    return sum(size for one in ranks for _, size in _of(axis, one).values())


def help_text() -> str:
    """Return the top of this file, with the words of layouts and the flags that stay."""
    words = (layout_words.__doc__ or "").split("\n\n")[1]
    kept = "\n".join(f"    {flag_of(RunConfig, name)}" for name in KEPT_OF_LAYOUT)
    return (__doc__ or "").format(words=words, kept=kept)


def say(text: str) -> None:
    """Print at once: somebody may watch."""
    print(text, flush=True)


if __name__ == "__main__":
    run_main(main, PROGRAM)
