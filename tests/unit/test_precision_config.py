"""Which dtype is what, which combinations are refused, and what has no effect."""

import csv
import itertools
import re
from pathlib import Path

import pytest

from megatron.core.precision.config import PrecisionConfig
from megatron.core.utils import UserError
from megatron.training.arguments import parse

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --dry-run"
)
PRECISE = "--bf16 --use-precision-aware-optimizer"


def precision(text: str) -> PrecisionConfig:
    return parse(f"{BASE} {text}".split()).config.precision


@pytest.mark.parametrize(
    ("text", "weights", "summed", "reduced", "masters", "moments"),
    [
        ("", "float32", "float32", "float32", "float32", "float32"),
        ("--fp64", "float64", "float64", "float64", "float64", "float64"),
        ("--bf16", "bfloat16", "float32", "float32", "float32", "float32"),
        ("--fp16", "float16", "float32", "float32", "float32", "float32"),
        (
            "--fp16 --no-accumulate-allreduce-grads-in-fp32",
            *("float16", "float16", "float16", "float32", "float32"),
        ),
        ("--bf16 --grad-reduce-in-bf16", "bfloat16", "bfloat16", "bfloat16", "float32", "float32"),
        (
            "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
            *("bfloat16", "float32", "bfloat16", "float32", "float32"),
        ),
        (
            f"{PRECISE} --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype bf16",
            *("bfloat16", "bfloat16", "bfloat16", "float16", "bfloat16"),
        ),
    ],
)
def test_dtypes_follow_the_flags(
    text: str, weights: str, summed: str, reduced: str, masters: str, moments: str
) -> None:
    found = precision(text)
    assert found.params_dtype == weights
    assert found.grad_dtype == summed
    assert found.reduce_dtype == reduced
    assert found.main_dtype == masters
    assert found.state_dtypes["exp_avg"] == moments
    assert found.accumulation_dtype == ("float64" if found.fp64 else "float32")


def test_each_moment_has_a_dtype_of_its_own() -> None:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    for first, second in itertools.permutations(names, 2):
        words = f"--exp-avg-dtype {first} --exp-avg-sq-dtype {second} --adam-beta2 0.95"
        found = precision(f"{PRECISE} {words}")
        assert found.state_dtypes == {"exp_avg": names[first], "exp_avg_sq": names[second]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--fp16 --fp64", "--fp16 and --fp64 exclude each other"),
        ("--fp16 --loss-scale -1", r"--loss-scale \(-1.0\) must not be negative"),
        ("--fp16 --min-loss-scale 0", r"--min-loss-scale \(0.0\) must be above 0"),
        ("--fp16 --hysteresis 0", r"--hysteresis \(0\) must be at least 1"),
        ("--fp16 --loss-scale-window 0.5", r"--loss-scale-window \(0.5\) must be at least 1"),
        ("--fp16 --loss-scale-window 10.5", r"--loss-scale-window \(10.5\) .* whole number"),
        (
            "--fp16 --initial-loss-scale 2 --min-loss-scale 4",
            r"--initial-loss-scale \(2\) must be at least --min-loss-scale \(4\)",
        ),
        ("--bf16 --exp-avg-dtype bf16", "--exp-avg-dtype bf16 needs --use-precision-aware-opt"),
        ("--bf16 --exp-avg-sq-dtype fp16", "--exp-avg-sq-dtype fp16 needs --use-precision-aware"),
        ("--bf16 --main-grads-dtype bf16", "--main-grads-dtype bf16 needs --use-precision-aware"),
        ("--bf16 --main-params-dtype fp16", "--main-params-dtype fp16 needs --use-precision-awa"),
        (f"{PRECISE} --exp-avg-dtype fp8", "--exp-avg-dtype fp8 is not built.*bf16"),
        (f"{PRECISE} --exp-avg-sq-dtype fp8", "--exp-avg-sq-dtype fp8 is not built.*bf16"),
        (
            f"{PRECISE} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
            "--main-grads-dtype bf16 contradicts --accumulate-allreduce-grads-in-fp32",
        ),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16", "bf16 needs --bf16"),
        ("--use-precision-aware-optimizer --main-params-dtype fp16", "fp32 weights have no mast"),
        ("--fp16 --use-precision-aware-optimizer --main-params-dtype fp16", "fp16 already"),
        ("--fp64 --use-precision-aware-optimizer --exp-avg-dtype bf16", "contradicts --fp64"),
        (f"{PRECISE} --optimizer sgd", "--use-precision-aware-optimizer needs --optimizer adam"),
        ("--fp32-residual-connection", "--fp32-residual-connection needs --bf16 or --fp16"),
        ("--fp64 --fp32-residual-connection", "the residual stream is float64 anyway"),
        ("--bf16 --fp16-lm-cross-entropy", "--fp16-lm-cross-entropy needs --fp16"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        precision(text)


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("--initial-loss-scale 64", "--initial-loss-scale (no --fp16)"),
        ("--bf16 --hysteresis 4", "--hysteresis (no --fp16)"),
        ("--fp16 --loss-scale 8 --loss-scale-window 9", "--loss-scale-window (--loss-scale is co"),
        ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 (no --bf16)"),
        ("--accumulate-allreduce-grads-in-fp32", "--accumulate-allreduce-grads-in-fp32 (weights"),
        ("--attention-softmax-in-fp32", "--attention-softmax-in-fp32"),
        ("--fp16 --apply-query-key-layer-scaling", "--apply-query-key-layer-scaling"),
    ],
)
def test_what_changes_nothing_is_listed(text: str, idle: str) -> None:
    parsed = parse(f"{BASE} {text}".split())
    assert [note for note in parsed.no_effect if note.startswith(idle)]


def test_what_counts_is_not_listed() -> None:
    fp16 = "--fp16 --initial-loss-scale 64 --min-loss-scale 2 --loss-scale-window 9 --hysteresis 4"
    for text in (fp16, "--bf16 --loss-scale 8 --no-accumulate-allreduce-grads-in-fp32"):
        assert parse(f"{BASE} {text}".split()).no_effect == ()


def test_a_scale_of_zero_asks_for_a_dynamic_one() -> None:
    """As in Megatron-LM, whose scripts say so."""
    assert precision("--fp16 --loss-scale 0").is_scale_dynamic
    assert not precision("--fp16 --loss-scale 4").is_scale_dynamic
    assert not precision("--bf16 --loss-scale 0").is_scale_dynamic


def eighths() -> list[tuple[str, str]]:
    """Return every flag of Megatron-LM to do with FP8 or FP4, with each value of that kind."""
    path = Path(__file__).resolve().parents[1] / "data" / "megatron_flags.tsv"
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = []
    for row in rows:
        small = re.search(r"fp[84]", row["flag"])
        values = re.search(r"\{(.*)\}", row["type"])
        choices = values[1].split("/") if values else ["3"]
        if not small:
            choices = [value for value in choices if re.search(r"fp[84]", value)]
        for name in (row["flag"], *row["aliases"].split()):
            if row["type"].startswith("switch"):
                found += [(name, "")] if small else []
            else:
                found += [(name, value) for value in choices if small or values]
    return found


EXPERTS = ("--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype")
"""In which dtype tokens travel to experts and back."""


def test_fp8_and_fp4_are_never_bf16_in_silence() -> None:
    """Refused, or named as a flag that counts only beside one that is refused."""
    flags = eighths()
    assert len(flags) > 25 and ("--fp8-format", "hybrid") in flags
    assert ("--exp-avg-dtype", "fp8") in flags and ("--fp4-param-gather", "") in flags
    for name, value in flags:
        text = f"{name} {value}".strip()
        words = f"{BASE} --bf16 --use-precision-aware-optimizer --no-dry-run".split()
        if name in ("--fp8-format", "--fp4-format", *EXPERTS) or value == "fp8":
            with pytest.raises(UserError, match=f"{name} {value} is not"):
                parse([*words, *text.split()])
            continue
        assert text in parse([*words, *text.split()]).no_effect
        for asked in ("--fp8-format e4m3", "--fp4-format e2m1"):
            with pytest.raises(UserError, match=f"{asked} is not supported: FP"):
                parse([*words, *text.split(), *asked.split()])
