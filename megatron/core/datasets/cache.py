"""Index arrays on disk: built once, found again by what they were made from.

The key is the MD5 of a description: JSON of the declared inputs in a fixed order (Megatron-core's,
so its caches hit and ours hit there). The files of a key are

    KEY-CLASS-SPLIT-description.txt      the description itself
    KEY-CLASS-SPLIT-NAME.npy             an array each
    KEY-CLASS-SPLIT-inputs.json          what the description leaves out: a mark of the content

Arrays appear under their names only when complete, and the description last. What is there is
checked before use; a file that is damaged, or was made from other content under the same path, is
built again. A process that is told not to build waits for the files, saying what it waits for.
Who builds is the caller's business: one process per place that the files are visible in.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron.core.utils import Say, UserError, atomic_path, silent

Arrays = dict[str, npt.NDArray[Any]]

Check = Callable[[Arrays, bool], str | None]
"""Says what is wrong with arrays from disk; told whether the mark of their content agreed."""


@dataclass(frozen=True, kw_only=True)
class BuildPolicy:
    """What this process does about index files that are not there."""

    build: bool = True
    """Build them; otherwise wait until another process has."""
    timeout: float = 1800.0
    """Seconds to wait."""
    poll: float = 0.5
    """Seconds between looks."""
    report_every: float = 30.0
    """Seconds between messages while waiting."""


def describe(description: Mapping[str, Any]) -> str:
    """Return the canonical text of a description."""
    return json.dumps(description, indent=4)


def key_of(description: Mapping[str, Any]) -> str:
    """Return the cache key of a description: the same in every process and on every machine."""
    text = describe(description).encode("utf-8")
    return hashlib.md5(text, usedforsecurity=False).hexdigest()


class IndexCache:
    """The files of one description in one folder.

    Args:
        folder: where they lie; None keeps arrays in memory only.
        description: the declared inputs; its ``class`` is part of the file names.
        split: the split's name.
        inputs: marks of the content that the description leaves out, compared at every use.
        say: told what is built, why, and what is waited for.
    """

    def __init__(
        self,
        folder: str | Path | None,
        description: Mapping[str, Any],
        split: str,
        inputs: Mapping[str, Any],
        say: Say = silent,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.description = describe(description)
        self.key = key_of(description)
        self.stem = f"{self.key}-{description['class']}-{split}"
        self.inputs = dict(inputs)
        self.say = say

    def path(self, suffix: str) -> Path:
        """Return the path of ``STEM-suffix``."""
        assert self.folder is not None
        return self.folder / f"{self.stem}-{suffix}"

    def get(
        self,
        names: tuple[str, ...],
        build: Callable[[], Arrays],
        check: Check,
        policy: BuildPolicy,
    ) -> tuple[Arrays, Literal["hit", "built"]]:
        """Return the arrays, from disk when they are there and sound.

        Args:
            names: the arrays.
            build: makes them.
            check: says what is wrong with arrays from disk, or None.
            policy: build what is missing, or wait for it.
        """
        if self.folder is None:
            return build(), "built"
        found, problem = self._load(names, check)
        if found is not None:
            return found, "hit"
        if not policy.build:
            return self._wait(names, check, policy), "hit"
        if problem:
            self.say(f"WARNING: index files are built again: {problem}")
        self.say(f"building index files {self.folder / self.stem}-*.npy")
        arrays = build()
        self._store(arrays)
        found, problem = self._load(names, check)
        assert found is not None, f"{self.stem} was just written: {problem}"
        return found, "built"

    def _store(self, arrays: Arrays) -> None:
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                with atomic_path(self.path(f"{name}.npy")) as part, open(part, "wb") as file:
                    np.save(file, array, allow_pickle=False)
            with atomic_path(self.path("inputs.json")) as part:
                part.write_text(json.dumps(self.inputs, indent=1), encoding="utf-8")
            with atomic_path(self.path("description.txt")) as part:
                part.write_text(self.description, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"the index files cannot be written to {self.folder} ({error}); "
                "give a writable folder with --data-cache-path"
            ) from error

    def _load(self, names: tuple[str, ...], check: Check) -> tuple[Arrays | None, str | None]:
        """Return (arrays, None), or (None, what is wrong); nothing is wrong with absent files."""
        paths = {name: self.path(f"{name}.npy") for name in names}
        if not all(path.is_file() for path in [*paths.values(), self.path("description.txt")]):
            return None, None
        if self.path("description.txt").read_text(encoding="utf-8") != self.description:
            return None, f"{self.path('description.txt')} describes other inputs"
        arrays: Arrays = {}
        for name, path in paths.items():
            try:
                arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                return None, f"{path} is damaged ({error})"
        problem = self._other_inputs() or check(arrays, self.path("inputs.json").is_file())
        return (None, f"{self.folder}/{self.stem}: {problem}") if problem else (arrays, None)

    def _other_inputs(self) -> str | None:
        """Say how the content differs from what the arrays were made from, if that is known."""
        path = self.path("inputs.json")
        if not path.is_file():  # made by Megatron-core: only the arrays themselves can be checked
            return None
        try:
            then = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            return f"inputs.json is damaged ({error})"
        now = json.loads(json.dumps(self.inputs))
        changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
        return f"made from other data ({', '.join(changed)} changed)" if changed else None

    def _wait(self, names: tuple[str, ...], check: Check, policy: BuildPolicy) -> Arrays:
        """Return the arrays once another process has published them."""
        started = reported = time.monotonic()
        while True:
            found, problem = self._load(names, check)
            if found is not None:
                return found
            now = time.monotonic()
            missing = [n for n in names if not self.path(f"{n}.npy").is_file()]
            state = problem or f"missing: {', '.join(missing) or 'description.txt'}"
            where = f"{self.folder}/{self.stem}"
            if now - started > policy.timeout:
                raise UserError(
                    f"waited {policy.timeout:.0f} s for index files that another process was to "
                    f"build ({where}; {state}). If the folder is not shared between nodes, every "
                    "node must build its own; if building just takes longer, raise "
                    "--index-build-timeout or prepare the files before the run"
                )
            if now - reported >= policy.report_every:
                self.say(f"waiting for {where}, for {now - started:.0f} s so far ({state})")
                reported = now
            time.sleep(policy.poll)


class IndexStore:
    """The index files of a run, and which of them were there.

    Args:
        folder: where they lie; None puts those of a corpus beside it.
        policy: build what is missing, or wait for it.
        say: told what is built, why, and what is waited for.
    """

    def __init__(self, folder: str | None, policy: BuildPolicy, say: Say = silent) -> None:
        self._folder = folder
        self._policy = policy
        self._say = say
        self.files: dict[str, str] = {}
        """By path without ending: ``hit`` or ``built``."""

    def get(
        self,
        description: Mapping[str, Any],
        split: str,
        inputs: Mapping[str, Any],
        names: tuple[str, ...],
        build: Callable[[], Arrays],
        check: Check,
        prefix: str | None = None,
    ) -> Arrays:
        """Return the arrays of a description; see `IndexCache`.

        Args:
            description: the declared inputs.
            split: the split's name.
            inputs: marks of the content.
            names: the arrays.
            build: makes them.
            check: says what is wrong with arrays from disk, or None.
            prefix: the corpus that they are of; None for blends and made-up rows, whose arrays are
                kept in memory where there is no folder.
        """
        folder = self._folder
        if folder is None and prefix is not None:
            folder = f"{prefix}/cache/{description['class']}_indices"
        cache = IndexCache(folder, description, split, inputs, self._say)
        arrays, state = cache.get(names, build, check, self._policy)
        if cache.folder is not None:
            self.files[str(cache.folder / cache.stem)] = state
        return arrays
