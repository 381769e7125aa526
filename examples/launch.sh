#!/usr/bin/env bash
# Start a program on every GPU of this machine, or of all machines of a job:
#
#   examples/launch.sh pretrain_gpt.py FLAGS
#
# The examples end with this line. It reads:
#
#   GPUS         processes on this machine (8)
#   NODES        machines (1)
#   RENDEZVOUS   HOST:PORT where several machines meet; HOST is one of them, the same for all
#   RUN_ID       a name that they have in common (0)
#   DRY_RUN      when set, print the plan of the run and start nothing: no GPU is touched
#   PYTHON       the interpreter (.venv/bin/python where there is one, else python3)
#
# examples/slurm/job.sbatch sets them in a Slurm job.
set -euo pipefail

GPUS="${GPUS:-8}"
NODES="${NODES:-1}"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi

if [[ -n "${DRY_RUN:-}" ]]; then
    exec "$PYTHON" "$@" --dry-run --dry-run-world-size $((NODES * GPUS))
fi

if ((NODES == 1)); then
    meeting=(--standalone)
elif [[ -n "${RENDEZVOUS:-}" ]]; then
    meeting=(--nnodes "$NODES" --rdzv-backend c10d)
    meeting+=(--rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_ID:-0}")
else
    echo "$NODES machines need RENDEZVOUS=HOST:PORT on each; examples/slurm/job.sbatch sets it" >&2
    exit 2
fi

# Restarts are not torchrun's: it would also repeat a run whose flags are wrong. And it gives its
# processes 30 seconds to end; a checkpoint that SIGTERM asks for may take longer.
exec "$PYTHON" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$GPUS" \
    --max-restarts 0 --shutdown-timeout "${SHUTDOWN_TIMEOUT:-600}" "$@"
