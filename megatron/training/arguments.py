"""From flags, a file and a checkpoint to one resolved, checked `RunConfig`.

Flags, file keys and help all follow from the configs' fields; precedence is flag, file, checkpoint
(with --use-checkpoint-args), derived, default. Every value keeps its origin. What a user got wrong
raises `UserError`; `run_main` turns that into one message and exit code 2.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.core import config as configs
from megatron.core.config import Config, Origin, Spec, option
from megatron.core.utils import UserError, atomic_path, check_file
from megatron.training import device_choices, idle, rules
from megatron.training.config import RunConfig
from megatron.training.failing.failure import Failure, describe, end_children, write_error_file
from megatron.training.flags import flag_status, help_text, verdicts
from megatron.training.flags.command_line import (
    Given,
    Vocabulary,
    normalise,
    read_command_line,
    read_file,
)
from megatron.training.flags.flag_status import Row
from megatron.training.flags.verdicts import Applied
from megatron.training.model_rules import CALLED, ENCODER_DECODER, check_given, check_program
from megatron.training.processes.host_memory import ask_for_huge_pages, keep_freed_memory
from megatron.training.processes.startup_error import print_once
from megatron.training.program_defaults import take_defaults
from megatron.training.stored_settings import StoredConfig, stored_reader, take_stored

C = TypeVar("C", bound=Config)
LARGEST_LOCAL_RANK = 65_535
"""No machine runs more processes of one job."""


class Invocation(Config):
    """How the program is called, which is no part of the run."""

    config: str | None = option(None, aliases=("--yaml-cfg",), metavar="FILE")
    """Take settings from a .json or .yaml file; flags win over it."""

    dump_config: str | None = option(None, metavar="FILE")
    """Write every resolved value with its origin to a .json or .yaml file, and go on."""

    dry_run: bool = option(False)
    """Check everything, print the plan and exit, without touching a device or data."""

    dry_run_memory: float = option(80.0, metavar="GIB")
    """Memory of one device, for the plan's largest micro-batch."""

    local_rank: int | None = option(None)
    """Number of this process on its machine, from launchers that pass it; LOCAL_RANK wins."""

    rank: int | None = option(None)
    """Number of this process, from scripts that pass it: only checked, since the environment that
    the launcher makes says it."""

    launched_world_size: int | None = option(None, flag="--world-size")
    """Number of processes, from scripts that pass it: only checked, as --rank."""

    def __post_init__(self) -> None:
        configs.check_above(self, 0, "dry_run_memory")
        configs.check_at_least(self, 0, "rank")
        configs.check_at_least(self, 1, "launched_world_size")
        if self.local_rank is not None and not 0 <= self.local_rank <= LARGEST_LOCAL_RANK:
            raise UserError(
                f"--local-rank ({self.local_rank}) must be 0 to {LARGEST_LOCAL_RANK}: the number "
                "of this process among those of its machine"
            )


@dataclass(frozen=True)
class ParsedRun(Generic[C]):
    """A resolved run, of training or of a tool, and where each of its values comes from."""

    config: C
    invocation: Invocation
    origins: Mapping[str, Origin]
    no_effect: tuple[str, ...]
    """Flags that were accepted and change nothing here, as given."""
    renamed: tuple[str, ...]
    """``old -> new`` of old spellings."""
    left_out: tuple[str, ...]
    """Flags that a run refuses and this plan, a dry run's, leaves out."""
    reports: tuple[str, ...]
    """What came from the checkpoint, what differs from it, and warnings."""

    def lines(self) -> list[str]:
        """Return what a run says of its flags when it starts."""
        lines = [f"not built yet, left out of this plan: {text}" for text in self.left_out]
        if self.renamed:
            lines.append(f"flags renamed: {', '.join(self.renamed)}")
        if self.no_effect:
            lines.append(f"flags without effect: {', '.join(self.no_effect)}")
        return [*lines, *self.reports]


def parse(
    argv: Sequence[str] | None = None,
    program: str = "pretrain_gpt",
    *,
    world_size: int | None = None,
    stored_config: StoredConfig | None = None,
    planner: str | None = None,
) -> ParsedRun[RunConfig]:
    """Return the run that a command line asks for.

    ``--help`` prints and exits.

    Args:
        argv: words after the program's name; the process's own when absent.
        program: name of the entry point, which may have defaults of its own.
        world_size: number of processes that the launcher started; when absent, the dry run's. A
            dry run that several were started for plans for as many, if no flag says otherwise.
        stored_config: given a checkpoint folder and an iteration (or None for the newest), returns
            the flat config stored there, None if nothing is, for --use-checkpoint-args; by default
            it is read from the checkpoint.
        planner: name of a tool that prepares the run, elsewhere and on other processes: what a dry
            run accepts it accepts, and --dry-run-world-size is the number of processes.

    Raises:
        UserError: anything that a user can fix.
    """
    calls, table = tuple(configs.specs(Invocation)), flag_status.load()
    if planner is not None:
        calls, table = ("config", "dump_config"), {**table, **_no_dry_run(planner)}
    parsed, values, origins = _read(
        argv, RunConfig, planner or program, calls, table, plans=planner is not None
    )
    invocation = parsed.invocation
    plans = invocation.dry_run or planner is not None
    if world_size is not None and not plans:
        if origins.get("world_size") == "flag":
            raise UserError(
                f"--dry-run-world-size ({values['world_size']}) plans a run; add --dry-run"
            )
        _check_launch(invocation, world_size)
    is_launched = plans and (world_size or 1) > 1 and values.get("world_size") is None
    if world_size is not None and (is_launched or not plans):
        values["world_size"] = world_size
        origins["world_size"] = "derived"
    reader = stored_config or stored_reader(values)
    reports = take_stored(values, origins, reader, program if planner is None else None)
    no_effect = [*parsed.applied.no_effect, *_idle_groups(values, origins)]
    is_pair = planner is not None and values.get("decoder_seq_length") is not None
    take_defaults(values, origins, ENCODER_DECODER if is_pair else program)
    _take_length(values, origins)
    if planner is None:
        check_given(values, program)
    config, flat, derived = _resolve(RunConfig, values, CALLED.get(program))
    full = _origins(flat, origins, derived)
    if planner is None:
        check_program(config, program)
    if not plans:
        rules.check_built(config)
    rules.check(config, full)
    config, mapped = device_choices.map_to_cpu(config, full)
    notes, warnings = idle.without_effect(config, full), rules.warnings(config, full)
    run = ParsedRun(
        config,
        invocation,
        full,
        (*no_effect, *notes),
        parsed.applied.renamed,
        parsed.applied.left_out,
        (*reports, *mapped, *warnings),
    )
    if invocation.dump_config:
        dump(run, invocation.dump_config, program)
    return run


@dataclass(frozen=True)
class Settings:
    """What a command line gives, by name, before anything follows from it."""

    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    lines: Sequence[str]
    """What there is to say of it."""


def read_settings(argv: Sequence[str], tool: str) -> Settings:
    """Return what a command line of a training run gives to a tool that makes other runs of it.

    As for a dry run, flags of what is not built are left out, with a line that says so.

    Raises:
        UserError: anything that a user can fix.
    """
    table = {**flag_status.load(), **_no_dry_run(tool)}
    parsed, values, origins = _read(argv, RunConfig, tool, ("config",), table, plans=True)
    lines = take_stored(values, origins, stored_reader(values))
    lines += [f"not built yet, left out: {text}" for text in parsed.applied.left_out]
    lines += [f"without effect: {text}" for text in _idle_groups(values, origins)]
    return Settings(values, origins, lines)


def build_run(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> RunConfig:
    """Return the run that settings make, checked as a dry run is.

    Raises:
        UserError: they do not go together.
    """
    config, flat, derived = _resolve(RunConfig, values)
    full = _origins(flat, origins, derived)
    rules.check(config, full)
    return device_choices.map_to_cpu(config, full)[0]


def _check_launch(invocation: Invocation, world_size: int) -> None:
    """Refuse a rank or a number of processes that the launcher knows nothing of."""
    given, rank = invocation.launched_world_size, invocation.rank
    started = f"{world_size} process{'es were' if world_size > 1 else ' was'} started"
    if given not in (None, world_size):
        raise UserError(
            f"--world-size ({given}), but {started}: a flag starts none; start {given} with "
            "torchrun, srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for "
            "each of them"
        )
    if rank is not None and rank >= world_size:
        raise UserError(
            f"--rank ({rank}), but {started}, numbered from 0: ranks come from the launcher's "
            "environment; start the processes with torchrun, srun or mpirun, or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them"
        )


def parse_tool(
    argv: Sequence[str] | None,
    config_class: type[C],
    program: str,
    *,
    dry_run: bool = False,
    leading: str | None = None,
    others: Sequence[Row] = (),
    base: Mapping[str, Any] | None = None,
) -> ParsedRun[C]:
    """Return what a command line asks of a tool with flags of its own.

    The table of Megatron's other flags does not apply: a tool knows its own flags only.

    Args:
        argv: words after the program's name; the process's own when absent.
        config_class: the tool's flags.
        program: its name, and its verb after a space.
        dry_run: it heeds ``invocation.dry_run``; else --dry-run is refused.
        leading: field that takes the words before the first flag.
        others: flags that it understands and does not declare.
        base: values by name, such as those of an earlier run, for what is not given.

    Raises:
        UserError: anything that a user can fix.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if leading is not None and words and not words[0].startswith("-"):
        words.insert(0, configs.flag_of(config_class, leading))
    calls = ("config", "dump_config", *(("dry_run",) if dry_run else ()))
    table = {row.flag: row for row in others} | ({} if dry_run else _no_dry_run(program))
    parsed, values, origins = _read(words, config_class, program, calls, table, leading=leading)
    config, flat, derived = _resolve(config_class, {**(base or {}), **values})
    full = _origins(flat, origins, derived)
    applied = parsed.applied
    run = ParsedRun(
        config, parsed.invocation, full, applied.no_effect, applied.renamed, applied.left_out, ()
    )
    if parsed.invocation.dump_config:
        dump(run, parsed.invocation.dump_config, program)
    return run


def _no_dry_run(program: str) -> dict[str, Row]:
    why = f"{program} has no dry run, and would really run"
    return {"--dry-run": Row("--dry-run", "0", "refused", why=why)}


def run_main(main: Callable[[], int | None], program: str) -> None:
    """Run an entry point and end the process: 2 for what the user can fix, 1 for other failures."""
    ask_for_huge_pages(os.environ)
    keep_freed_memory(os.environ)
    try:
        code = main() or 0
    except BrokenPipeError:  # the reader of our output has seen enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (Exception, KeyboardInterrupt) as error:
        code = _tell(describe(error), program)
    # Readers that leave the exit signal to the loop ignore what Python ends its children with:
    # after a failure it would wait for them for ever. That they are killed here is no failure, as
    # which torch's handler would report it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_children()
    sys.exit(code)


def _tell(failure: Failure, program: str) -> int:
    """Print an error, unless another process of the run has done it; return the exit code."""
    write_error_file(failure.message, failure.stack)
    text = f"{program}: {failure.line}\n" if failure.is_plain else failure.stack
    if failure.code == 2:
        print_once(text)
    else:
        print(text, end="", file=sys.stderr, flush=True)
    return failure.code


def dump(run: ParsedRun[Any], path: str, program: str) -> None:
    """Write the resolved run with the origin of each value."""
    _write(path, program, run.config.flatten(), run.origins)


@dataclass
class _Parsed:
    invocation: Invocation
    applied: Applied


def _read(
    argv: Sequence[str] | None,
    config_class: type[Config],
    program: str,
    calls: Sequence[str],
    table: Mapping[str, Row],
    plans: bool = False,
    leading: str | None = None,
) -> tuple[_Parsed, dict[str, Any], dict[str, Origin]]:
    """Return what was given, by name, without resolving it.

    Args:
        argv: words after the program's name; the process's own when absent.
        config_class: the program's flags.
        program: its name.
        calls: fields of `Invocation` that it has flags for.
        table: flags that it understands and does not declare.
        plans: nothing is trained, so that what a dry run accepts is accepted.
        leading: field that takes the words before the first flag.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    invoked = configs.specs(Invocation)
    declared = {name: invoked[name] for name in calls} | configs.specs(config_class)
    if {"--help", "-h"} & set(words):
        print(help_text.render(declared, program, leading))
        sys.exit(0)
    vocabulary = Vocabulary(declared, table)
    given = read_command_line(words, vocabulary)
    files = [g for g in given if isinstance(g.target, Spec) and g.target.name == "config"]
    if files:
        given = read_file(files[-1].values[0], vocabulary) + given
    for item in given:  # the last one counts, as everywhere
        if isinstance(item.target, Spec) and item.target.name == "dry_run":
            plans = _value(item, item.target)
    applied = verdicts.apply(given, vocabulary, plans)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for item in applied.given:
        assert isinstance(item.target, Spec)
        values[item.target.name] = _value(item, item.target)
        origins[item.target.name] = item.place
    call = {name: values.pop(name) for name in calls if name in values}
    for name in call:
        del origins[name]
    invocation, _, _ = _resolve(Invocation, call)
    return _Parsed(invocation, applied), values, origins


def _value(item: Given, spec: Spec) -> Any:
    """Return the value that a field takes from what was given."""
    for flag, constant in spec.constants.items():
        if normalise(flag) == item.flag:
            return constant
    where = f"--config {item.file}: " if item.file else ""
    try:
        if spec.base is bool and spec.count == "one" and spec.parse is None:
            value = _boolean(item)
            return not value if normalise(spec.negative or "") == item.flag else value
        return spec.convert(item.values[0] if spec.count == "one" else list(item.values))
    except ValueError as error:
        raise UserError(f"{where}{error}") from None


def _boolean(item: Given) -> bool:
    if not item.values:
        return True
    word = str(item.values[0]).lower()
    if word in ("true", "1"):
        return True
    if word in ("false", "0"):
        return False
    raise UserError(f"{item.flag} takes no value, not {item.values[0]!r}")


def _resolve(
    config_class: type[C], values: Mapping[str, Any], called: Mapping[str, str] | None = None
) -> tuple[C, dict[str, Any], set[str]]:
    try:
        return configs.resolve(config_class, values, called)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None


def _origins(
    flat: Mapping[str, Any], given: Mapping[str, Origin], derived: set[str]
) -> dict[str, Origin]:
    return {name: "derived" if name in derived else given.get(name, "default") for name in flat}


def _take_length(values: dict[str, Any], origins: dict[str, Origin]) -> None:
    """Let an encoder alone read texts as long as its learned table, where nobody says how long."""
    longest = values.get("max_position_embeddings")
    learned = values.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    if values.get("masked_words") and values.get("seq_length") is None and learned and longest:
        values["seq_length"], origins["seq_length"] = longest, "derived"


def _idle_groups(values: dict[str, Any], origins: Mapping[str, Origin]) -> list[str]:
    """Set aside a number of query groups without the switch that makes it count in Megatron-LM."""
    groups = values.get("num_query_groups")
    is_given = origins.get("num_query_groups") in ("flag", "file")
    idle = is_given and not values.get("group_query_attention")
    if not idle or groups == values.get("num_attention_heads"):
        return []
    del values["num_query_groups"]
    return [f"--num-query-groups {groups} (no --group-query-attention)"]


def _write(path: str, program: str, flat: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
    check_file("--dump-config", path)
    content = {"program": program, "config": dict(flat), "origins": dict(origins)}
    if path.endswith((".yaml", ".yml")):
        import yaml

        # JSON first: tuples become lists, which YAML writes plainly.
        text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
    elif path.endswith(".json"):
        text = json.dumps(content, indent=2) + "\n"
    else:
        raise UserError(f"--dump-config {path}: the name must end in .json, .yaml or .yml")
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
