"""Answers of an encoder-decoder: with a cache as without, alone as in a batch, as by training."""

from typing import Any

import pytest
import torch

from megatron.core import rng
from megatron.core.inference.encoder_decoder import Ends, generate_answers
from megatron.core.inference.engine import Completion
from megatron.core.inference.sampling import Sampling
from megatron.core.mesh import Mesh
from megatron.core.models.t5 import T5Model
from megatron.core.tokenizers.byte_level import ByteLevelTokenizer
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from megatron.training.generation import Filler
from tools.span_accuracy import right_tokens

PROMPTS = [[5, 9, 3, 17, 8, 2], [4], [11, 12, 13]]
GREEDY = Sampling(temperature=0.0)
BEGIN = Ends(1)


def build(**more: Any) -> T5Model:
    config = TransformerConfig.resolve(
        **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "kv_channels": 8},
        **{"decoder_num_layers": 3, "max_position_embeddings": 16, "init_method_std": 0.4, **more},
    )
    model = T5Model(config, Mesh.serial(), vocab_size=40, dtype=torch.float64)
    rng.initialize(model, 3)
    return model.eval()


POSITIONS = ["learned_absolute", "relative", "rope", "none"]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_a_cache_changes_nothing(positions: str, backend: str) -> None:
    model = build(position_embedding_type=positions, attention_backend=backend)
    sampling = Sampling(temperature=0.8)
    asked: dict[str, Any] = {"ends": BEGIN, "max_new_tokens": 12, "sampling": sampling}
    found = generate_answers(model, PROMPTS, **asked)
    plain = generate_answers(model, PROMPTS, **asked, use_cache=False)
    for one, other in zip(found, plain, strict=True):
        assert one.tokens == other.tokens and len(one.tokens) == 12
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-10)


@pytest.mark.parametrize("positions", POSITIONS)
def test_each_token_is_the_models_most_probable(positions: str) -> None:
    """By the whole forward of training, for one prompt alone, without padding."""
    model = build(position_embedding_type=positions)
    answers = generate_answers(model, PROMPTS, ends=BEGIN, max_new_tokens=9, sampling=GREEDY)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        said = [1]
        for token, log_probability in zip(answer.tokens, answer.log_probabilities, strict=True):
            with torch.no_grad():
                logits = model(
                    torch.tensor([prompt]),
                    torch.tensor([said]),
                    encoder_valid_BS=torch.ones(1, len(prompt), dtype=torch.bool),
                )[0, -1]
            assert token == int(logits.argmax())
            assert log_probability == pytest.approx(float(logits.log_softmax(0)[token]), abs=1e-10)
            said.append(token)


def test_answers_end_and_do_not_disturb_each_other() -> None:
    model = build()
    asked: dict[str, Any] = {"ends": BEGIN, "max_new_tokens": 14, "sampling": GREEDY}
    whole = generate_answers(model, PROMPTS, **asked)
    stop = whole[0].tokens[4]
    seen: list[tuple[int, int]] = []
    asked["ends"] = Ends(1, [stop])
    ended = generate_answers(model, PROMPTS, **asked, on_token=lambda *one: seen.append(one))
    for sample, (one, other) in enumerate(zip(ended, whole, strict=True)):
        place = other.tokens.index(stop) + 1 if stop in other.tokens else 14
        assert one.tokens == other.tokens[:place] == [t for s, t in seen if s == sample]
        assert one.finish == ("stop" if stop in other.tokens else "length")
    assert ended[0].finish == "stop"


def test_marks_of_a_prompt_are_sentinels_and_are_filled() -> None:
    tokenizer = ByteLevelTokenizer(("<eod>", "<pad>"), sentinels=3)
    filler = Filler(build(), tokenizer, ends_with_eos=True)
    ids = filler.encode("to <extra_id_0> or <extra_id_2>")
    assert ids == [*b"to ", 258, *b" or ", 260, 256]
    assert Filler(build(), tokenizer).encode("<extra_id_1>x") == [259, *b"x"]
    assert filler.stop_tokens((), True) == [256] and filler.stop_tokens((), False) == []
    said = filler.text(ids, Completion([258, *b"be", 260, *b"not", 256], finish="stop"))
    assert said == "<extra_id_0>be<extra_id_2>not"
    assert filler.shown("to <extra_id_0> or <extra_id_2>", said) == "to be or not"
    assert filler.shown("a <extra_id_1> b", said) == "a <extra_id_1> b"  # nothing was said of it
    again = "<extra_id_0>be<extra_id_2>not<extra_id_0>me"
    assert filler.shown("to <extra_id_0> or <extra_id_2>", again) == "to be or not"
    assert filler.stop_tokens(["<extra_id_1>"], False) == [259]
    # A mark is spelt in one way; what is not is text.
    assert filler.encode("<extra_id_00><extra_id_0>") == [*b"<extra_id_00>", 258, 256]
    assert filler.shown("<extra_id_00><extra_id_0>", said) == "<extra_id_00>be"
    refusals = {
        "": "an empty prompt",
        "<extra_id_3>": "has 3 marks",
        "x": "put <extra_id_0> where",
        "<extra_id_1> x <extra_id_1>": "has <extra_id_1> more than once",
    }
    for prompt, match in refusals.items():
        with pytest.raises(UserError, match=match):
            filler.encode(prompt)


def test_a_masked_token_is_right_at_its_own_place() -> None:
    marks = [90, 91, 92]
    wanted = [90, 5, 6, 91, 7]
    assert right_tokens([90, 5, 6, 91, 7], wanted, marks) == (3, 3)
    assert right_tokens([91, 7, 90, 5, 6], wanted, marks) == (3, 3)
    assert right_tokens([90, 6, 5, 91, 8, 7], wanted, marks) == (0, 3)
    assert right_tokens([5, 6, 92, 7], wanted, marks) == (0, 3)


@pytest.mark.parametrize(
    ("prompts", "count", "match"),
    [
        ([], 3, "nothing to generate"),
        ([[]], 3, "prompt 0 has no tokens"),
        ([[40]], 3, "prompt 0 has token 40"),
        (
            [[1], [1] * 17],
            3,
            r"prompt 1 has 17 tokens, .* encoder .* 16 \(--max-position-embeddings .* to 16",
        ),
        ([[1]], 17, r"--num-tokens-to-generate \(17\) .* decoder .* positions, 16 .* at most 16"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    prompts: list[list[int]], count: int, match: str
) -> None:
    with pytest.raises(UserError, match=match):
        generate_answers(build(), prompts, ends=BEGIN, max_new_tokens=count)
