#!/usr/bin/env bash
# GPT with 355 million parameters ("345M") on one machine, as trained by Shoeybi et al., 2019
# (arXiv:1909.08053, section 4.2): 24 layers, sequences of 1024, batches of 512, 300,000 iterations.
#
#   DATA=my_text_document examples/gpt3/345m.sh [FLAGS]      FLAGS override what stands here
#   DRY_RUN=1 examples/gpt3/345m.sh                          the plan alone
#
# examples/launch.sh says what else it reads: GPUS, NODES, PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SAVE="${SAVE:-runs/gpt3-345m}"
# vocab.json and merges.txt of GPT-2.
TOKENIZER="${TOKENIZER:-gpt2}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024
    --attention-dropout 0.1 --hidden-dropout 0.1 --init-method-std 0.02
)
TEXT=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt"
    --data-path "$DATA" --split 949,50,1
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256)
TRAINING=(
    --train-iters 300000 --micro-batch-size 8 --global-batch-size 512
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 3000
    --weight-decay 0.01 --clip-grad 1.0 --bf16
)
# Every GPU holds the whole model: 18 bytes per parameter, and room for activations.
LAYOUT=(--overlap-grad-reduce)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
