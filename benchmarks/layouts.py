"""What a layout costs: two processes with one thread each beside one process with two threads.

    python benchmarks/layouts.py [--size M] [--layouts tp2 tp2-sp pp2 cp2 dp2] [--rounds 5]

Every contestant runs the training step of `pretrain_gpt.py` on the same global batch, and they take
turns, so that load of other programs hits all alike. For each layout:

    of serial    tokens per second over the serial run's, median over rounds
    of ideal     the same over what the layout could reach: 1, or for a pipeline of p ranks and m
                 microbatches m / (m + p - 1), since it waits for its bubble
    waiting      share of a step that its ranks spend waiting for what others send, on average
    bytes        what all ranks give to collectives in an iteration; checked against the closed form
                 of `megatron.training.plan.traffic`, call by call and byte by byte
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sizes import SIZES, Size

TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "serial": (1, []),
    "tp2": (2, [TP, "2"]),
    "tp2-sp": (2, [TP, "2", "--sequence-parallel"]),
    "pp2": (2, [PP, "2", "--micro-batch-size", "1"]),
    "cp2": (2, [CP, "2"]),
    "dp2": (2, []),
}


def flags(size: Size, layout: str) -> list[str]:
    """Return the command line of a contestant."""
    processes, more = LAYOUTS[layout]
    replicas = processes if not more else 1
    text = (
        f"--num-layers {size.layers} --hidden-size {size.hidden} "
        f"--num-attention-heads {size.heads} --seq-length {size.sequence} "
        f"--max-position-embeddings {size.sequence} --vocab-size {size.vocab} "
        f"--make-vocab-size-divisible-by 1 --micro-batch-size {size.batch // replicas} "
        f"--global-batch-size {size.batch} --attention-dropout 0 --hidden-dropout 0 --lr 3e-4 "
        "--mock-data --train-iters 1 --device cpu"
    )
    return [*text.split(), *more]


class Waiting:
    """Seconds that this process waits for what others send."""

    def __init__(self) -> None:
        from megatron.core import comm

        self.seconds = 0.0
        for kind in (comm.Handle, comm.Arrival):
            kind.wait = self._timed(kind.wait)  # type: ignore[method-assign]

    def _timed(self, wait: Any) -> Any:
        def timed(handle: Any) -> Any:
            start = time.perf_counter()
            result = wait(handle)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def serve(size: Size, layout: str) -> None:
    """Be one rank of a contestant: a count on stdin, rank 0 answers with what a step takes."""
    import torch
    import torch.distributed as dist

    import pretrain_gpt
    from megatron.core import comm
    from megatron.core.mesh import Mesh
    from megatron.core.tokenizers.vocabulary import Vocabulary
    from megatron.training.arguments import parse
    from megatron.training.build import build_chunks, build_passes, build_run_optimizer
    from megatron.training.health import Health
    from megatron.training.plan import traffic
    from megatron.training.planner import Planner
    from megatron.training.processes import setup
    from megatron.training.state import TrainState
    from megatron.training.step import TrainStep
    from megatron.training.timers import Timers

    processes = LAYOUTS[layout][0]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = parse(flags(size, layout), "pretrain_gpt", world_size=processes).config
    device = torch.device("cpu")
    if processes == 1:
        mesh = Mesh.serial(device)
    else:
        dist.init_process_group("gloo")
        mesh = setup.connected_mesh(config, device)
    vocabulary = Vocabulary(ids_in_use=size.vocab, rows=size.vocab, padded_rows=size.vocab)
    chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    optimizer = build_run_optimizer(config, chunks, mesh)
    passes = build_passes(config, mesh, chunks, pretrain_gpt.forward_step, Timers(0))
    step = TrainStep(passes, optimizer, Health(config.health), seed=0)
    plan, count, nominal = Planner(config, mesh).after(TrainState())
    micro = config.training.micro_batch_size
    text = torch.randint(size.vocab, (micro, size.sequence + 1))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    batch = {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(tokens.shape)}
    waiting = Waiting()

    def run() -> None:
        step.run(plan, [batch] * count, count, nominal, lambda: (False,) * 3)

    run()
    with comm.counting() as counted:
        run()
    at = {name: mesh[name].coordinate for name in ("tp", "cp", "pp", "dp")}
    planned = traffic.expected(config, size.vocab, count, at)
    found = {key: (counted.calls[key], moved) for key, moved in counted.bytes.items()}
    assert found == {key: tuple(cost) for key, cost in planned.items()}, (found, planned)
    by_axis: Counter[str] = Counter()
    for moved in comm.gather_objects(dict(counted.bytes), mesh.world):
        for (axis, _), amount in moved.items():
            by_axis[axis] += amount
    if mesh.rank == 0:
        print(json.dumps(by_axis), flush=True)
    for line in sys.stdin:
        comm.barrier(mesh.world)
        waiting.seconds, start = 0.0, time.perf_counter()
        for _ in range(int(line)):
            run()
        seconds = time.perf_counter() - start
        shares = comm.gather_objects(waiting.seconds / seconds, mesh.world)
        if mesh.rank == 0:
            answer = [seconds / int(line), statistics.mean(shares)]
            print(json.dumps(answer), flush=True)
    setup.disconnect()


class Team:
    """The processes of a contestant."""

    def __init__(self, size: str, layout: str) -> None:
        processes = LAYOUTS[layout][0]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(processes):
            environment = dict(
                os.environ,
                OMP_NUM_THREADS=str(2 // processes),
                OMP_WAIT_POLICY="PASSIVE",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                WORLD_SIZE=str(processes),
            )
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--serve", layout, "--size", size],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        self.bytes: dict[str, int] = self._answer()

    def _answer(self) -> Any:
        first = self.processes[0]
        assert first.stdout is not None
        line = first.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant died with exit code {first.wait()}")
        return json.loads(line)

    def run(self, count: int) -> tuple[float, float]:
        """Return the seconds of a step, and the share of it that was waited for others."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        seconds, share = self._answer()
        return seconds, share

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)


def ideal(size: Size, layout: str) -> float:
    """Return the share of the serial run's rate that a layout could reach."""
    return size.batch / (size.batch + 1) if layout == "pp2" else 1.0


def main() -> int:
    """Run what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    layouts = [name for name in LAYOUTS if name != "serial"]
    parser.add_argument("--size", default="M", choices=list(SIZES))
    parser.add_argument("--layouts", nargs="+", default=layouts, choices=layouts)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SIZES[options.size]
    if options.serve:
        serve(size, options.serve)
        return 0
    teams = {name: Team(options.size, name) for name in ("serial", *options.layouts)}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in teams}
    for _ in range(options.rounds):
        for name, team in teams.items():
            measured[name].append(team.run(2))
    for team in teams.values():
        team.close()
    tokens, rows = size.batch * size.sequence, {}
    print(
        f"{'layout':>8} {'ms':>8} {'tokens/s':>9} {'of serial':>9} {'of ideal':>8} {'waiting':>8}"
    )
    for name, results in measured.items():
        seconds = statistics.median(time for time, _ in results)
        pairs = zip(measured["serial"], results, strict=True)
        ratio = statistics.median(serial / time for (serial, _), (time, _) in pairs)
        waiting = statistics.median(share for _, share in results)
        rows[name] = {
            "ms": 1e3 * seconds,
            "of_serial": ratio,
            "of_ideal": ratio / ideal(size, name),
            "waiting": waiting,
            "bytes": teams[name].bytes,
        }
        moved = ", ".join(f"{axis} {amount:,}" for axis, amount in teams[name].bytes.items())
        print(
            f"{name:>8} {1e3 * seconds:>8.0f} {tokens / seconds:>9.0f} {ratio:>9.2f} "
            f"{ratio / ideal(size, name):>8.2f} {waiting:>8.1%}  {moved}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
