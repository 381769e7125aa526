#!/usr/bin/env bash
# A BERT of 2 layers: two processes on CPUs, a minute or less.
#
#   examples/bert/tiny.sh [FLAGS]
#   GPUS=1 examples/bert/tiny.sh --tensor-model-parallel-size 1          the same in one process
#
# FLAGS override what stands here. It is to see the program work, and to try flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export GPUS="${GPUS:-2}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# With rotary positions it learns of neighbours within a minute, which takes longer with a table.
MODEL=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1
)
# Made-up tokens count up, so that a masked one follows from its neighbours.
TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 22)
TRAINING=(
    --train-iters 100 --micro-batch-size 8 --global-batch-size 32
    --lr 5e-3 --min-lr 1e-3 --lr-decay-style linear --lr-warmup-iters 5
    --weight-decay 0.01 --clip-grad 1.0 --device cpu
)
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)
OUTPUT=(--log-interval 10 --eval-iters 0)

exec examples/launch.sh pretrain_bert.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
