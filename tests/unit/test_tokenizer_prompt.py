"""Where a prompt ends: a token that reaches over the boundary belongs to the answer."""

import pytest

from megatron.core.tokenizers.base import SpecialIds, Tokenizer
from megatron.core.tokenizers.prompt import prompt_length


class Longest(Tokenizer):
    """Takes the longest word of its list that the text goes on with."""

    family = "longest"
    words = ("a", "b", "c", " ", "ab", "bc", "abca")

    def __init__(self) -> None:
        super().__init__(kind="Longest", vocab_size=len(self.words), special=SpecialIds())

    def token_id(self, token: str) -> int | None:
        return self.words.index(token) if token in self.words else None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            word = max((w for w in self.words if text.startswith(w)), key=len)
            ids.append(self.words.index(word))
            text = text.removeprefix(word)
        return ids

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids)


@pytest.mark.parametrize(
    ("prompt", "answer", "length"),
    [
        ("c c", " ab", 3),  # nothing merges over the join
        ("c a", "b c", 2),  # "ab" does: of the prompt's three ids two stay
        ("c b", "", 3),
        ("", "ab", 0),
        ("abc", "a", 0),  # "ab" "c" alone, one id together
        ("ab", "c", 1),
    ],
)
def test_tok_05_a_token_over_the_boundary_is_the_answers(
    prompt: str, answer: str, length: int
) -> None:
    tokenizer = Longest()
    found = prompt_length(tokenizer, prompt, prompt + answer)
    assert found == length
    ids = tokenizer.encode(prompt + answer)
    assert prompt.startswith(tokenizer.decode(ids[:found]))


def test_a_prompt_is_the_beginning_of_its_text() -> None:
    with pytest.raises(AssertionError, match="'ab' does not begin with 'b'"):
        prompt_length(Longest(), "b", "ab")
