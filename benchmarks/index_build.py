"""Time and memory of building index arrays for many documents, on generated lengths.

    python benchmarks/index_build.py --documents 100_000_000

Nothing is read or written: what is measured is what stands between ``.idx`` and the first sample.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets import samples
from megatron.core.datasets.blend_index import blend_by_weight
from megatron.core.datasets.samples import document_index, plan_samples, shuffle_index


def count(text: str) -> int:
    """Return a number that may be written with underscores or as 1e8."""
    return int(float(text.replace("_", "")))


def peak() -> float:
    """Return the most memory this process has held, in GB (10^9 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Build the arrays and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=count, default=10_000_000)
    parser.add_argument("--mean-length", type=count, default=500, help="tokens per document")
    parser.add_argument("--seq-length", type=count, default=4096)
    parser.add_argument("--blend-samples", type=count, default=0, help="also build a blend of ten")
    parser.add_argument("--numpy", action="store_true", help="without the compiled helper")
    options = parser.parse_args()
    helpers = None if options.numpy else samples.HELPERS
    lengths = np.random.default_rng(0).geometric(1 / options.mean_length, options.documents)
    lengths = lengths.astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    print(
        f"{options.documents:,} documents, {tokens:,} tokens, --seq-length {options.seq_length}, "
        f"{'numpy' if helpers is None else 'compiled helper'}; {peak():.2f} GB before"
    )
    plan = plan_samples(tokens, options.seq_length, None)
    random = np.random.RandomState(1234)
    started = time.perf_counter()
    document = document_index((0, options.documents), plan, random)
    shuffled = time.perf_counter()
    print(f"document index  {shuffled - started:7.1f} s (numpy's shuffle)")
    samples.sample_index(lengths, document, plan, helpers)
    cut = time.perf_counter()
    print(f"sample index    {cut - shuffled:7.1f} s ({plan.num_samples:,} samples)")
    shuffle_index(plan, random)
    done = time.perf_counter()
    print(f"shuffle index   {done - cut:7.1f} s")
    print(f"all three       {done - started:7.1f} s, peak memory {peak():.2f} GB")
    if options.blend_samples:
        weights = (np.arange(1, 11) / 55).tolist()
        started = time.perf_counter()
        blend_by_weight(weights, options.blend_samples, helpers)
        took = time.perf_counter() - started
        print(f"blend of ten    {took:7.1f} s ({options.blend_samples:,} samples), "
              f"peak memory {peak():.2f} GB")  # fmt: skip


if __name__ == "__main__":
    main()
