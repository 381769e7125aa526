"""The settings of a Hugging Face config.json, each read once, and none overlooked.

A setting that nobody reads may change what the model computes. So whatever is neither read nor
known to be harmless is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.utils import UserError

HARMLESS = frozenset(
    # What files and library say of themselves, and what concerns generation or other tasks.
    "architectures model_type transformers_version torch_dtype dtype "
    "attn_implementation use_cache bos_token_id eos_token_id pad_token_id "
    "unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id "
    "task_specific_params output_attentions output_hidden_states return_dict problem_type id2label "
    "label2id num_labels finetuning_task chunk_size_feed_forward tokenizer_class prefix "
    "is_encoder_decoder is_decoder torchscript use_bfloat16 tf_legacy_loss pruned_heads "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences "
    "encoder_no_repeat_ngram_size bad_words_ids diversity_penalty begin_suppress_tokens "
    "is_llama_config transformers.js_config suppress_tokens exponential_decay_length_penalty "
    "remove_invalid_values "
    "output_scores return_dict_in_generate cross_attention_hidden_size".split()
)


class Settings:
    """The contents of a config.json, or of an object in it."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = dict(values), origin
        self._read: set[str] = set()

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a setting; ``default`` where it is absent or null.

        Raises:
            UserError: it is of another type.
        """
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        good = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if kind is float:
            good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good:
            raise self.error(name, f"it must be {_article(kind.__name__)}")
        return kind(value)

    def need(self, name: str, kind: type) -> Any:
        """Return a setting that must be there.

        Raises:
            UserError: it is absent or of another type.
        """
        value = self.take(name, kind)
        if value is None:
            raise UserError(f"{self.origin} has no {name}, without which there is no model")
        return value

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Return a number that must be a whole one, though it may be written as another.

        Raises:
            UserError: it is no whole number.
        """
        value = self.take(name, float, default)
        if value is not None and value != int(value):
            raise self.error(name, "only whole numbers can be expressed here")
        return None if value is None else int(value)

    def skip(self, *names: str) -> None:
        """Take note of settings that change nothing here."""
        self._read.update(names)

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """Read a setting of which only some values can be expressed here; null is always allowed.

        Raises:
            UserError: it has another value.
        """
        self._read.add(name)
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, why)

    def nested(self, name: str) -> "Settings | None":
        """Return a setting that is an object; None where it is absent or null.

        Raises:
            UserError: it is no object.
        """
        value = self.take(name, dict)
        return None if value is None else Settings(value, f"{self.origin}: {name}")

    def error(self, name: str, why: str) -> UserError:
        """Return the error of a setting that cannot be expressed."""
        return UserError(f"{self.origin}: {name} is {self.values.get(name)!r}: {why}")

    def finish(self, harmless: Sequence[str] | frozenset[str] = HARMLESS) -> None:
        """Refuse what was not read and may matter.

        Raises:
            UserError: there is something.
        """
        rest = {
            name: value
            for name, value in self.values.items()
            # The library's own notes begin with a low line.
            if not (name in self._read or name in harmless or name.startswith("_"))
            and value not in (None, False)
        }
        if rest:
            listed = ", ".join(f"{name} = {value!r}"[:80] for name, value in sorted(rest.items()))
            raise UserError(
                f"{self.origin}: {listed}: settings that are not known here and may change what "
                "the model computes; where they do not, remove them from a copy of the file"
            )


def _article(kind: str) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    return words.get(kind, "an object")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds an object.

    Raises:
        UserError: it is absent, or no such file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no object of settings")
    return value
