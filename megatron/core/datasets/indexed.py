"""Token files: ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` says where each sequence lies.

The two files are byte-compatible with Megatron-core's. ``.bin`` is nothing but token ids, one
sequence after the other. ``.idx`` is little-endian:

    bytes   what
    9       b"MMIDIDX" and two zero bytes
    8       version, 1
    1       code of the token type (`DTYPES`)
    8       number of sequences, n
    8       number of document boundaries, documents + 1
    4 n     length of each sequence in tokens, int32
    8 n     byte offset of each sequence in ``.bin``, int64
    8 m     number of the first sequence of each document, int64, then n
    n       only in multimodal sets: a mode per sequence, int8 (skipped here)

A document is one sequence, or several when it was split into sentences. Readers take the token
type from the header alone. Nothing here needs torch.
"""

import mmap
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron.core.utils import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""Code in the header -> type of a token."""

MAX_SEQUENCE = 2**31 - 1
"""Longest sequence, in tokens: its length is stored in 32 bits."""

Tokens = npt.NDArray[Any]


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type for ids below ``vocab_size``: uint16 exactly when they all fit."""
    return DTYPES[8] if vocab_size <= 2**16 else DTYPES[4]


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the file of the tokens."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the file of the index."""
    return Path(f"{os.fspath(prefix)}.idx")


@dataclass(frozen=True)
class Index:
    """What an ``.idx`` file says; the arrays are views of the mapped file."""

    path: Path
    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]
    sequence_pointers: npt.NDArray[np.int64]
    document_indices: npt.NDArray[np.int64]
    has_modes: bool

    @property
    def bin_bytes(self) -> int:
        """Size that the token file must have."""
        if not len(self.sequence_lengths):
            return 0
        return (
            int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        )

    def check_last_boundary(self) -> None:
        """Raise `UserError` unless the last document ends with the last sequence."""
        if not len(self.document_indices):
            raise UserError(f"{self.path}: it has no document boundaries; {_REPAIR}")
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if first != 0:
            raise UserError(f"{self.path}: the first document starts at sequence {first}, not 0")
        if last != len(self.sequence_lengths):
            raise UserError(
                f"{self.path}: the last document boundary is {last}, but the file has "
                f"{len(self.sequence_lengths)} sequences; {_REPAIR}"
            )

    def check_bin(self) -> None:
        """Raise `UserError` unless the token file is there and has the size that follows."""
        path = self.path.with_suffix(".bin")
        if not path.is_file():
            raise UserError(f"{path} does not exist, but its index {self.path} does")
        size = path.stat().st_size
        if size != self.bin_bytes:
            raise UserError(
                f"{path} has {size} bytes, but {self.path} describes {self.bin_bytes}: the file is "
                "cut off, or the two files do not belong together"
            )


_REPAIR = "`tools/inspect_dataset.py PREFIX --repair` mends it"


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Return the index of ``prefix`` without reading more than its header.

    Raises:
        UserError: the file is missing, empty, foreign, cut off or of another version.
    """
    path = idx_path(prefix)
    if not path.is_file():
        there = bin_path(prefix).is_file()
        raise UserError(
            f"{path} does not exist" + (f", but {bin_path(prefix)} does" if there else "") + "; "
            "give the prefix of a .bin/.idx pair, without the ending"
        )
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        what = "is empty" if not size else "is not a token index (it does not start with MMIDIDX)"
        raise UserError(f"{path} {what}")
    if len(head) < HEADER.size:
        raise UserError(f"{path} is cut off: {size} bytes, the header alone has {HEADER.size}")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{path} has version {version} of the format; version {VERSION} is read")
    if code not in DTYPES:
        raise UserError(f"{path} has the unknown token type code {code}")
    expected = HEADER.size + sequences * 12 + boundaries * 8
    if size not in (expected, expected + sequences):
        raise UserError(
            f"{path} has {size} bytes, but its header ({sequences} sequences, {boundaries} "
            f"document boundaries) asks for {expected}: it is cut off or damaged"
        )
    buffer = np.memmap(path, mode="r", dtype=np.uint8)
    pointers = HEADER.size + sequences * 4
    documents = pointers + sequences * 8
    return Index(
        path=path,
        dtype=DTYPES[code],
        sequence_lengths=np.frombuffer(buffer, "<i4", sequences, HEADER.size),
        sequence_pointers=np.frombuffer(buffer, "<i8", sequences, pointers),
        document_indices=np.frombuffer(buffer, "<i8", boundaries, documents),
        has_modes=sequences > 0 and size == expected + sequences,
    )


class IndexedDataset:
    """Random access to the sequences of a ``.bin``/``.idx`` pair.

    Opening checks what costs nothing: headers, sizes, the last boundary. With ``mmap`` sequences
    are views of the mapped file; without, they are read into memory of their own, which suits
    file systems where mapping is slow. It can be pickled (a worker process opens the files anew).
    """

    def __init__(self, prefix: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.uses_mmap = mmap
        self.index = read_index(self.prefix)
        self.index.check_last_boundary()
        self.index.check_bin()
        self.dtype = self.index.dtype
        self.sequence_lengths = self.index.sequence_lengths
        self.sequence_pointers = self.index.sequence_pointers
        self.document_indices = self.index.document_indices
        if not len(self.sequence_lengths):
            raise UserError(f"{self.index.path} describes an empty data set (0 sequences)")
        self._file = open(bin_path(self.prefix), "rb")  # noqa: SIM115
        self._buffer = _map(self._file) if mmap else None

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, i: int) -> Tokens:
        """Return sequence ``i``; negative numbers count from the end."""
        return self.get(i if i >= 0 else i + len(self))

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return ``length`` tokens of sequence ``i`` from ``offset`` on; by default the rest."""
        if not 0 <= i < len(self.sequence_lengths):
            raise IndexError(f"sequence {i} of {len(self)} in {self.prefix}")
        here = int(self.sequence_lengths[i])
        if length is None:
            length = here - offset
        assert 0 <= offset and 0 <= length and offset + length <= here, (
            f"tokens {offset}..{offset + length} of sequence {i}, which has {here}"
        )
        start = int(self.sequence_pointers[i]) + offset * self.dtype.itemsize
        if self._buffer is not None:
            return np.frombuffer(self._buffer, self.dtype, length, start)
        data = os.pread(self._file.fileno(), length * self.dtype.itemsize, start)
        return np.frombuffer(data, self.dtype, length)

    @property
    def num_documents(self) -> int:
        """Documents, each of one or more sequences."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole set."""
        return self.index.bin_bytes // self.dtype.itemsize

    def __getstate__(self) -> tuple[str, bool]:
        return self.prefix, self.uses_mmap

    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.__init__(state[0], mmap=state[1])  # type: ignore[misc]

    def __del__(self) -> None:
        # The map stays valid for arrays that were handed out; only the descriptor goes.
        if hasattr(self, "_file"):
            self._file.close()


def _map(file: BinaryIO) -> mmap.mmap | bytes:
    """Return the mapped file; a file without bytes (only empty sequences) cannot be mapped."""
    if not os.fstat(file.fileno()).st_size:
        return b""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def write_index(
    path: str | os.PathLike[str],
    dtype: np.dtype[Any],
    sequence_lengths: npt.ArrayLike,
    document_indices: npt.ArrayLike,
) -> None:
    """Write an ``.idx`` file (not atomically; see `IndexedDatasetBuilder`).

    Offsets are summed in 64 bits and written a block at a time, so that memory stays at the size
    of the two arrays.
    """
    lengths = np.asarray(sequence_lengths)
    documents = np.asarray(document_indices)
    assert not len(lengths) or 0 <= lengths.min() and lengths.max() <= MAX_SEQUENCE
    block = 1 << 20
    with open(path, "wb") as file:
        code = dtype_code(dtype)
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
        for start in range(0, len(lengths), block):
            file.write(lengths[start : start + block].astype("<i4").tobytes())
        pointer = 0
        for start in range(0, len(lengths), block):
            sizes = lengths[start : start + block].astype(np.int64) * dtype.itemsize
            ends = pointer + np.cumsum(sizes)
            file.write((ends - sizes).astype("<i8").tobytes())
            pointer = int(ends[-1])
        for start in range(0, len(documents), block):
            file.write(documents[start : start + block].astype("<i8").tobytes())


def dtype_code(dtype: npt.DTypeLike) -> int:
    """Return the header's code of a token type."""
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    raise AssertionError(f"tokens of type {dtype} cannot be stored")


class IndexedDatasetBuilder:
    """Writes a ``.bin``/``.idx`` pair that appears under its names only when it is complete.

    Tokens go to a temporary file beside ``PREFIX.bin`` as documents are added. `finalize` flushes
    both files to disk and renames them, the index last. As a context manager, leaving by an
    exception (or without `finalize`) removes what was written.

    Args:
        prefix: path of the pair without its ending.
        dtype: type of the stored tokens, see `best_dtype`.
        vocab_size: when given, an id from it on is refused even where the type could hold it.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, vocab_size: int | None = None
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        dtype_code(self.dtype)
        self.vocab_size = vocab_size
        self._lengths = array("i")
        self._documents = array("q", [0])
        folder = bin_path(prefix).parent
        folder.mkdir(parents=True, exist_ok=True)
        # A folder of its own: two builders of one prefix never share a file, and files in it get
        # the permissions that the user's umask gives.
        mark = f".{bin_path(prefix).stem}."
        self._folder = Path(tempfile.mkdtemp(prefix=mark, suffix=".partial", dir=folder))
        self._temporary = {suffix: self._folder / f"data{suffix}" for suffix in (".bin", ".idx")}
        self._file: BinaryIO | None = open(self._temporary[".bin"], "wb")  # noqa: SIM115
        self._sealed = False

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._documents) - 1

    @property
    def num_sequences(self) -> int:
        """Sequences so far."""
        return len(self._lengths)

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a document, which may be made of several sequences.

        Args:
            tokens: ids of the whole document.
            lengths: length of each sequence; by default the document is one sequence.
        """
        flat = np.asarray(tokens)
        parts = [len(flat)] if lengths is None else lengths
        self.add_documents(flat, parts, [len(parts)])

    def add_documents(
        self, tokens: npt.ArrayLike, lengths: npt.ArrayLike, sequences: npt.ArrayLike
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: ids of all of them, one after the other.
            lengths: length of every sequence.
            sequences: number of sequences of every document.

        Raises:
            UserError: an id does not fit the type or the vocabulary; nothing is appended.
        """
        assert self._file is not None, "the pair is already complete"
        flat = np.asarray(tokens)
        sizes = np.asarray(lengths, dtype=np.int64)
        counts = np.asarray(sequences, dtype=np.int64)
        assert sizes.sum() == len(flat), f"lengths sum to {sizes.sum()}, not {len(flat)} tokens"
        assert counts.sum() == len(sizes), (
            f"documents hold {counts.sum()} of {len(sizes)} sequences"
        )
        self._check(flat, sizes, counts)
        self._file.write(np.ascontiguousarray(flat, dtype=self.dtype).data)
        self._documents.frombytes((len(self._lengths) + np.cumsum(counts)).tobytes())
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())

    def add_index(
        self, prefix: str | os.PathLike[str], on_block: Callable[[], None] = lambda: None
    ) -> None:
        """Append every document of a finished pair, copying its tokens in bounded memory.

        Args:
            prefix: the finished pair.
            on_block: called after every few megabytes; may raise to end the copy.

        Raises:
            UserError: its token type is another one, or its files do not fit together.
        """
        assert self._file is not None, "the pair is already complete"
        index = read_index(prefix)
        index.check_last_boundary()
        index.check_bin()
        if index.dtype != self.dtype:
            raise UserError(
                f"{bin_path(prefix)} holds {index.dtype.name} tokens, but {self.prefix}.bin "
                f"{self.dtype.name}; only sets with the same token type can be joined"
            )
        self._documents.frombytes((index.document_indices[1:] + len(self._lengths)).tobytes())
        self._lengths.frombytes(index.sequence_lengths.tobytes())
        with open(bin_path(prefix), "rb") as source:
            while block := source.read(1 << 24):
                self._file.write(block)
                on_block()

    def finalize(self) -> None:
        """Complete both files and give them their names."""
        self.seal()
        self.publish()

    def seal(self) -> None:
        """Complete both files under temporary names, so that only renaming is left to `publish`."""
        assert self._file is not None, "the pair is already complete"
        self._file.close()
        self._file = None
        lengths = np.frombuffer(self._lengths, np.int32)
        documents = np.frombuffer(self._documents, np.int64)
        write_index(self._temporary[".idx"], self.dtype, lengths, documents)
        for path in self._temporary.values():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        self._sealed = True

    def publish(self) -> None:
        """Give the complete files their names, the index last: who sees it finds the tokens."""
        assert self._sealed, "seal() first"
        os.replace(self._temporary[".bin"], bin_path(self.prefix))
        os.replace(self._temporary[".idx"], idx_path(self.prefix))
        self._folder.rmdir()

    def discard(self) -> None:
        """Remove what was not published; harmless after `publish`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def _check(
        self, flat: Tokens, sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> None:
        if len(sizes) and sizes.max() > MAX_SEQUENCE:
            sequence = int(sizes.argmax())
            raise UserError(
                f"{self._name(sequence, counts)} has a sequence of {sizes[sequence]} tokens; at "
                f"most {MAX_SEQUENCE} fit the format"
            )
        if not len(flat) or self.dtype.kind == "f":
            return
        info = np.iinfo(self.dtype)
        low, high = int(info.min), int(info.max)
        if self.vocab_size is not None:
            low, high = 0, min(high, self.vocab_size - 1)
        if flat.max() <= high and flat.min() >= low:
            return
        place = int(np.argmax((flat > high) | (flat < low)))
        sequence = int(np.searchsorted(np.cumsum(sizes), place, side="right"))
        vocabulary = "" if self.vocab_size is None else f" and a vocabulary of {self.vocab_size}"
        raise UserError(
            f"{self._name(sequence, counts)} has token id {flat[place]}, outside what "
            f"{self.dtype.name}{vocabulary} can hold"
        )

    def _name(self, sequence: int, counts: npt.NDArray[np.int64]) -> str:
        document = int(np.searchsorted(np.cumsum(counts), sequence, side="right"))
        return f"{self.prefix}: document {self.num_documents + document}"
