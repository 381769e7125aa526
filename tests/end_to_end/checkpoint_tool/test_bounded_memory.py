"""tools/checkpoint.py on checkpoints that are larger than the memory it may take."""

import subprocess
import sys
from pathlib import Path

import pytest

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


CONVERT = """
import resource, sys
from pathlib import Path
import torch
from megatron.bridge.hugging_face import our_tensors
from megatron.core.dist_checkpointing import stream
from megatron.core.dist_checkpointing.megatron_formats import export
from megatron.training.checkpoints.remade import part_of
from megatron.core.transformer.config import TransformerConfig
from tools import checkpoint

root, target = Path(sys.argv[1]), sys.argv[2]
export.LARGEST = 8 * 2**20
kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")[: 3 if target == "torch_dist" else 1]

def read(key, box):
    return torch.full([stop - start for start, stop in box], float(box[0][0]))

def make(name, layers, hidden, inner, rows):
    config = {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": 8,
        "ffn_hidden_size": inner, "swiglu": True, "add_bias_linear": False,
        "normalization": "RMSNorm", "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True, "max_position_embeddings": 64,
    }
    facts = {
        "config": config, "iteration": 1, "vocabulary": rows, "vocabulary_rows": rows,
        "parts": {"optimizer": len(kinds) > 1}, "optimizer": {"step": 1},
    }
    names = our_tensors(part_of(TransformerConfig, facts), rows)
    shapes = {f"{k}.{n}": stream.Shape("float32", s) for k in kinds for n, s in names.items()}
    stream.write(root / name / "iter_0000001", shapes, read, facts)
    return sum(shape.bytes for shape in shapes.values()) // 2**20

def there_and_back(name):
    made, again = str(root / f"{name}-made"), str(root / f"{name}-again")
    source = str(root / name)
    assert checkpoint.main(["convert", "--load", source, "--save", made, "--to", target]) == 0
    assert checkpoint.main(["convert", "--load", made, "--save", again]) == 0
    for kind in kinds:
        assert checkpoint.main(["diff", source, again, "--only", f"{kind}."]) == 0

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
make("small", 1, 64, 64, 64)
there_and_back("small")
size = make("big", 1, 512, 12288 if len(kinds) > 1 else 24576, 4096)
before = peak()
there_and_back("big")
print("sizes", size, peak() - before)
"""


@pytest.mark.parametrize("target", ["torch_dist", "hf"])
def test_conversion_to_other_formats_and_back_is_bounded(tmp_path: Path, target: str) -> None:
    """Pieces are there at a time: less than the largest tensor, which is 48 and 96 MiB."""
    words = [sys.executable, "-c", CONVERT, str(tmp_path), target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    size, grew = map(int, done.stdout.split("sizes")[1].split())
    assert size > 150
    assert grew < 48, f"{grew} MiB"
