"""Checkpoints of an encoder-decoder answer: on one rank as on two, by the tools."""

import json
from pathlib import Path

from tests.harness import Pool
from tests.programs import launch

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --encoder-seq-length 24 "
    "--decoder-seq-length 16 --position-embedding-type relative --mock-data --tokenizer-type "
    "ByteLevelTokenizer --vocab-extra-ids 9 --span-corruption random_spans --micro-batch-size 4 "
    "--train-iters 2 --lr 1e-2 --fp64 --device cpu --num-workers 0 --eval-iters 0 --save save"
)
PROMPTS = ("abc<extra_id_0>fg", "x<extra_id_0>yz<extra_id_1>")


def test_answers_do_not_depend_on_the_layout(pool: Pool, tmp_path: Path) -> None:
    (trained,) = launch(pool, 1, "pretrain_t5", *RUN.split(), folder=tmp_path)
    assert trained.code == 0, trained.err
    asked = "--load save --device cpu --max-new-tokens 8 --temperature 0 --output {}.jsonl --prompt"
    texts = []
    for world, more in ((1, ""), (2, "--tensor-model-parallel-size 2"), (1, "--no-kv-cache")):
        words = [*more.split(), *asked.format(f"{world}{len(more)}").split(), *PROMPTS]
        ended = launch(pool, world, "tools.generate_text", *words, folder=tmp_path)
        assert [one.code for one in ended] == [0] * world, ended[0].err
        lines = (tmp_path / f"{world}{len(more)}.jsonl").read_text().splitlines()
        texts.append([json.loads(line)["tokens"] for line in lines])
    assert texts[0] == texts[1] == texts[2] and all(texts[0])
    measured = "--load save --device cpu --samples 8 --batch-size 3".split()
    (ended,) = launch(pool, 1, "tools.span_accuracy", *measured, folder=tmp_path)
    assert ended.code in (0, 1) and "8 validation samples: " in ended.out
