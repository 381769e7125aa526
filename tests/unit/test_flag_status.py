"""Every flag of Megatron-LM has a status, and the documents say what the code does."""

import ast
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config import Spec, specs, spellings
from megatron.core.utils import UserError
from megatron.training.arguments import Invocation, ParsedRun, parse
from megatron.training.config import RunConfig
from megatron.training.flags import flag_status
from megatron.training.flags.command_line import normalise

ROOT = Path(__file__).resolve().parents[2]
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)
TABLE = flag_status.load()
BY_FLAG = {normalise(flag): row for flag, row in TABLE.items()}
DECLARED: dict[str, Spec] = {
    normalise(flag): spec
    for cls in (RunConfig, Invocation)
    for spec in specs(cls).values()
    for flag in spellings(spec)
}


def megatron_flags() -> list[dict[str, str]]:
    with open(ROOT / "tests/data/megatron_flags.tsv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


MEGATRON = megatron_flags()


def run(text: str) -> ParsedRun[RunConfig]:
    return parse(f"{BASE} {text}".split())


def test_every_flag_of_megatron_has_a_status() -> None:
    names = [name for row in MEGATRON for name in [row["flag"], *row["aliases"].split()]]
    assert len(MEGATRON) == 885
    assert [n for n in names if normalise(n) not in DECLARED and normalise(n) not in BY_FLAG] == []


def test_a_flag_has_one_status() -> None:
    assert sorted(set(DECLARED) & set(BY_FLAG)) == []


def test_the_table_takes_as_many_values_as_megatron() -> None:
    for row in MEGATRON:
        kind, entry = row["type"], BY_FLAG.get(normalise(row["flag"]))
        if kind.startswith("switch") or kind == "bool pair":
            expected = "0"
        else:
            count = re.search(r"\[(\d+|\+|\*)\]", kind)
            expected = count[1] if count else "1"
        assert entry is None or entry.values == expected, row["flag"]


def example(row: flag_status.Row) -> list[str]:
    """Return values that a flag of the table could have, not the one that asks for nothing."""
    if " " in row.flag:  # a former value, which stands there itself
        return []
    if row.default:
        return [f"{row.default}9"]
    if row.alternatives:
        return [next(iter(row.alternatives))]
    return [] if row.values == "0" else ["3"] * (int(row.values) if row.values.isdigit() else 1)


def test_flags_without_effect_change_nothing_and_are_named() -> None:
    rows = [row for row in TABLE.values() if row.status == "no effect"]
    texts = [" ".join([row.flag, *example(row)]) for row in rows]
    parsed = run(" ".join(texts))
    # As typed, but with hyphens.
    assert parsed.no_effect == tuple(normalise(text) for text in texts)
    assert parsed.config == run("").config


@pytest.mark.parametrize("status", ["successor", "refused"])
def test_every_row_does_what_it_says(status: str) -> None:
    rows = [row for row in TABLE.values() if row.status == status]
    assert rows
    for row in rows:
        check_row(row)


def check_row(row: flag_status.Row) -> None:
    values = example(row)
    text = " ".join([row.flag, *values])
    assert row.why and "\t" not in row.why
    if row.status == "refused":
        with pytest.raises(UserError) as caught:
            run(text)
        assert row.flag in str(caught.value) and row.why in str(caught.value)
        if row.default:
            assert f"{row.flag} {row.default}" in run(f"{row.flag} {row.default}").no_effect
        if row.dry_run:
            found = run(f"{text} --dry-run").left_out
            flag, *rest = text.split()
            assert any(" ".join([normalise(flag), *rest]) in note for note in found)
    elif row.status == "successor":
        for words in map(str.split, row.alternatives.values() or [" ".join(row.expand(values))]):
            flags = [word for word in words if word.startswith("--")]
            assert flags and all(normalise(flag) in DECLARED for flag in flags)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("--batch-size 4 --global-batch-size 4", "micro_batch_size", 4),
        ("--warmup 0.1", "lr_warmup_fraction", 0.1),
        ("--model-parallel-size 1", "tensor_model_parallel_size", 1),
        ("--use-flash-attn", "attention_backend", "flash"),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--no-position-embedding", "position_embedding_type", "none"),
        (
            "--use-rotary-position-embeddings --no-position-embedding",
            "position_embedding_type",
            "rope",
        ),
        (
            "--no-position-embedding --position-embedding-type alibi",
            "position_embedding_type",
            "alibi",
        ),
        ("--override-lr-scheduler", "override_opt_param_scheduler", True),
        ("--num-key-value-heads 2", "num_query_groups", 2),
        ("--dataloader-inter-document-masking", "reset_attention_mask", True),
        ("--encoder-seq-length 16", "seq_length", 16),
        ("--no-load-optim", "load_optim", False),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--persistent-save-interval 7", "save_interval", 7),
        ("--num-workers 0", "num_workers", 0),
    ],
)
def test_old_spellings_work_as_the_new_ones(text: str, name: str, value: object) -> None:
    argv = [word for word in BASE.split()]
    if "--batch-size" in text:
        at = argv.index("--micro-batch-size")
        del argv[at : at + 2]
    parsed = parse([*argv, *text.split()])
    assert parsed.config.flatten()[name] == value


def test_renamed_flags_are_listed_once() -> None:
    parsed = run("--use-flash-attn --use-flash-attn")
    assert parsed.renamed == ("--use-flash-attn -> --attention-backend flash",)
    assert parsed.lines()[0].count("--use-flash-attn") == 1


def test_flags_without_effect_are_listed_in_one_line() -> None:
    parsed = run(
        "--data-impl mmap --use-mcore-models --DDP-impl local --no-gradient-accumulation-fusion"
    )
    (line,) = parsed.lines()
    assert line.startswith("flags without effect: ")
    for flag in ("--data-impl mmap", "--use-mcore-models", "--DDP-impl local"):
        assert flag in line


WORKS, SUCCESSOR, NO_EFFECT, REFUSED = "works", "successor", "no effect", "refused"
OF_PARALLELISM = {
    "--tp-comm-overlap": WORKS,
    "--tp-comm-overlap-rs-dgrad": NO_EFFECT,
    "--disable-tp-comm-bulk-wgrad": NO_EFFECT,
    "--no-async-tensor-model-parallel-allreduce": NO_EFFECT,
    "--cross-entropy-loss-fusion": WORKS,
    "--cross-entropy-fusion-impl": WORKS,
    "--ddp-average-in-collective": NO_EFFECT,
    "--overlap-grad-reduce": WORKS,
    "--no-overlap-p2p-communication": WORKS,
    "--overlap-p2p-communication-warmup-flush": NO_EFFECT,
    "--delay-wgrad-compute": WORKS,
    "--defer-embedding-wgrad-compute": NO_EFFECT,
    "--high-priority-stream-groups": WORKS,
    "--nccl-communicator-config-path": WORKS,
    "--distributed-timeout-minutes": WORKS,
    "--distributed-timeout-seconds-after-init": WORKS,
    "--use-nccl-ub": NO_EFFECT,
    "--disable-gloo-process-groups": NO_EFFECT,
    "--data-parallel-random-init": REFUSED,
    "--flight-recorder-dump-path": WORKS,
    "--disable-flight-recorder-dump-on-timeout": WORKS,
    "--model-parallel-size": SUCCESSOR,
    "--DDP-impl": NO_EFFECT,
    "--rank": WORKS,
    "--world-size": WORKS,
    "--dist-url": NO_EFFECT,
    "--pipeline-model-parallel-comm-backend": NO_EFFECT,
    "--cp-comm-type": WORKS,
    "--cp-partition-mode": REFUSED,
    "--context-parallel-algo": SUCCESSOR,
    "--enable-zero-bubble": SUCCESSOR,
    "--enable-zbh1-pipeline": SUCCESSOR,
    "--deallocate-pipeline-outputs": WORKS,
    "--no-align-param-gather": NO_EFFECT,
    "--no-scatter-gather-tensors-in-pipeline": NO_EFFECT,
    "--overlap-param-gather": WORKS,
    "--use-tp-pp-dp-mapping": WORKS,
    "--decoder-first-pipeline-num-layers": WORKS,
    "--pipeline-model-parallel-layout": WORKS,
    "--num-layer-list": REFUSED,
}


@pytest.mark.parametrize("flag", OF_PARALLELISM)
def test_flags_of_parallelism_have_the_status_that_is_true(flag: str) -> None:
    row = BY_FLAG.get(normalise(flag))
    assert (row.status if row else WORKS) == OF_PARALLELISM[flag]
    assert (normalise(flag) in DECLARED) == (row is None)


def test_no_flag_is_excused_by_there_being_one_process() -> None:
    excuses = ("one process", "several ranks", "size above 1", "splits the backward")
    assert [row.flag for row in TABLE.values() if any(text in row.why for text in excuses)] == []


def test_no_flag_is_excused_by_what_works_by_now() -> None:
    """Flags that a reason names are there, and what those of experts do is not denied."""
    named = {
        (row.flag, word)
        for row in TABLE.values()
        if row.status == "no effect"
        for word in re.findall(r"--[a-z][\w-]*", row.why)
    }
    unknown = [
        (flag, word)
        for flag, word in sorted(named)
        if normalise(word) not in DECLARED and normalise(word) not in BY_FLAG
    ]
    assert unknown == []
    overlaps = ("--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap")
    assert all(normalise(flag) in DECLARED for flag in overlaps)
    denied = "does not run beside other work"
    assert [row.flag for row in TABLE.values() if denied in row.why] == []


@pytest.mark.parametrize(
    ("old", "name", "value"),
    [
        ("--enable-zero-bubble", "pipeline_schedule", "zb-h1"),
        ("--enable-zbh1-pipeline", "pipeline_schedule", "zb-h1"),
        ("--context-parallel-algo ulysses_cp_algo", "cp_comm_type", ("a2a",)),
        ("--context-parallel-algo megatron_cp_algo", "cp_comm_type", ("p2p",)),
        ("--model-parallel-size 2", "tensor_model_parallel_size", 2),
    ],
)
def test_other_programs_names_of_parallelism(old: str, name: str, value: object) -> None:
    parsed = parse(f"{BASE} {old}".split(), world_size=4)
    assert parsed.config.flatten()[name] == value
    assert parsed.renamed[0].startswith(f"{old} -> ")


def test_one_way_to_cut_a_sequence() -> None:
    assert run("--cp-partition-mode zigzag").no_effect == ("--cp-partition-mode zigzag",)
    with pytest.raises(UserError, match="leave it out: zigzag"):
        run("--cp-partition-mode contiguous")


def test_all_refused_flags_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        run(
            "--fp8-format hybrid --mlp-type residual --zero-stage 1 --deepspeed "
            "--deepspeed_config ds.json"
        )
    message = str(caught.value)
    for part in ("use --bf16", "--mlp-type residual", "--use-distributed-optimizer", "DeepSpeed"):
        assert part in message


def test_zero_stage_0_asks_for_nothing() -> None:
    assert "--zero-stage 0" in run("--zero-stage 0").no_effect


def test_docs_flags_md_is_up_to_date() -> None:
    tool = [sys.executable, "tools/generate_flag_docs.py", "--check"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def differences() -> dict[str, tuple[str, str]]:
    """Return (Megatron's default, ours) by flag from docs/differences.md."""
    text = (ROOT / "docs/differences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[^`]+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    return {flag: (theirs, ours) for flag, theirs, ours in rows}


def megatron_default(row: dict[str, str], spec: Spec) -> object:
    """Return what Megatron's default means for the field that a flag sets."""
    text = row["default"]
    if row["type"].startswith("switch"):
        value = text == "True"
        flag = normalise(row["flag"])
        clears = flag == normalise(spec.negative or "--") or any(
            normalise(name) == flag and constant is False
            for name, constant in spec.constants.items()
        )
        # A switch that clears our field but sets a field of Megatron's own, as --no-load-optim.
        return not value if clears and "true" in row["type"] else value
    if text in ("None", ""):
        return None
    if text.startswith("["):
        return tuple(ast.literal_eval(text))
    return spec.convert(text if spec.count == "one" else [text])


def test_every_default_is_megatrons_unless_a_difference_says_why() -> None:
    found: dict[str, tuple[object, object]] = {}
    for row in MEGATRON:
        spec = DECLARED.get(normalise(row["flag"]))
        if spec is not None and spec.name not in specs(Invocation):
            theirs = megatron_default(row, spec)
            if theirs != spec.default:
                found[row["flag"]] = theirs, spec.default
    stated = differences()
    assert sorted(found) == sorted(stated)
    for flag, (theirs, ours) in found.items():
        shown = "derived" if DECLARED[flag].derived and ours is None else in_words(ours)
        assert stated[flag] == (in_words(theirs), shown)


def in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value).removesuffix(".0")


def test_no_flag_of_ours_reuses_a_megatron_name_with_another_number_of_values() -> None:
    for row in MEGATRON:
        spec = DECLARED.get(normalise(row["flag"]))
        if spec is None or spec.parse is not None or row["type"] == "bool pair":
            continue
        is_switch = row["type"].startswith("switch")
        assert is_switch == (spec.base is bool and spec.count == "one"), row["flag"]
        if not is_switch:
            assert ("[" in row["type"].split("{")[0]) == (spec.count != "one"), row["flag"]


def test_every_field_is_read_somewhere() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for path in [*(ROOT / "megatron").rglob("*.py"), ROOT / "pretrain_gpt.py"]
    ]
    text = "\n".join(sources)
    read = {*re.findall(r"\.(\w+)", text), *re.findall(r"[\"'](?=(\w+)[\"'])", text)}
    assert sorted(set(specs(RunConfig)) - read) == []
