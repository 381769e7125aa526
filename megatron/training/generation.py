"""A model and its tokenizer, out of a checkpoint alone, ready to generate text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.config import resolve, specs
from megatron.core.dist_checkpointing.load import Checkpoint, load
from megatron.core.inference.engine import Completion, generate
from megatron.core.inference.sampling import Sampling
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.precision.config import PrecisionConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import Say, UserError
from megatron.training import checkpoint_source, checkpointing

Stream = Callable[[int, str], None]
"""Called with (number of the prompt, new text)."""


@dataclass(frozen=True)
class Generator:
    """Text in, text out."""

    model: GPTModel
    tokenizer: Tokenizer

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's ids; an empty prompt is the start of a document.

        Raises:
            UserError: the prompt is empty and the tokenizer has no end-of-document token.
        """
        ids = [int(token) for token in self.tokenizer.encode(prompt)]
        if ids:
            return ids
        if self.tokenizer.eod is None:
            raise UserError("an empty prompt needs a tokenizer with an end-of-document token")
        return [self.tokenizer.eod]

    def stop_tokens(self, words: Sequence[str], at_document_end: bool) -> list[int]:
        """Return the ids that end a text.

        Raises:
            UserError: a word is more than one token.
        """
        stops = [self.tokenizer.eod] if at_document_end and self.tokenizer.eod is not None else []
        for word in words:
            ids = [int(token) for token in self.tokenizer.encode(word)]
            if len(ids) != 1:
                raise UserError(
                    f"--stop-token {word!r} is {len(ids)} tokens ({ids}); give a single one"
                )
            stops += ids
        return stops

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: Sequence[int] = (),
        seed: int = 1234,
        use_cache: bool = True,
        stream: Stream | None = None,
    ) -> list[tuple[str, Completion]]:
        """Return each prompt's continuation, as text without the stop token, and in detail."""
        shown = [_Decoder(self.tokenizer, prompt) for prompt in prompts]

        def on_token(sample: int, token: int) -> None:
            if stream is not None and token not in stop_tokens:
                stream(sample, shown[sample].add(token))

        completions = generate(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            seed=seed,
            use_cache=use_cache,
            on_token=on_token,
        )
        return [
            (self.text(prompt, completion), completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def text(self, prompt: Sequence[int], completion: Completion) -> str:
        """Return what a completion adds to its prompt, without the token that stopped it.

        Both are decoded together: many tokenizers drop a space at the start of a text.
        """
        kept = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        begun = self.tokenizer.decode(list(prompt))
        return self.tokenizer.decode([*prompt, *kept])[len(begun) :]


class _Decoder:
    """Text that a growing list of tokens adds to a prompt, without what may still change."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._length = len(tokenizer.decode(self._tokens))

    def add(self, token: int) -> str:
        """Return the text that this token completes; a torn character waits for its rest."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self._length = text[self._length :], len(text)
        return new


def open_checkpoint(
    folder: str,
    step: int | None,
    device: torch.device,
    say: Say,
    *,
    tokenizer_overrides: Mapping[str, Any] | None = None,
) -> Generator:
    """Build model and tokenizer as the checkpoint's run had them, and load the weights.

    Args:
        folder: what ``--save`` was.
        step: iteration; the newest complete one when absent.
        device: where to run.
        say: told what was loaded.
        tokenizer_overrides: values of `TokenizerConfig` to use instead, for files that have moved.

    Raises:
        UserError: there is no complete checkpoint, or the tokenizer is another one.
    """
    found = checkpoint_source.find(folder, step, say)
    if found is None:
        raise UserError(f"--load ({folder}) holds no checkpoint")
    facts = found.index.facts
    stored = facts["config"]
    overrides = {name: v for name, v in (tokenizer_overrides or {}).items() if v is not None}
    tokenizer = build_tokenizer(_part(TokenizerConfig, {**stored, **overrides}))
    if tokenizer.fingerprint() != facts["tokenizer"]:
        raise UserError(
            f"{folder} was trained with another tokenizer: its fingerprint is "
            f"{facts['tokenizer']}, this one's {tokenizer.fingerprint()}; name the right files"
        )
    precision = _part(PrecisionConfig, stored)
    model = GPTModel(
        replace(_part(TransformerConfig, stored), attention_backend="auto"),
        Mesh.serial(device),
        vocab_size=facts["vocabulary_rows"],
        dtype=getattr(torch, precision.params_dtype),
    )
    with Checkpoint(found.folder, found.index) as checkpoint:
        report = load(
            checkpointing.items([model], None, model.mesh, saving=False),
            checkpoint,
            model.mesh.world,
            set_aside=(checkpointing.RANDOM, checkpointing.OPTIMIZER),
            verify=True,
        )
    model.eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"loaded {count:,} parameters of iteration {facts['iteration']} from "
        f"{Path(found.folder)} (hash {report.hash})"
    )
    return Generator(model, tokenizer)


def _part(cls: Any, stored: Mapping[str, Any]) -> Any:
    """Return one config out of a stored flat one."""
    declared = specs(cls)
    values = {name: spec.convert(stored[name]) for name, spec in declared.items() if name in stored}
    return resolve(cls, values)[0]
