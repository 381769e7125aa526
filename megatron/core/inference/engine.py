"""Text generation: read the prompts once, then one token per step for every sample.

Each sample draws from a generator of its own, keyed by (seed, sample number), so what it says
does not depend on who shares its batch.

Shapes: B batch, S tokens of this step, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.inference.kv_cache import StaticCache
from megatron.core.inference.sampling import Sampling, choose
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import UserError


@dataclass
class Completion:
    """What was generated after one prompt."""

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    """Natural logarithm of each token's probability under the model, before sampling's cuts."""
    finish: Literal["length", "stop"] = "length"


OnToken = Callable[[int, int], None]
"""Called with (sample, token) as soon as a token is known."""


@torch.inference_mode()
def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int = 1234,
    use_cache: bool = True,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """Continue every prompt by up to ``max_new_tokens`` tokens.

    Args:
        model: the whole model, on one pipeline stage.
        prompts: token ids; each at least one token.
        max_new_tokens: tokens to add, the stop token included.
        sampling: how tokens are chosen; plain sampling at temperature 1 when absent.
        stop_tokens: a sample ends with any of these; it is kept as the last token.
        seed: of the sampling.
        use_cache: keep keys and values; without, every step reads the whole text again.
        on_token: for streaming.

    Raises:
        UserError: a prompt is empty, has an id the model lacks, or the text would outgrow the
            model's learned positions.
    """
    _check(model, prompts, max_new_tokens)
    sampling = sampling or Sampling()
    device = model.mesh.device
    texts = [list(prompt) for prompt in prompts]
    completions = [Completion() for _ in texts]
    running = set(range(len(texts)))
    generators = [_generator(seed, sample) for sample in range(len(texts))]
    longest = max(map(len, texts)) + max_new_tokens
    cache = StaticCache(longest, len(texts)) if use_cache else None
    logits_BV = _read(model, texts, cache, device)
    for step in range(max_new_tokens):
        for sample in sorted(running):
            token = choose(logits_BV[sample], sampling, generators[sample])
            completion = completions[sample]
            completion.tokens.append(token)
            completion.log_probabilities.append(float(logits_BV[sample].log_softmax(0)[token]))
            texts[sample].append(token)
            if on_token is not None:
                on_token(sample, token)
            if token in stop_tokens:
                completion.finish = "stop"
                running.discard(sample)
        if not running or step + 1 == max_new_tokens:
            break
        logits_BV = (
            _read(model, texts, None, device)
            if cache is None
            else _step(model, texts, cache, device)
        )
    return completions


def _generator(seed: int, sample: int) -> torch.Generator:
    # On the CPU, so that a seed gives the same text on every device.
    return torch.Generator().manual_seed(rng.key("sample", seed, sample))


def _read(
    model: GPTModel, texts: list[list[int]], cache: StaticCache | None, device: torch.device
) -> Tensor:
    """Run whole texts, padded on the right, and return the logits after each one's last token."""
    lengths = torch.tensor([len(text) for text in texts])
    tokens_BS = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for sample, text in enumerate(texts):
        tokens_BS[sample, : len(text)] = torch.tensor(text)
    if cache is not None:
        cache.place(None)
    logits_BSV: Tensor = model(tokens_BS.to(device), cache=cache)
    return logits_BSV[torch.arange(len(texts)), lengths - 1].cpu()


def _step(
    model: GPTModel, texts: list[list[int]], cache: StaticCache, device: torch.device
) -> Tensor:
    """Run each text's last token and return the logits after it.

    A sample that has ended repeats its last token: same position, same key, no effect on others.
    """
    tokens_BS = torch.tensor([[text[-1]] for text in texts], device=device)
    positions_BS = torch.tensor([[len(text) - 1] for text in texts], device=device)
    cache.place(positions_BS)
    logits_BSV: Tensor = model(tokens_BS, cache=cache, query_positions_BS=positions_BS)
    return logits_BSV[:, -1].cpu()


def _check(model: GPTModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompts or max_new_tokens < 1:
        raise UserError(
            f"nothing to generate: {len(prompts)} prompts, {max_new_tokens} tokens; "
            "give at least one of each"
        )
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens; give it at least one")
        wrong = [token for token in prompt if not 0 <= token < model.vocab_size]
        if wrong:
            raise UserError(
                f"prompt {number} has token {wrong[0]}; the model knows 0 to {model.vocab_size - 1}"
            )
    position, longest = model.config.position, max(map(len, prompts)) + max_new_tokens
    limit = position.max_position_embeddings
    # The last token generated is never read, so it needs no position.
    if position.position_embedding_type == "learned_absolute" and longest - 1 > limit:
        raise UserError(
            f"the longest prompt ({longest - max_new_tokens} tokens) and {max_new_tokens} new "
            f"tokens exceed the model's {limit} positions (--max-position-embeddings); "
            f"ask for at most {max(0, limit + 1 - longest + max_new_tokens)} new tokens"
        )
