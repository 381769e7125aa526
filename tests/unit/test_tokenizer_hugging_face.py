"""HuggingFaceTokenizer: a tokenizer.json and what stands beside it, whatever else it asks for."""

from pathlib import Path

from tests.unit import tokenizer_files as files
from tests.unit.tokenizer_files import build, write_hugging_face


def test_hugging_face_reads_a_folder_or_its_file(tmp_path: Path) -> None:
    content = files.word_level_json(["<unk>", "red", "blue"], ["<end>", "<fill>"])
    config = {"eos_token": {"content": "<end>", "lstrip": False}, "pad_token": "<fill>"}
    folder = write_hugging_face(tmp_path / "a", content, tokenizer_config=config)
    for path in (folder, f"{folder}/tokenizer.json"):
        tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)
        assert tokenizer.encode("blue red green") == [2, 1, 0]
        assert (tokenizer.eod, tokenizer.pad, tokenizer.bos) == (3, 4, None)
        assert tokenizer.vocab_size == 5


def test_hugging_face_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    content = files.word_level_json(["<unk>", "red"], ["<a>", "<b>"])
    folder = write_hugging_face(
        tmp_path / "a",
        content,
        special_tokens_map={"eos_token": "<b>", "bos_token": "<a>"},
        tokenizer_config={"eos_token": None, "model_max_length": 7},
    )
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert (tokenizer.eod, tokenizer.bos) == (3, 2)


def test_pre_08_no_end_of_document_token_is_none(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "a", files.word_level_json(["<unk>", "red"], []))
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.eod is None
    assert tokenizer.encode("red red") == [1, 1]


def test_a_usual_end_token_is_found_when_it_is_the_only_one(tmp_path: Path) -> None:
    one = write_hugging_face(tmp_path / "1", files.word_level_json(["?", "red"], ["</s>"]))
    two = files.word_level_json(["?", "red"], ["</s>", "<|endoftext|>"])
    both = write_hugging_face(tmp_path / "2", two)
    assert build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=one).eod == 2
    assert build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=both).eod is None


def test_pre_09_a_post_processor_adds_nothing(tmp_path: Path) -> None:
    closing = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    content = files.word_level_json(["<unk>", "red"], ["</s>"], post_processor=closing)
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    folder = write_hugging_face(tmp_path / "a", content)
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.encode("red red red") == [1, 1, 1]
    assert tokenizer.encode_batch(["red red red"], 2) == [[1, 1, 1]]
    assert tokenizer.eod == 2


def test_tok_02_added_tokens_count_in_the_size(tmp_path: Path) -> None:
    """Words added behind the base vocabulary match in text; special ones do not."""
    content = files.word_level_json(["<unk>", "red", "blue"], [])
    for i, (name, special) in enumerate([("<tool>", False), ("<think>", False), ("<end>", True)]):
        content["added_tokens"].append(
            {
                "id": 3 + i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
        )
    folder = write_hugging_face(tmp_path / "a", content, special_tokens_map={"eos_token": "<end>"})
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode("red <tool> blue <think> <end>") == [1, 3, 2, 4, 0]
    assert tokenizer.eod == 5


def test_a_hole_in_the_ids_counts_in_the_size(tmp_path: Path) -> None:
    content = files.word_level_json(["<unk>", "red"], [])
    content["model"]["vocab"]["far"] = 41
    folder = write_hugging_face(tmp_path / "a", content)
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.vocab_size == 42
    assert tokenizer.encode("far red") == [41, 1]


def test_a_special_token_among_a_models_pieces_is_spelled_out(tmp_path: Path) -> None:
    pieces = ["</s>", "<unk>", "\u2581", "<", "/", "s", ">", "a", "<pad>", "p", "d"]
    scores = [0.0, 0.0, -2.0, -3.0, -3.0, -3.0, -3.0, -3.0, -1.0, -3.0, -3.0]
    content = files.word_level_json(["x"], []) | {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": 1,
            "vocab": [list(pair) for pair in zip(pieces, scores, strict=True)],
        },
    }
    folder = write_hugging_face(
        tmp_path / "a",
        content,
        tokenizer_config={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    )
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (0, 8, 11)
    expected = [2, 7, 3, 4, 5, 6, 7, 2, 3, 9, 7, 10, 6]
    assert tokenizer.encode("a</s>a <pad>") == expected
    assert tokenizer.encode_batch(["a</s>a <pad>"], 2) == [expected]
    assert tokenizer.decode(expected) == "a</s>a <pad>"
    # An unknown letter keeps the id of unknown ones.
    assert tokenizer.encode("aZ") == [2, 7, 1]


def test_a_word_that_is_the_end_token_does_not_end_a_document(tmp_path: Path) -> None:
    content = files.word_level_json(["<unk>", "red", "<end>"], [])
    folder = write_hugging_face(tmp_path / "a", content, tokenizer_config={"eos_token": "<end>"})
    tokenizer = build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert tokenizer.eod == 2
    assert tokenizer.encode("red <end> green") == [1, 0, 0, 0]
