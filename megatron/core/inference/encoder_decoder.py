"""Answers of an encoder-decoder: the encoder reads a prompt once, the decoder says token by token.

The decoder's texts all begin with one token, so that a step reads the same position of each. Keys
and values of earlier positions are kept (`StaticCache`), and those of the encoder's output, which
cross-attention makes once. A text that has ended goes on with whatever is chosen, unheard.

Shapes: B batch, S positions of the encoder, T of the decoder, V vocabulary, n heads, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.inference.engine import Chooser, Completion, OnToken
from megatron.core.inference.kv_cache import StaticCache
from megatron.core.inference.sampling import Sampling
from megatron.core.models.t5 import T5Model
from megatron.core.transformer.context import Context, Encoded
from megatron.core.utils import UserError


@dataclass(frozen=True)
class Ends:
    """How what a decoder says begins and ends."""

    begin: int
    """The token that all its texts begin with, and that it does not say."""
    stop_tokens: Sequence[int] = ()
    """A text ends with any of these; it is kept as the last token."""


@torch.inference_mode()
def generate_answers(
    model: T5Model,
    prompts: Sequence[Sequence[int]],
    *,
    ends: Ends,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 1234,
    use_cache: bool = True,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """Return what the decoder says of every prompt, up to ``max_new_tokens`` tokens.

    A collective of the model's tensor-parallel ranks: each calls it with the same arguments, and
    gets the same.

    Args:
        model: this rank's part of the model, all its layers.
        prompts: token ids that the encoder reads; each at least one token.
        ends: how the decoder's texts begin and end.
        max_new_tokens: tokens to add, the stop token included.
        sampling: how tokens are chosen; plain sampling at temperature 1 when absent.
        seed: of the sampling.
        use_cache: keep keys and values; without, every step reads both texts again.
        on_token: for streaming.

    Raises:
        UserError: a prompt is empty, has an id the model lacks, or a text would outgrow the model's
            learned positions.
    """
    _check(model, prompts, max_new_tokens)
    assert model.stage.is_first and model.stage.is_last, "the layers of an answer are on one rank"
    assert model.mesh.dp_cp.size == 1 and not model.sequence_parallel
    reader = _Reader(model, prompts, max_new_tokens, use_cache)
    chooser = Chooser(model.mesh, sampling or Sampling(), seed, len(prompts))
    completions = [Completion() for _ in prompts]
    everyone, running = range(len(prompts)), set(range(len(prompts)))
    tokens = [ends.begin] * len(prompts)
    for _ in range(max_new_tokens):
        chosen = chooser.choose(reader.read(tokens), everyone)
        tokens = [chosen[sample][0] for sample in everyone]
        for sample in sorted(running):
            token, log_probability = chosen[sample]
            completion = completions[sample]
            completion.tokens.append(token)
            completion.log_probabilities.append(log_probability)
            if on_token is not None:
                on_token(sample, token)
            if token in ends.stop_tokens:
                completion.finish = "stop"
                running.remove(sample)
        if not running:
            break
    return completions


class _Reader:
    """Reads one more token of each decoder's text, and returns the logits after it."""

    def __init__(
        self, model: T5Model, prompts: Sequence[Sequence[int]], room: int, use_cache: bool
    ) -> None:
        self._model, self._device = model, model.mesh.device
        tokens_BS = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
        for sample, prompt in enumerate(prompts):
            tokens_BS[sample, : len(prompt)] = torch.tensor(prompt)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts])
        self._tokens_BS = tokens_BS.to(self._device)
        valid_BS = torch.arange(tokens_BS.shape[1]) < lengths_B[:, None]
        self._valid_BS = valid_BS.to(self._device)
        self._said = torch.empty(len(prompts), 0, dtype=torch.int64, device=self._device)
        self._cache: StaticCache | None = None
        if use_cache:
            self._cache = StaticCache(room, len(prompts))
            self._encoded = self._encode()
            relative = model.decoder_relative_pos_emb
            self._bias_1nTT = None if relative is None else relative(room)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return ``[B, V]`` logits on the CPU."""
        new_B1 = torch.tensor(tokens, device=self._device)[:, None]
        self._said = torch.cat((self._said, new_B1), 1)
        if self._cache is not None:
            return self._step(new_B1, self._cache)[:, -1].cpu()
        logits_BTV = self._model(
            self._tokens_BS,
            self._said,
            encoder_valid_BS=self._valid_BS,
        )
        return logits_BTV[:, -1].cpu()  # type: ignore[no-any-return]

    def _encode(self) -> Encoded:
        """Run the encoder; what cross-attention makes of its output is kept by layer."""
        model, length = self._model, self._tokens_BS.shape[1]
        assert model.embedding is not None and model.encoder is not None
        relative = model.encoder_relative_pos_emb
        context = Context(
            rotary=None if model.rotary is None else model.rotary(length, None),
            valid_BT=self._valid_BS,
            bias_1nST=None if relative is None else relative(length),
        )
        x_SBH = model.encoder(model.embedding(self._tokens_BS, None, None), context)
        return Encoded(x_SBH.to(model.dtype), self._valid_BS, kept={})

    def _step(self, tokens_B1: Tensor, cache: StaticCache) -> Tensor:
        """Run the decoder on a token of each text, at the position after those that were read."""
        model, place = self._model, self._said.shape[1] - 1
        assert model.embedding is not None and model.decoder is not None
        assert model.output_layer is not None
        positions_B1 = torch.full_like(tokens_B1, place)
        cache.place(positions_B1)
        context = Context(
            rotary=None if model.rotary is None else model.rotary(1, positions_B1),
            cache=cache,
            query_positions_BS=positions_B1,
            encoded=self._encoded,
        )
        if self._bias_1nTT is not None:
            here = self._bias_1nTT[:, :, place : place + 1, : place + 1]
            context = replace(context, bias_1nST=here)
        x_1BH = model.decoder(model.embedding(tokens_B1, positions_B1, None), context)
        logits_B1V: Tensor = model.output_layer(x_1BH)
        return logits_B1V


def _check(model: T5Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
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
    position = model.config.position
    limit = position.max_position_embeddings
    if position.position_embedding_type != "learned_absolute":
        return
    learned = f"learned positions, {limit} (--max-position-embeddings of its training)"
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    if len(prompts[longest]) > limit:
        raise UserError(
            f"prompt {longest} has {len(prompts[longest])} tokens, more than the encoder has "
            f"{learned}; shorten it to {limit} tokens"
        )
    if max_new_tokens > limit:
        raise UserError(
            f"--num-tokens-to-generate ({max_new_tokens}) is more than the decoder has {learned}; "
            f"give at most {limit}"
        )
