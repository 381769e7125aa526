#!/usr/bin/env bash
# A Mixtral of 2 layers: two processes on CPUs, a minute or less.
#
#   examples/mixtral/tiny.sh [FLAGS]
#   GPUS=1 examples/mixtral/tiny.sh --expert-model-parallel-size 1       the same in one process
#
# FLAGS override what stands here. It is to see the program work, and to try flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export GPUS="${GPUS:-2}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

MODEL=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --seq-length 64
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 8 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02
)
TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127)
TRAINING=(
    --train-iters 30 --micro-batch-size 4 --global-batch-size 16
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --device cpu
)
# Experts and optimizer states are shared out, as in the big runs.
LAYOUT=(
    --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
OUTPUT=(--eval-iters 0 --log-interval 1)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
