"""Our training step with experts beside Hugging Face's Mixtral, and beside a dense model of ours.

    python benchmarks/moe.py [--size S M] [--threads 2] [--rounds 7] [--cpu-time]

Three processes take turns: `mixtral` (MixtralForCausalLM of the transformers library, experts as it
computes them by default), `dense` (our Llama whose MLP is as wide as all experts that a token
visits) and `megatron` (our Llama with 8 experts of which a token visits 2, --moe-permute-fusion).
All do forward, backward, gradient norm and clipping at 1 (the default of that library's Trainer
too) and fused AdamW, in fp32, with the shapes and tokens of `sizes`. Ratios are medians over
rounds. ``--cpu-time`` takes seconds of the processor, of all threads, instead of the clock's: what
other programs do then counts less. Our programs ask for large pages of memory and keep what is
freed, and so do our two processes here; THP_MEM_ALLOC_ENABLE=1 in the environment asks for large
pages of Mixtral's too, 0 for nobody's.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sizes import BETAS, DECAY, EPSILON, LR, SIZES, Size
from train_step import Step, Worker, megatron, work

from megatron.training.processes.host_memory import ask_for_huge_pages, keep_freed_memory

EXPERTS, VISITED = 8, 2
NAMES = ("mixtral", "dense", "megatron")
CLIP = 1.0
AIMS = (1.3, 1.25)
"""Tokens per second over Mixtral's, at least; seconds over dense, at most."""


def mixtral(size: Size) -> Step:
    """Return a step of the transformers library's model, as its Trainer does it."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.gated_width // VISITED,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.sequence,
        num_local_experts=EXPERTS,
        num_experts_per_tok=VISITED,
        sliding_window=None,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
    )

    def step(tokens: Tensor, labels: Tensor) -> float:
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def contestant(name: str, size: Size) -> Step:
    """Return the step of one of `NAMES`."""
    if name == "mixtral":
        return mixtral(size)
    if name == "dense":
        return megatron(size, "llama")
    return megatron(
        size,
        "llama",
        num_experts=EXPERTS,
        moe_router_topk=VISITED,
        moe_ffn_hidden_size=size.gated_width // VISITED,
        moe_permute_fusion=True,
    )


def compare(size_name: str, threads: int, rounds: int, cpu_time: bool) -> dict[str, float]:
    """Run the rounds of one size and print its row."""
    size = SIZES[size_name]
    words = ("--cpu-time",) * cpu_time
    workers = {name: Worker(name, size_name, threads, *words, script=__file__) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds):
        for name in NAMES if number % 2 == 0 else NAMES[::-1]:
            times[name].append(workers[name].run(2))
    for worker in workers.values():
        worker.close()
    row = {f"{name}_ms": statistics.median(times[name]) * 1e3 for name in NAMES}
    row["tokens_per_second"] = size.batch * size.sequence / statistics.median(times["megatron"])
    rounds_of = list(zip(*(times[name] for name in NAMES), strict=True))
    row["over_mixtral"] = statistics.median(theirs / ours for theirs, _, ours in rounds_of)
    row["of_dense"] = statistics.median(ours / dense for _, dense, ours in rounds_of)
    print(
        f"{size_name:>4} {threads:>7} {row['mixtral_ms']:>11.1f} {row['dense_ms']:>9.1f} "
        f"{row['megatron_ms']:>12.1f} {row['tokens_per_second']:>9.0f} "
        f"{row['over_mixtral']:>13.2f} {row['of_dense']:>9.2f}",
        flush=True,
    )
    return row


def main() -> int:
    """Run what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", nargs="+", default=["S", "M"], choices=list(SIZES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, size = options.serve, SIZES[options.size[0]]
        if name != "mixtral":
            ask_for_huge_pages(os.environ)  # as our programs do
            keep_freed_memory(os.environ)
        clock = time.process_time if options.cpu_time else time.perf_counter
        work(lambda: contestant(name, size), size, options.threads, clock)
        return 0
    print("size threads  mixtral ms  dense ms  megatron ms  tokens/s  over mixtral  of dense")
    rows = {
        size: compare(size, options.threads, options.rounds, options.cpu_time)
        for size in options.size
    }
    print(f"aims: at least {AIMS[0]} over Mixtral, at most {AIMS[1]} of dense")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
