"""--dataloader-type external: a program with loaders of its own trains, resumes and evaluates."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.external import Loaders, Start
from megatron.training.pretrain import pretrain
from megatron.training.processes.launch import discover
from megatron.training.program import Program

SEQUENCE = 16


class Counting:
    """A loader of counting sequences that notes how it was opened and what was taken."""

    def __init__(self, length: int | None = None) -> None:
        self.starts: list[Start] = []
        self.taken: list[list[int]] = []
        self.length = length

    def __call__(self, start: Start) -> Iterator[dict[str, torch.Tensor]]:
        self.starts.append(start)
        first = start.consumed_samples + start.replica * start.micro_batch_size
        for number in itertools.count(first, start.micro_batch_size * start.replicas):
            if self.length is not None and number >= self.length:
                return
            samples = list(range(number, number + start.micro_batch_size))
            self.taken.append(samples)
            text_BS = (torch.tensor(samples)[:, None] * 7 + torch.arange(SEQUENCE + 1)) % 60
            yield {
                "tokens": text_BS[:, :-1].contiguous(),
                "labels": text_BS[:, 1:].contiguous(),
                "loss_mask": torch.ones(len(samples), SEQUENCE),
            }


def flags(*more: object) -> list[str]:
    words = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2 "
        "--micro-batch-size 2 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 60 "
        "--device cpu --eval-iters 0 --log-interval 1 --metrics-file metrics.jsonl "
        "--dataloader-type external"
    )
    return [*words.split(), *map(str, more)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def train(loaders: Loaders, *more: object) -> int:
        program = Program(
            build_model=pretrain_gpt.build_model,
            build_datasets=lambda *arguments: loaders,
            forward_step=pretrain_gpt.forward_step,
        )
        place = discover({})
        return pretrain(parse(flags(*more), world_size=1), place, program)

    return train


def rows(split: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row.get("split") == split]


def test_a_loader_is_used_as_it_is_and_resumes(run: Callable[..., int]) -> None:
    evaluation = ("--eval-iters", 1, "--eval-interval", 2)
    whole = ("--train-iters", 6, *evaluation)
    train, valid, test = Counting(), Counting(), Counting()
    loaders = Loaders(train=train, valid=[valid], test=test)
    assert run(loaders, *whole) == 0
    assert train.taken == [[n, n + 1] for n in range(0, 24, 2)]
    # After iterations 2, 4, 6, and at the end; the test set at the end.
    assert valid.taken == [[n, n + 1] for n in range(0, 16, 2)]
    assert test.taken == [[0, 1], [2, 3]]
    assert train.starts == [
        Start(consumed_samples=0, micro_batch_size=2, replica=0, replicas=1),
    ]
    straight, held_out = rows(), rows("valid")
    Path("metrics.jsonl").unlink()

    again, valid_again = Counting(), Counting()
    loaders = Loaders(train=again, valid=[valid_again], test=Counting())
    assert run(loaders, *whole, "--save", "save", "--exit-interval", 3) == 0
    assert run(loaders, *whole, "--load", "save") == 0
    assert again.taken == train.taken and valid_again.taken == valid.taken
    assert [one.consumed_samples for one in again.starts] == [0, 12]
    assert [one.consumed_samples for one in valid_again.starts] == [0, 4]
    assert [row["lm_loss"] for row in rows()] == [row["lm_loss"] for row in straight]
    assert [row["lm_loss"] for row in rows("valid")] == [row["lm_loss"] for row in held_out]
    assert straight[-1]["lm_loss"] < straight[0]["lm_loss"]


def test_growing_batches_and_skipped_iterations_consume_what_they_should(
    run: Callable[..., int],
) -> None:
    train = Counting()
    ramp = ("--train-iters", 4, "--rampup-batch-size", 2, 2, 4, "--iterations-to-skip", 2)
    assert run(Loaders(train=train), *ramp) == 0
    numbers = [n for samples in train.taken for n in samples]
    assert numbers == list(range(rows()[-1]["last_sample"] + 1))
    first, second, third, _ = rows()
    assert second["skipped"] and third["first_sample"] == second["last_sample"] + 1
    assert [row["global_batch_size"] for row in (first, third)] == [2, 4]


def test_what_a_user_can_get_wrong(run: Callable[..., int]) -> None:
    short = Loaders(train=Counting(length=6))
    with pytest.raises(UserError, match="loader ended after 3 microbatches, but the run takes"):
        run(short, "--train-iters", 3)
    with pytest.raises(UserError, match="brings loaders of its own; give --dataloader-type ext"):
        run(short, "--train-iters", 3, "--dataloader-type", "single", "--mock-data")
    with pytest.raises(UserError, match="builds data sets, no loaders"):
        run(Loaders(train=[{}]), "--train-iters", 3)  # type: ignore[arg-type]
    unnamed = Loaders(train=Counting(), valid=[Counting(), Counting()], valid_names=["a"])
    with pytest.raises(UserError, match="2 validation sets and 1 names"):
        run(unnamed, "--train-iters", 3)
    with pytest.raises(UserError, match="loaders have no length"):
        run(short, "--train-iters", 3, "--eval-iters", -1)
    with pytest.raises(UserError, match="pretrain_gpt.py brings no loaders of its own"):
        pretrain_gpt.main(flags("--train-iters", 3))


@pytest.mark.parametrize("program", [pretrain_gpt, pretrain_t5, pretrain_bert])
def test_a_program_without_loaders_says_its_own_name(program: Any) -> None:
    data = SimpleNamespace(dataloader_type="external")
    with pytest.raises(UserError, match=rf"external: {program.PROGRAM}.py brings no loaders"):
        program.build_datasets(SimpleNamespace(data=data), (1, 0, 0), None, None, print)
