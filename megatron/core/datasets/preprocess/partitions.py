"""Shares of one job: encoded one after the other, or on many machines, then joined.

A share is a contiguous part of the input (see `sources.share`), so that the shares, joined in
order, give the same bytes as one run. Each leaves its files in ``PREFIX_partitions/``; its report,
written last, marks it complete. A complete share of the same job is not encoded again, so an
interrupted run goes on where it was.

On many machines, with a Slurm array of four tasks over a shared disk:

    preprocess_data.py FLAGS --partitions 4 --partition-index $SLURM_ARRAY_TASK_ID
    preprocess_data.py FLAGS --partitions 4 --merge-partitions      # once, when all have ended
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import IndexedDatasetBuilder, best_dtype
from megatron.core.datasets.preprocess import report
from megatron.core.datasets.preprocess.report import Counts
from megatron.core.datasets.preprocess.run import Job, check_kept, encode_spans, write_report
from megatron.core.datasets.preprocess.sources import share
from megatron.core.datasets.sidecar import read_json, sidecar_path, write_json
from megatron.core.utils import Say, UserError, human_count


def folder_of(job: Job) -> Path:
    """Return the folder of the shares."""
    return Path(f"{job.config.output_prefix}_partitions")


def share_prefix(job: Job, index: int) -> str:
    """Return the prefix of one share's files."""
    return str(folder_of(job) / f"{index:05}-of-{job.config.partitions:05}")


def run_share(job: Job, index: int, say: Say) -> None:
    """Encode one share, unless it is complete already."""
    if _is_complete(job, index):
        say(f"partition {index}: complete already, kept")
        return
    spans = share(job.sources, index, job.config.partitions, job.config.txt_documents)
    counts = encode_spans(job, spans, share_prefix(job, index), may_be_empty=True)
    say(f"partition {index} of {job.config.partitions}: {counts.summary()}")


def _is_complete(job: Job, index: int) -> bool:
    path = Path(f"{share_prefix(job, index)}_report.json")
    return path.is_file() and _identity(read_json(path)) == _job_identity(job)


def _identity(content: dict[str, Any]) -> dict[str, Any]:
    """Return what shares of one set have in common; older ones say less of the tokenizer."""
    tokenizer = dict(content.get("tokenizer") or {})
    tokenizer.pop("without_sentinels", None)
    return {"options": content.get("options"), "tokenizer": tokenizer}


def _job_identity(job: Job) -> dict[str, Any]:
    tokenizer = report.describe_tokenizer(job.tokenizer)
    return _identity({"options": job.options(), "tokenizer": tokenizer})


def merge_shares(job: Job) -> Counts:
    """Join all shares under the final names and remove them.

    Raises:
        UserError: a share is missing or was made with other flags, or no share kept a record.
    """
    started = time.monotonic()
    counts = Counts()
    missing = [i for i in range(job.config.partitions) if not _is_complete(job, i)]
    if missing:
        raise UserError(
            f"--merge-partitions: of {job.config.partitions} shares in {folder_of(job)}, "
            f"{', '.join(map(str, missing[:20]))} are missing or were made with other flags, input "
            "or tokenizer; run --partition-index for each of them"
        )
    indices = range(job.config.partitions)
    for i in indices:
        counts.add_json(read_json(Path(f"{share_prefix(job, i)}_report.json")))
    check_kept(counts, job.config.json_keys)
    dtype = best_dtype(job.tokenizer.vocab_size)
    builders = []
    try:
        for key, path in job.prefixes(job.config.output_prefix).items():
            builder = IndexedDatasetBuilder(path, dtype, job.tokenizer.vocab_size)
            builders.append((key, path, builder))
            for i in indices:
                builder.add_index(job.prefixes(share_prefix(job, i))[key], job.check)
            builder.seal()
        for key, path, builder in builders:
            sizes = {"key": key, **counts.to_json()["keys"][key]}
            write_json(sidecar_path(path), job.sidecar() | sizes)
            builder.publish()
    finally:
        for _, _, builder in builders:
            builder.discard()
    write_report(job, counts, job.config.output_prefix, time.monotonic() - started)
    shutil.rmtree(folder_of(job))
    return counts


def run_on_ray(job: Job, encode_share: Callable[[int], None]) -> None:
    """Run every share as a task of a Ray cluster, each with ``--workers`` CPUs.

    Args:
        job: the checked job.
        encode_share: encodes the share of a number; it is sent to the cluster's machines, which
            must see the same files under the same names.
    """
    ray = import_ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=True)  # RAY_ADDRESS names the cluster
    task = ray.remote(num_cpus=job.workers, max_retries=2)(encode_share)
    ray.get([task.remote(index) for index in range(job.config.partitions)])


def import_ray() -> Any:
    """Return Ray, or say how to get it."""
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            "--launcher ray needs the package ray (pip install ray); without it, run "
            "--partition-index on each machine and then --merge-partitions"
        ) from None
    return ray


def describe(counts: Counts) -> list[str]:
    """Return what a finished run made, one line per key."""
    return [
        f"{key}: {counts.documents[key]} documents, {counts.sequences[key]} sequences, "
        f"{human_count(counts.tokens[key])} tokens"
        for key in counts.documents
    ]
