#!/usr/bin/env bash
# From text to an encoder-decoder that fills in what was taken out: prepare, train, measure, fill in.
# Takes 74 s on two idle CPU cores; uses a GPU when there is one. On a slow or busy
# machine, fewer iterations show the same steps (and a worse model):
#
#   make quickstart-t5       or          PYTHON=python3 bash examples/quickstart_t5.sh [MORE FLAGS]
#   ITERATIONS=200 make quickstart-t5
#
# Everything it makes lies in runs/quickstart-t5; running it again starts afresh.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
RUN="${RUN:-runs/quickstart-t5}"
ITERATIONS="${ITERATIONS:-600}"

step() { printf '\n=== %s\n' "$1"; }
show() {
    printf '$ %s\n' "$*"
    "$@"
}

# A model this small gains little from a second thread, and on a busy machine threads that wait for
# each other lose much.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# A token is a byte; 8 more mark what was taken out of a text.
TOKENIZER=(--tokenizer-type ByteLevelTokenizer --vocab-extra-ids 8)

TRAINING=(
    # A small encoder-decoder: T5's RMSNorm, ReLU and no biases, with rotary positions.
    --num-layers 1 --hidden-size 128 --num-attention-heads 4 --position-embedding-type rope
    --normalization RMSNorm --relu --disable-bias-linear --init-method-std 0.08
    --attention-dropout 0 --hidden-dropout 0
    "${TOKENIZER[@]}" --make-vocab-size-divisible-by 8
    --data-path "$RUN/shakespeare_text_document" --split 90,10,0
    # Of 14 bytes 4 are taken out, at 3 places. Texts are short and marks few: a decoder first has
    # to learn where in the text its mark stands, and the loss stays high until it does.
    --encoder-seq-length 14 --decoder-seq-length 8
    --span-corruption random_spans --mask-prob 0.3 --mean-noise-span-length 1.5
    --micro-batch-size 128 --global-batch-size 128 --train-iters "$ITERATIONS"
    # Muon for the matrices, with updates as large as Adam's; Adam for the rest.
    --optimizer muon --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high
    --lr 8e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 20
    --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 200 --eval-iters 10 --log-interval 50
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 10000
    --metrics-file "$RUN/metrics.jsonl"
)

step "Preparing data/shakespeare.jsonl (18 plays, public domain) in $RUN"
rm -rf "$RUN"
mkdir -p "$RUN"
show "$PYTHON" tools/preprocess_data.py --input data/shakespeare.jsonl "${TOKENIZER[@]}" \
    --append-eod --workers 2 --output-prefix "$RUN/shakespeare"

step "Training"
show "$PYTHON" pretrain_t5.py "${TRAINING[@]}" "$@"

step "How much of what was taken out of scenes that it never read it says right"
show "$PYTHON" tools/span_accuracy.py --load "$RUN/checkpoints" --samples 512 || behind=$?
# 1: the commonest byte would be right as often, as after a short training it may be.
[ "${behind:-0}" -le 1 ] || exit "$behind"

step "What it fills in"
show "$PYTHON" tools/generate_text.py --load "$RUN/checkpoints" --temperature 0 \
    --num-tokens-to-generate 8 --prompt "good my l<extra_id_0>rd" "wh<extra_id_0>t is t<extra_id_1>e"
echo "checkpoints: $RUN/checkpoints   metrics: $RUN/metrics.jsonl"
[ "${behind:-0}" = 0 ] ||
    echo "after $ITERATIONS iterations it is not ahead of the commonest byte; train longer"
exit "${behind:-0}"
