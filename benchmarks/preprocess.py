"""The data tool beside the bare tokenizer library, on the same text with the same threads.

    python benchmarks/preprocess.py TEXT [--mb 30] [--workers 2] [--rounds 3] [--tokenizer FILE]

TEXT is a plain-text file, repeated to --mb megabytes; a document is about --document-bytes of it.
The bare library encodes all documents, already in memory, with one `encode_batch_fast` call and
throws the ids away. The tool is the whole program: start, JSON, encoding, checks, files on disk.
Rounds alternate, and the best of each is compared. Without --tokenizer a byte-level BPE is trained
on the text.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BARE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
wall, cpu = time.perf_counter(), time.process_time()
encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
tokens = sum(len(encoding.ids) for encoding in encodings)
print(tokens, time.perf_counter() - wall, time.process_time() - cpu)
"""


def documents(path: Path, size: int, document_bytes: int) -> list[str]:
    """Return ``size`` bytes of the text, cut at paragraphs into documents."""
    paragraphs = [p for p in path.read_text(encoding="utf-8").split("\n\n") if p.strip()]
    found: list[str] = []
    held: list[str] = []
    total = held_bytes = 0
    while total < size:
        for paragraph in paragraphs:
            held.append(paragraph)
            held_bytes += len(paragraph.encode()) + 2
            if held_bytes >= document_bytes:
                found.append("\n\n".join(held))
                total += held_bytes
                held, held_bytes = [], 0
            if total >= size:
                break
    return found


def train_tokenizer(texts: list[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on some of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:1000], trainer)
    tokenizer.save(str(path))


def run_bare(tokenizer: Path, corpus: Path, threads: int) -> tuple[int, float, float]:
    """Return tokens, wall seconds and CPU seconds of the bare library."""
    environment = os.environ | {
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }
    command = [sys.executable, "-c", BARE, str(tokenizer), str(corpus)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    tokens, wall, cpu = output.stdout.split()
    return int(tokens), float(wall), float(cpu)


def run_tool(tokenizer: Path, corpus: Path, workers: int, folder: Path) -> tuple[int, float, float]:
    """Return tokens, wall seconds and CPU seconds of the tool, start-up included."""
    prefix = folder / "out"
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus)]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    command += ["--output-prefix", str(prefix), "--workers", str(workers)]
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    report = json.loads((folder / "out_report.json").read_text(encoding="utf-8"))
    return report["keys"]["text"]["tokens"], wall, cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--mb", type=float, default=30)
    parser.add_argument("--document-bytes", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()
    texts = documents(given.text, int(given.mb * 1e6), given.document_bytes)
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        with open(corpus, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        tokenizer = given.tokenizer or folder / "tokenizer.json"
        if given.tokenizer is None:
            train_tokenizer(texts, given.vocab_size, tokenizer)
        bare, tool = [], []
        for _ in range(given.rounds):
            bare.append(run_bare(tokenizer, corpus, given.workers))
            tool.append(run_tool(tokenizer, corpus, given.workers, folder))
    print(f"{len(texts)} documents, {size / 1e6:.1f} MB, {bare[0][0]} tokens")
    assert {run[0] for run in bare + tool} == {bare[0][0]}, "the two give different tokens"
    best = {}
    for label, runs in (("bare library", bare), ("data tool", tool)):
        wall, cpu = min(run[1] for run in runs), min(run[2] for run in runs)
        best[label] = wall
        print(
            f"{label:12} with {given.workers} threads: {size / wall / 1e6:6.2f} MB/s wall, "
            f"{size / cpu / 1e6:6.2f} MB/s per CPU second"
        )
    print(f"tool / library: {best['bare library'] / best['data tool']:.2f}")


if __name__ == "__main__":
    main()
