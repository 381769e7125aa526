"""A T5 of the transformers library: imported, trained on, asked to fill in, exported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pretrain_t5
from tests.end_to_end.checkpoint_tool.words import TRAIN, Tool
from tests.unit.test_bridge_t5 import KINDS, load_theirs, write_theirs
from tools import generate_text

WORDS = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(84))]
WORDS += [f"<extra_id_{i}>" for i in range(9, -1, -1)]
RUN = TRAIN.replace("--seq-length 16", "--encoder-seq-length 24 --decoder-seq-length 12")


def write_tokenizer(folder: Path) -> None:
    """Write words, and marks that count down, as T5's do."""
    ids = {word: number for number, word in enumerate(WORDS)}
    added = [
        {"id": i, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for word, i in ids.items()
        if word[0] == "<"
    ]
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": added,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.mark.parametrize("kind", ["1.0", "1.1"])
def test_t5_is_trained_on_asked_and_exported(kind: str, tmp_path: Path, tool: Tool) -> None:
    """A run that learns nothing gives back the first files; greedy answers are the library's."""
    theirs = write_theirs(tmp_path / "theirs", kind, torch.float32)
    write_tokenizer(theirs)
    assert tool("convert", "--load", theirs, "--save", tmp_path / "imported") == 0
    answers = tmp_path / "answers.jsonl"
    words = f"--load {tmp_path / 'imported'} --device cpu --temperature 0 --ignore-eod"
    words += f" --num-tokens-to-generate 6 --output {answers} --prompt"
    prompt = "w5 w7 <extra_id_0> w9 <extra_id_1> w60"
    assert generate_text.main([*words.split(), prompt]) == 0
    ids = [WORDS.index(word) for word in prompt.split()]
    (record,) = map(json.loads, answers.read_text().splitlines())
    model, said = load_theirs(theirs), [0]
    with torch.no_grad():
        for _ in range(6):
            read = {"input_ids": torch.tensor([[*ids, 1]])}  # with eos, as T5 was trained
            logits = model(**read, decoder_input_ids=torch.tensor([said])).logits
            said.append(int(logits[0, -1].argmax()))
    assert record["tokens"] == said[1:]

    words = f"{RUN} --load {tmp_path / 'imported'} --save {tmp_path / 'save'} --train-iters 1"
    assert pretrain_t5.main(f"{words} --lr 0 --min-lr 0 --global-batch-size 1".split()) == 0
    target = tmp_path / "hf"
    assert tool("convert", "--load", tmp_path / "save", "--save", target, "--to", "hf") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, target))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    settings = json.loads((target / "config.json").read_text())
    assert KINDS[kind].items() <= settings.items() and settings["vocab_size"] == 97
