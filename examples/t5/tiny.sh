#!/usr/bin/env bash
# A T5 of 2 layers in each stack: two processes on CPUs, a minute or less.
#
#   examples/t5/tiny.sh [FLAGS]
#   GPUS=1 examples/t5/tiny.sh --tensor-model-parallel-size 1            the same in one process
#
# FLAGS override what stands here. It is to see the program work, and to try flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export GPUS="${GPUS:-2}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

MODEL=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 32
    --encoder-seq-length 32 --decoder-seq-length 16
    --position-embedding-type relative --relative-attention-num-buckets 32
    --relative-attention-max-distance 128
    --normalization RMSNorm --norm-epsilon 1e-6 --relu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1
)
# Made-up tokens count up, so that a span that was taken out follows from its neighbours.
TEXT=(--mock-data --tokenizer-type ByteLevelTokenizer --vocab-extra-ids 16)
TRAINING=(
    --span-corruption random_spans --mask-prob 0.15 --mean-noise-span-length 3
    --train-iters 100 --micro-batch-size 8 --global-batch-size 16
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style linear --lr-warmup-iters 5
    --weight-decay 0.01 --clip-grad 1.0 --device cpu
)
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)
OUTPUT=(--log-interval 10 --eval-iters 0)

exec examples/launch.sh pretrain_t5.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
