"""A model and its tokenizer, out of a checkpoint alone, ready to generate text.

The layout is this program's own: a checkpoint of any layout is read on any other. Processes share
the matrices of each layer (tensor parallelism) or the layers (pipeline parallelism) of one copy.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config import Config, resolve, specs
from megatron.core.dist_checkpointing.load import load
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.grid import ParallelConfig, place
from megatron.core.inference.encoder_decoder import Ends, generate_answers
from megatron.core.inference.engine import Completion, generate
from megatron.core.inference.sampling import Sampling
from megatron.core.mesh import Axis, GroupOptions, Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.models.t5 import T5Model
from megatron.core.pipeline_parallel.stages import make_stages
from megatron.core.precision.config import PrecisionConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import Say, UserError
from megatron.training import layout_rules
from megatron.training.checkpoints import contents as checkpointing
from megatron.training.checkpoints import source as checkpoint_source
from megatron.training.failing import watchdog
from megatron.training.failing.heartbeat import Pulse
from megatron.training.processes import setup
from megatron.training.processes.launch import Launch
from megatron.training.processes.rank_zero import from_first

Stream = Callable[[int, str], None]
"""Called with (number of the prompt, new text)."""

_AHEAD = f"{checkpointing.WEIGHTS}mtp."
"""What the names of weights for multi-token prediction begin with."""


@dataclass(frozen=True)
class Generator:
    """Text in, text out."""

    model: Any
    tokenizer: Tokenizer

    @property
    def streams(self) -> bool:
        """Return whether what is said goes on where the prompt ends."""
        return True

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's ids; an empty prompt is the start of a document.

        Raises:
            UserError: the prompt is empty and the tokenizer has no end-of-document token.
        """
        ids = self.ids(prompt)
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
            ids = self.ids(word)
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

        completions = self._generate(
            prompts,
            stop_tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            use_cache=use_cache,
            on_token=on_token,
        )
        return [
            (self.text(prompt, completion), completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def _generate(
        self, prompts: Sequence[Sequence[int]], stop_tokens: Sequence[int], **asked: Any
    ) -> list[Completion]:
        return generate(self.model, prompts, stop_tokens=stop_tokens, **asked)

    def shown(self, prompt: str, text: str) -> str:
        """Return a prompt with what was said of it."""
        return prompt + text

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


@dataclass(frozen=True)
class Filler(Generator):
    """Text with marks in, the same text with something in their places out.

    Marks are the tokenizer's sentinels by name, ``<extra_id_0>``, ``<extra_id_1>``, ...; the
    decoder says for each of them what its place held (`core.datasets.span_corruption`).
    """

    ends_with_eos: bool = False
    """The encoder's texts end with eos, as those that the model was trained on did."""

    @property
    def streams(self) -> bool:
        """Return whether what is said goes on where the prompt ends: it does not."""
        return False

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, of which each mark is one.

        Raises:
            UserError: the tokenizer has no token for a mark.
        """
        sentinels, ids = self.tokenizer.special.sentinels, list[int]()
        for part in _MARK.split(text):
            if not _MARK.fullmatch(part):
                ids += super().ids(part) if part else []
            elif int(part[10:-1]) < len(sentinels):
                ids.append(sentinels[int(part[10:-1])])
            else:
                raise UserError(f"{part}: the model has {len(sentinels)} marks")
        return ids

    def encode(self, prompt: str) -> list[int]:
        """Return the ids that the encoder reads.

        Raises:
            UserError: the prompt is empty, has no mark, whose place an answer would take, one
                twice, or one that the tokenizer has no token for.
        """
        special, ids, marks = self.tokenizer.special, self.ids(prompt), _MARK.findall(prompt)
        if not ids:
            raise UserError("an empty prompt: give a text with marks, such as <extra_id_0>")
        if not marks:
            raise UserError(
                f"prompt {prompt!r} has no mark to be filled in; put <extra_id_0> where the model "
                "is to write, <extra_id_1> at a second place, and so on"
            )
        twice = next((mark for mark in marks if marks.count(mark) > 1), None)
        if twice is not None:
            raise UserError(
                f"prompt {prompt!r} has {twice} more than once; give each place a mark of its own, "
                "<extra_id_0>, <extra_id_1> and so on"
            )
        return [*ids, special.eos] if self.ends_with_eos and special.eos is not None else ids

    def stop_tokens(self, words: Sequence[str], at_document_end: bool) -> list[int]:
        """Return the ids that end what is said."""
        eos = self.tokenizer.special.eos
        ends = [eos] if at_document_end and eos is not None else []
        return ends + super().stop_tokens(words, False)

    def _generate(
        self, prompts: Sequence[Sequence[int]], stop_tokens: Sequence[int], **asked: Any
    ) -> list[Completion]:
        special = self.tokenizer.special
        begin = special.pad if special.bos is None else special.bos
        assert begin is not None, "a run's tokenizer has what its decoder begins with"
        return generate_answers(self.model, prompts, ends=Ends(begin, stop_tokens), **asked)

    def text(self, prompt: Sequence[int], completion: Completion) -> str:
        """Return what the decoder said, without the token that stopped it."""
        kept = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        return self.tokenizer.decode(kept)

    def shown(self, prompt: str, text: str) -> str:
        """Return the prompt with what was said in the places of its marks.

        Of a mark that is said again the first time counts, as it does for `tools/span_accuracy.py`.
        """
        _, *said = _MARK.split(text)
        spans: dict[str, str] = {}
        for mark, span in zip(said[::2], said[1::2], strict=True):
            spans.setdefault(mark, span)
        return "".join(spans.get(part, part) for part in _MARK.split(prompt))


_MARK = re.compile(r"(<extra_id_(?:0|[1-9]\d*)>)")


@dataclass(frozen=True)
class Processes:
    """Those that generate together, as one of them sees them."""

    world: Axis
    device: torch.device
    layout: ParallelConfig
    limit: timedelta
    """How long a collective waits."""


def check_layout(layout: ParallelConfig, world_size: int) -> None:
    """Refuse what generation has no use for.

    Raises:
        UserError: a size, or the number of processes, means nothing here.
    """
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    for flag, size, what in (
        ("--context-parallel-size", layout.context_parallel_size, "one token at a time is read"),
        (
            "--expert-model-parallel-size",
            layout.expert_model_parallel_size,
            "experts are cut over the tensor-parallel ranks",
        ),
    ):
        if size != 1:
            raise UserError(
                f"{flag} ({size}): {what}, so there is nothing to split; leave it out (a "
                "checkpoint of any layout can be read)"
            )
    size = tensor * pipeline
    if world_size != size:
        raise UserError(
            f"{world_size} process{'es' * (world_size > 1)} for one copy of the model, which "
            f"--tensor-model-parallel-size ({tensor}) x --pipeline-model-parallel-size "
            f"({pipeline}) spread over {size}; start {size}, or choose sizes whose product is "
            f"{world_size}. For several copies start the tool several times"
        )


@contextmanager
def connected(
    config: Config, layout: ParallelConfig, launch: Launch, device: str, limit: timedelta, say: Say
) -> Iterator[Processes]:
    """Join the other processes, and leave them at the end; they fail together.

    Args:
        config: what this process was told; the others must have been told the same.
        layout: what the processes share, see `check_layout`.
        launch: this process's place.
        device: ``auto``, ``cpu`` or ``cuda``.
        limit: how long to wait for one that does not come or does not answer.
        say: told what was chosen.

    Raises:
        UserError: there is no such device here, the layout is not one for generation, or the
            processes cannot meet (`processes.meeting`).
        RunFailed: not all processes came in time.
    """
    check_layout(layout, launch.world_size)
    here = setup.choose_device(device, launch)
    setup.set_threads(here, launch, os.environ, say)
    group = None
    if launch.world_size > 1:
        setup.join(config, launch, setup.choose_backend("auto", here), limit, os.environ)
        group = dist.group.WORLD
    world = Axis("world", tuple(range(launch.world_size)), launch.rank, group)
    grid, _ = layout.grids(launch.world_size)
    where = place(launch.rank, grid.sizes, grid.coordinates(launch.rank))
    name = Path(sys.argv[0]).stem
    try:
        with watchdog.watching(world, where, launch.master_addr, Pulse(), name):
            yield Processes(world, here, layout, limit + setup.MARGIN)
    finally:
        setup.disconnect()


def open_checkpoint(
    folder: str,
    step: int | None,
    processes: Processes,
    say: Say,
    *,
    tokenizer_overrides: Mapping[str, Any] | None = None,
) -> Generator:
    """Build model and tokenizer as the checkpoint's run had them, and load the weights.

    A collective of the processes.

    Args:
        folder: what ``--save`` was.
        step: iteration; the newest complete one when absent.
        processes: where to run.
        say: told what was loaded.
        tokenizer_overrides: values of `TokenizerConfig` to use instead, for files that have moved.

    Raises:
        UserError: there is no complete checkpoint, the tokenizer is another one, or the model
            cannot be spread so.
    """
    # A run may be saving: let one process say which checkpoint is the newest.
    found = from_first(processes.world, lambda: checkpoint_source.find(folder, step, say))
    if found is None:
        raise UserError(f"--load ({folder}) holds no checkpoint")
    facts = found.index.facts
    stored = facts["config"]
    overrides = {name: v for name, v in (tokenizer_overrides or {}).items() if v is not None}
    if stored.get("tokenizer_type") is None:
        raise UserError(
            f"{folder} names no tokenizer: its weights come from elsewhere; convert them again "
            "with --tokenizer-type and its files"
        )
    tokenizer = build_tokenizer(_part(TokenizerConfig, {**stored, **overrides}))
    if facts.get("tokenizer") not in (None, tokenizer.fingerprint()):
        raise UserError(
            f"{folder} was trained with another tokenizer: its fingerprint is "
            f"{facts['tokenizer']}, this one's {tokenizer.fingerprint()}; name the right files"
        )
    # Megatron-LM stores no number of rows in use.
    rows = facts.get("vocabulary_rows", tokenizer.vocab_size)
    model = _build_model(stored, rows, processes)
    with Checkpoint(found.folder, found.index) as checkpoint:
        report = load(
            checkpointing.items([model], None, model.mesh, saving=False),
            checkpoint,
            model.mesh.world,
            set_aside=(checkpointing.RANDOM, checkpointing.OPTIMIZER, _AHEAD),
            verify=True,
        )
    model.eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"loaded {count:,} parameters of iteration {facts['iteration']} from "
        f"{Path(found.folder)} (hash {report.hash})"
    )
    if isinstance(model, GPTModel):
        return Generator(model, tokenizer)
    return Filler(model, tokenizer, ends_with_eos=stored.get("span_corruption") == "random_spans")


def _build_model(stored: Mapping[str, Any], rows: int, processes: Processes) -> GPTModel | T5Model:
    """Return this process's part of the model that a stored config describes."""
    config: TransformerConfig = _part(TransformerConfig, stored)
    if config.bert.encoder_alone:
        raise UserError(
            "the checkpoint is of an encoder alone (pretrain_bert.py), which says masked words and "
            "writes no text; give one of a decoder"
        )
    pipeline = processes.layout.pipeline_model_parallel_size
    if config.has_two_stacks and pipeline > 1:
        raise UserError(
            f"--pipeline-model-parallel-size ({pipeline}): the layers of an encoder-decoder answer "
            "on one rank; cut them with --tensor-model-parallel-size"
        )
    precision: PrecisionConfig = _part(PrecisionConfig, stored)
    tensor = processes.layout.tensor_model_parallel_size
    layout_rules.check_tensor_heads(config, tensor)
    layout_rules.check_tensor_widths(config, tensor, "of the checkpoint")
    stages = make_stages(config.all_layers, pipeline)
    mesh = Mesh.serial(processes.device)
    if processes.world.size > 1:
        mesh = Mesh.create(
            processes.layout,
            processes.device,
            num_query_groups=config.attention.num_query_groups,
            options=GroupOptions(timeout=processes.limit),
        )
    # One token at a time is generated: layers that look further ahead stay out.
    alone = replace(config.mtp, mtp_num_layers=None)
    config = replace(config, attention_backend="auto", mtp=alone)
    kind = T5Model if config.has_two_stacks else GPTModel
    return kind(
        config,
        mesh,
        vocab_size=rows,
        padded_vocab_size=-(-rows // tensor) * tensor,
        dtype=getattr(torch, precision.params_dtype),
        stage=stages[mesh.pp.coordinate],
    )


def _part(cls: Any, stored: Mapping[str, Any]) -> Any:
    """Return one config out of a stored flat one."""
    declared = specs(cls)
    values = {name: spec.convert(stored[name]) for name, spec in declared.items() if name in stored}
    return resolve(cls, values)[0]
