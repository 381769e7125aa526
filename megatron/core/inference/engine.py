"""Text generation: read the prompts once, then one token per step for every sample.

Each sample draws from a generator of its own, keyed by (seed, sample number), so what it says
does not depend on who shares its batch.

A model may be spread over tensor- and pipeline-parallel ranks. One rank that has logits chooses the
tokens of a step, and all ranks learn them by one sum, so that no rounding can part them.

Shapes: B batch, S tokens of this step, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron.core import comm, rng
from megatron.core.inference.forward import forward
from megatron.core.inference.kv_cache import StaticCache
from megatron.core.inference.sampling import Sampling, choose
from megatron.core.mesh import Mesh
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

    A collective of the model's ranks: each calls it with the same arguments, and gets the same.

    Args:
        model: this rank's part of the model, one stage of it.
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
    assert model.mesh.dp_cp.size == 1, "replicas and shares of the sequence do not generate"
    texts = [list(prompt) for prompt in prompts]
    completions = [Completion() for _ in texts]
    running = list(range(len(texts)))
    chooser = Chooser(model.mesh, sampling or Sampling(), seed, len(texts))
    longest = max(map(len, texts)) + max_new_tokens
    cache = StaticCache(longest, len(texts)) if use_cache else None
    logits_BV = _read(model, texts, cache)
    for step in range(max_new_tokens):
        for sample, (token, log_probability) in chooser.choose(logits_BV, running).items():
            completion = completions[sample]
            completion.tokens.append(token)
            completion.log_probabilities.append(log_probability)
            texts[sample].append(token)
            if on_token is not None:
                on_token(sample, token)
            if token in stop_tokens:
                completion.finish = "stop"
                running.remove(sample)
        if not running or step + 1 == max_new_tokens:
            break
        logits_BV = _read(model, texts, None) if cache is None else _step(model, texts, cache)
    return completions


class Chooser:
    """Chooses tokens on one rank for all."""

    def __init__(self, mesh: Mesh, sampling: Sampling, seed: int, samples: int) -> None:
        self._mesh, self._sampling = mesh, sampling
        self._decides = mesh.pp.coordinate == mesh.pp.size - 1 and mesh.tp.coordinate == 0
        self._generators = [_generator(seed, sample) for sample in range(samples)]

    def choose(
        self, logits_BV: Tensor | None, running: Sequence[int]
    ) -> dict[int, tuple[int, float]]:
        """Return the next token of each running sample and the logarithm of its probability.

        A collective; the logits are those of the deciding rank, on the others anything.
        """
        # Ids are whole numbers far below 2^53, so fp64 holds them as they are.
        chosen = torch.zeros(len(running), 2, dtype=torch.float64)
        if self._decides:
            assert logits_BV is not None, "the last stage has logits"
            for row, sample in enumerate(running):
                logits_V = logits_BV[sample]
                token = choose(logits_V, self._sampling, self._generators[sample])
                chosen[row, 0], chosen[row, 1] = token, logits_V.log_softmax(0)[token]
        shared = chosen.to(self._mesh.device)
        comm.all_reduce(shared, self._mesh.world)
        with comm.waiting("the tokens that the last stage chose"):
            rows = shared.tolist()
        return {
            sample: (int(token), logarithm)
            for sample, (token, logarithm) in zip(running, rows, strict=True)
        }


def _generator(seed: int, sample: int) -> torch.Generator:
    # On the CPU, so that a seed gives the same text on every device.
    return torch.Generator().manual_seed(rng.key("sample", seed, sample))


def _read(model: GPTModel, texts: list[list[int]], cache: StaticCache | None) -> Tensor | None:
    """Run whole texts, padded on the right; the last stage returns the logits after each one."""
    lengths = torch.tensor([len(text) for text in texts])
    tokens_BS = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for sample, text in enumerate(texts):
        tokens_BS[sample, : len(text)] = torch.tensor(text)
    if cache is not None:
        cache.place(None)
    logits_BSV = forward(model, tokens_BS.to(model.mesh.device), cache, None)
    if logits_BSV is None:
        return None
    return logits_BSV[torch.arange(len(texts)), lengths - 1].cpu()


def _step(model: GPTModel, texts: list[list[int]], cache: StaticCache) -> Tensor | None:
    """Run each text's last token; the last stage returns the logits after it.

    A sample that has ended repeats its last token: same position, same key, no effect on others.
    """
    device = model.mesh.device
    tokens_BS = torch.tensor([[text[-1]] for text in texts], device=device)
    positions_BS = torch.tensor([[len(text) - 1] for text in texts], device=device)
    cache.place(positions_BS)
    logits_BSV = forward(model, tokens_BS, cache, positions_BS)
    return None if logits_BSV is None else logits_BSV[:, -1].cpu()


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
        length = longest - max_new_tokens
        room = limit + 1 - length
        way = (
            f"ask for at most {room} new tokens"
            if room > 0
            else f"shorten the prompt to {limit} tokens"
        )
        raise UserError(
            f"the longest prompt ({length} tokens) and --num-tokens-to-generate "
            f"({max_new_tokens}) are more than the model has learned positions, {limit} "
            f"(--max-position-embeddings of its training); {way}"
        )
