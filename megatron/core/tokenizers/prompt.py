"""Where in the ids of a text its prompt ends."""

from megatron.core.tokenizers.base import Tokenizer


def prompt_length(tokenizer: Tokenizer, prompt: str, text: str) -> int:
    """Return how many leading ids of ``text`` belong to its beginning ``prompt``.

    That is the longest common prefix of both encodings: a token that merges letters of the prompt
    with letters of the answer belongs to the answer. The length of the prompt's own encoding would
    be wrong there.

    Args:
        tokenizer: encodes both.
        prompt: the beginning of ``text``.
        text: prompt and answer.
    """
    assert text.startswith(prompt), f"{text[:40]!r} does not begin with {prompt[:40]!r}"
    pairs = zip(tokenizer.encode(prompt), tokenizer.encode(text), strict=False)
    length = 0
    for ours, theirs in pairs:
        if ours != theirs:
            break
        length += 1
    return length
