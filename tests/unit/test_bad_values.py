"""Values that mean nothing are refused before any work, with the flag that is wrong."""

from pathlib import Path

import pytest
import torch
import yaml

from megatron.core.config import specs
from megatron.core.optimizer.schedule import Schedule, differences
from megatron.core.utils import UserError, check_file, check_folder
from megatron.training.arguments import parse
from megatron.training.checkpoints import random_states
from megatron.training.config import RunConfig
from tools import train_tokenizer

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)
SPECS = specs(RunConfig).values()
FLOATS = [spec.flag for spec in SPECS if spec.base is float]
INTEGERS = [spec.flag for spec in SPECS if spec.base is int and spec.count == "one"]
WORDS = [spec.flag for spec in SPECS if spec.base is str and spec.count in ("one", "many")]


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse([*BASE.split(), *words])
    return str(caught.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("flag", FLOATS)
def test_no_number_may_be_infinite_or_nan(flag: str, value: str) -> None:
    message = refused(f"{flag}={value}")
    assert flag in message and value in message and "finite" in message


@pytest.mark.parametrize("flag", INTEGERS)
def test_integers_fit_into_64_bits(flag: str) -> None:
    assert flag in refused(f"{flag}={2**63}") and flag in refused(flag, "9" * 30)


@pytest.mark.parametrize("flag", WORDS)
def test_an_empty_string_is_an_unset_shell_variable(flag: str) -> None:
    message = refused(flag, "")
    assert flag in message and "empty" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--seed -1", "--seed (-1)"),
        ("--seed 4294967296", "--seed (4294967296)"),
        ("--hidden-size 0", "--hidden-size (0)"),
        ("--hidden-size 0 --swiglu", "--hidden-size (0)"),
        ("--num-attention-heads 0", "--num-attention-heads (0)"),
        ("--ffn-hidden-size 0", "--ffn-hidden-size (0)"),
        ("--local-rank -3", "--local-rank (-3)"),
        ("--local-rank 1000000", "--local-rank (1000000)"),
        ("--optimizer sgd --sgd-momentum 1", "--sgd-momentum (1.0)"),
        ("--optimizer lion --lion-beta2 1", "--lion-beta2 (1.0) must be at least 0 and below 1"),
        ("--optimizer muon --muon-momentum -0.1", "--muon-momentum (-0.1)"),
        ("--optimizer muon --muon-num-ns-steps 0", "--muon-num-ns-steps (0) must be at least 1"),
        ("--optimizer muon --muon-num-ns-steps 101", "(101) must be at most 100"),
        ("--optimizer muon --muon-extra-scale-factor 0", "--muon-extra-scale-factor (0.0)"),
        ("--optimizer muon --muon-coefficient-type cubic", "--muon-coefficient-type is one of"),
        ("--optimizer muon --muon-fp32-matmul-prec low", "use medium (bfloat16) or high (fp32)"),
        ("--optimizer soap", "use adam, muon, lion or sgd"),
        ("--optimizer adaptive_muon", "use muon"),
        ("--decoupled-lr 1e-9 --min-lr 1e-8", "--decoupled-lr (1e-09) must be at least"),
        ("--decoupled-lr -1", "--decoupled-lr (-1.0) must not be negative"),
        ("--param-group-overrides norm:lr=2", "is not PATTERN:NAME=VALUE"),
        ("--param-group-overrides norm:lr_mult=a", "'a' is no factor"),
        ("--window-size -2,0", "--window-size"),
        ("--window-size 4,0 --window-attn-skip-freq [1]*999999999999", "layer pattern"),
        ("--window-size 4,0 --window-attn-skip-freq [1", "--window-attn-skip-freq: a layer patt"),
        ("--num-experts 4 --moe-layer-freq foo()", "--moe-layer-freq: a layer pattern"),
        ("--position-embedding-type rope --no-rope-freq [1", "--no-rope-freq: a layer pattern"),
        ("--position-embedding-type rope --no-rope-freq [1,2]", "--no-rope-freq"),
        ("--position-embedding-type yarn --yarn-beta-fast 1 --yarn-beta-slow 1", "--yarn-beta-fas"),
        (
            "--position-embedding-type yarn --yarn-original-max-position-embeddings 0",
            "--yarn-original-max-position-embeddings (0)",
        ),
        ("--logit-multiplier 0", "--logit-multiplier"),
        ("--embedding-multiplier 0", "--embedding-multiplier"),
        ("--softmax-scale 0", "--softmax-scale"),
        ("--num-workers 1025", "--num-workers (1025)"),
        ("--iterations-to-skip 0", "--iterations-to-skip: 0"),
        ("--iterations-to-skip 3 11", "--iterations-to-skip: 11"),
        ("--exit-signal 9", "SIGKILL"),
        ("--exit-signal STOP", "SIGSTOP"),
        ("--weight-decay -0.1", "--weight-decay (-0.1)"),
        ("--lr -1e-3", "--lr (-0.001)"),
        ("--train-iters 0", "--train-iters (0) leaves nothing to train"),
        ("--skip-train --eval-iters 0", "nothing to do"),
        ("--learning-rate 1", "did you mean --lr?"),
        ("--eval-iters 0 foo", "'foo' is unexpected"),
        ("--num-layers 99999999999", "--num-layers (99999999999) must be at most 10,000"),
        ("--hidden-size 9223372036854775807", "--hidden-size (9223372036854775807) must be at mo"),
        ("--num-attention-heads 99999999999", "--num-attention-heads (99999999999) must be at"),
        ("--group-query-attention --num-query-groups 3", "try --num-query-groups 2 or 4"),
        ("--group-query-attention --num-query-groups 9", "try --num-query-groups 4"),
        ("--eval-iters 99999999999999", "--eval-iters (99999999999999) must be at most"),
        ("--vocab-size 99999999999", "--vocab-size (99999999999) must be at most"),
        (
            "--make-vocab-size-divisible-by 99999999999999",
            "--make-vocab-size-divisible-by (99999999999999) must be at most 1,048,576",
        ),
        ("--label-smoothing 1", "--label-smoothing (1.0) must lie in [0, 1)"),
        ("--label-smoothing -0.1", "--label-smoothing (-0.1)"),
        ("--logits-at-once -1", "--logits-at-once (-1) must not be negative"),
        ("--window-size 99999999999999999999,0", "--window-size (99999999999999999999) does not"),
        ("--no-rope-freq 99999999999999999999", "--no-rope-freq (99999999999999999999) does not"),
        ("--pipeline-model-parallel-layout garbage", "--pipeline-model-parallel-layout 'garbage'"),
    ],
)
def test_a_value_that_means_nothing_is_named(text: str, named: str) -> None:
    assert named in refused(*text.split())


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq (no --window-size)"),
        ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters (--lr-decay-style is linear)"),
        ("--sgd-momentum 0.5", "--sgd-momentum (--optimizer is adam)"),
        ("--optimizer sgd --adam-eps 1e-6", "--adam-eps (--optimizer is sgd)"),
        ("--optimizer muon --lion-beta1 0.8", "--lion-beta1 (--optimizer is muon)"),
        ("--optimizer lion --muon-nesterov", "--muon-nesterov (--optimizer is lion)"),
        (
            "--optimizer muon --muon-scalar-optimizer lion --adam-beta1 0.8",
            "--adam-beta1 (--optimizer is muon)",
        ),
        (
            "--optimizer muon --muon-tp-mode blockwise",
            "--muon-tp-mode (--tensor-model-parallel-size is 1)",
        ),
        (
            "--optimizer muon --muon-fp32-matmul-prec high --fp64",
            "--muon-fp32-matmul-prec (with --fp64 all is float64)",
        ),
        ("--decoupled-min-lr 0", "--decoupled-min-lr (no --decoupled-lr)"),
        ("--exit-signal 15", "--exit-signal (no --exit-signal-handler)"),
        ("--start-eval-at-iter 3 --eval-iters 0", "--start-eval-at-iter (--eval-iters is 0)"),
        ("--log-progress", "--log-progress (no --save)"),
        ("--no-load-optim", "--load-optim (no --load)"),
        ("--full-validation --eval-iters 3", "--eval-iters (--full-validation takes the whole"),
    ],
)
def test_a_setting_that_changes_nothing_is_listed(text: str, note: str) -> None:
    assert any(line.startswith(note) for line in parse([*BASE.split(), *text.split()]).no_effect)


@pytest.mark.parametrize(
    ("text", "named"),
    [("seed: 0100", "octal"), ("lr: .nan", "--lr (nan)"), ("save: ''", "--save is empty")],
)
def test_an_error_in_a_file_names_the_file(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert yaml.safe_load(text)
    message = refused("--config", str(path))
    assert named in message and f"--config {path}" in message


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null", "{file}", "{file}/below"])
def test_a_folder_that_cannot_be_made_is_refused_and_nothing_stays(
    tmp_path: Path, place: str
) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    path = place.format(file=file)
    with pytest.raises(UserError) as caught:
        check_folder("--save", path)
    assert f"--save {path}" in str(caught.value)
    check_folder("--save", tmp_path / "new" / "deeper")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, "/proc/x"):
        for replaces in (True, False):
            with pytest.raises(UserError, match=f"--output {path}|--output /proc"):
                check_file("--output", path, replaces=replaces)
    check_file("--output", tmp_path / "new" / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [b"{", b"{}", b'{"python": [3, [], null]}', b"\xff"])
def test_damaged_random_states_are_a_plain_error(text: bytes) -> None:
    states = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with pytest.raises(ValueError, match="random generators are damaged"):
        random_states.unpack(states, torch.device("cpu"))


def test_a_constant_rate_has_no_decay_that_could_differ() -> None:
    def of(text: str) -> Schedule:
        words = f"{BASE} --lr-decay-style {text}".split()
        return parse(words).config.learning_schedule

    assert differences(of("constant"), of("constant --train-iters 20")) == []
    assert differences(of("constant"), of("constant --lr 2e-3"))
    assert differences(of("cosine"), of("cosine --train-iters 20"))


def test_a_tokenizer_is_not_trained_on_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="holds no text"):
        train_tokenizer.main(
            f"--input {tmp_path / 'text.jsonl'} --output {tmp_path} --vocab-size 300".split()
        )
