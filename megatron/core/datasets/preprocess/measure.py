"""The speed of some numbers of workers on a job's first records (--find-optimal-num-workers)."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.datasets.preprocess.reading import Block, read_blocks
from megatron.core.datasets.preprocess.run import Job
from megatron.core.datasets.preprocess.sources import whole
from megatron.core.datasets.preprocess.workers import encode_blocks


@dataclass(frozen=True)
class Measured:
    """Speed with one number of workers."""

    workers: int
    records: int
    seconds: float

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds


def measure(job: Job) -> Iterator[Measured]:
    """Yield the speed with each of --workers-to-check; nothing is written."""
    for workers in job.config.workers_to_check:
        started = time.perf_counter()
        records = 0
        stream = encode_blocks(job.encoder, _blocks(job), workers)
        for _, encoded in stream:
            records += encoded.read
            if records >= job.config.max_documents:
                break
        stream.close()  # type: ignore[attr-defined]
        yield Measured(workers, records, time.perf_counter() - started)


def _blocks(job: Job) -> Iterator[Block]:
    config = job.config
    for span in whole(job.sources):
        yield from read_blocks(
            span,
            txt_documents=config.txt_documents,
            keys=config.json_keys,
            limit=config.max_record_bytes,
        )
