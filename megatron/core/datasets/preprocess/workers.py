"""Encoding blocks in several processes, in order and in bounded memory.

Processes, not threads: parsing and the conversion of ids hold Python's lock, and a library's own
threads share an allocator. Blocks go out as bytes and come back as arrays. At most a few blocks per
worker are under way, so a slow disk or a huge record never fills memory, and results are taken in
the order of the input, so their number does not show in the output.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron.core.datasets.preprocess.encode import Encoded, Encoder
from megatron.core.datasets.preprocess.reading import Block
from megatron.core.utils import UserError

MAX_BYTES_UNDER_WAY = 256 * 2**20

# A worker process's encoder: tasks carry only their block.
_encoder: Encoder | None = None


def encode_blocks(
    encoder: Encoder, blocks: Iterable[Block], workers: int
) -> Iterator[tuple[Block, Encoded]]:
    """Yield every block, without its data, and what it became, in order.

    With one worker everything happens in this process. Closing the iterator stops the workers.

    Raises:
        UserError: a worker process was killed.
    """
    if workers == 1:
        for block in blocks:
            yield _without_data(block), encoder(block)
        return
    executor = _start(encoder, workers)
    pending: deque[tuple[Block, int, Future[Encoded]]] = deque()
    under_way = 0
    try:
        for block in blocks:
            size = block.size
            while pending and (
                len(pending) >= 2 * workers + 2 or under_way + size > MAX_BYTES_UNDER_WAY
            ):
                done, freed, future = pending.popleft()
                under_way -= freed
                yield done, future.result()
            pending.append((_without_data(block), size, executor.submit(_encode, block)))
            under_way += size
        while pending:
            done, _, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most likely for memory; take fewer --workers or a lower "
            "--max-record-bytes"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _without_data(block: Block) -> Block:
    return Block(block.path, block.kind, first_line=block.first_line)


def _start(encoder: Encoder, workers: int) -> ProcessPoolExecutor:
    # Forking shares the loaded tokenizer; it happens here, before anything starts a thread.
    method = "fork" if sys.platform == "linux" else "spawn"
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context(method), _initialise, (encoder, os.getpid())
    )
    executor.submit(os.getpid).result()
    return executor


def _initialise(encoder: Encoder, parent: int) -> None:
    global _encoder
    _encoder = encoder
    # Ctrl-C reaches the whole group; the parent decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # Die with the parent even when it is killed: a worker would wait for work for ever.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _encode(block: Block) -> Encoded:
    assert _encoder is not None
    return _encoder(block)
