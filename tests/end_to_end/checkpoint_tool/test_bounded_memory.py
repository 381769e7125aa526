"""tools/checkpoint.py on checkpoints that are larger than the memory it may take."""

import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT

MEASURE = """
import resource, sys
from pathlib import Path
from tools import checkpoint
from megatron.core.dist_checkpointing import stream
import torch

big, out = sys.argv[1], sys.argv[2]
shapes = {
    "model.large": stream.Shape("float32", (96, 2**19)),
    "model.wide": stream.Shape("float32", (2, 2**23)),
}

def read(key, box):
    shape = [stop - start for start, stop in box]
    return torch.full(shape, float(box[0][0]))

stream.write(Path(big) / "iter_0000001", shapes, read, {"iteration": 1})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
small = {"model.small": stream.Shape("float32", (8, 8))}
stream.write(Path(out) / "small" / "iter_0000001", small, read, {"iteration": 1})
for words in (["verify", f"{out}/small"], ["diff", f"{out}/small", f"{out}/small"]):
    assert checkpoint.main(words) == 0
before = peak()
assert checkpoint.main(["verify", big]) == 0
assert checkpoint.main(["inspect", big, "--tensor", *shapes]) == 0
words = ["reshard", "--load", big, "--save", f"{out}/copy", "--files", "2", "--params-dtype"]
assert checkpoint.main([*words, "bf16"]) == 0
assert checkpoint.main(["diff", big, f"{out}/copy", "--tolerance", "0.1"]) == 0
print("grew", peak() - before)
"""


def test_memory_stays_far_below_the_checkpoints_size(tmp_path: Path) -> None:
    """256 MiB are verified, summed up, converted and compared."""
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "big"), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grew = int(done.stdout.split("grew")[1])
    assert grew < 120, f"{grew} MiB"
