#!/usr/bin/env bash
# From text to a model that writes: prepare, train, stop, resume, compare, generate.
# Takes about two minutes on two idle CPU cores; uses a GPU when there is one. On a slow or busy
# machine, fewer iterations show the same steps (and a worse model): ITERATIONS=200 make quickstart
#
#   make quickstart          or          PYTHON=python3 bash examples/quickstart.sh [MORE FLAGS]
#
# Everything it makes lies in runs/quickstart; running it again starts afresh.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
RUN="${RUN:-runs/quickstart}"
ITERATIONS="${ITERATIONS:-1000}"

step() { printf '\n=== %s\n' "$1"; }
show() {
    printf '$ %s\n' "$*"
    "$@"
}

# A model this small gains little from a second thread, and on a busy machine threads that wait for
# each other lose much.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer.json)
SPLIT="90,10,0"

TRAINING=(
    # A small Llama: rotary positions, RMSNorm, SwiGLU, normalised queries and keys.
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --qk-layernorm --init-method-std 0.05 --attention-dropout 0 --hidden-dropout 0
    "${TOKENIZER[@]}" --make-vocab-size-divisible-by 64
    --data-path "$RUN/shakespeare_text_document" --split "$SPLIT"
    --micro-batch-size 8 --global-batch-size 8 --train-iters "$ITERATIONS"
    --lr 5e-3 --min-lr 2.5e-4 --lr-decay-style cosine --lr-warmup-iters 20
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 100 --eval-iters 20 --log-interval 50
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 10000
    --tensorboard-dir "$RUN/tensorboard" --metrics-file "$RUN/metrics.jsonl"
)

step "Preparing data/shakespeare.jsonl (18 plays, public domain) in $RUN"
rm -rf "$RUN"
mkdir -p "$RUN"
show "$PYTHON" tools/preprocess_data.py --input data/shakespeare.jsonl "${TOKENIZER[@]}" \
    --append-eod --workers 2 --output-prefix "$RUN/shakespeare"

step "Training, and stopping half way"
show "$PYTHON" pretrain_gpt.py "${TRAINING[@]}" --exit-interval $((ITERATIONS / 2)) "$@"

step "Resuming: the same command goes on where the checkpoint is"
show "$PYTHON" pretrain_gpt.py "${TRAINING[@]}" "$@"

step "What it learned, beside models that only count"
show "$PYTHON" tools/ngram_baseline.py --data-path "$RUN/shakespeare_text_document" \
    --split "$SPLIT" --vocab-size 512 --metrics-file "$RUN/metrics.jsonl" || behind=$?
# 1: the model does not beat them, which a short training may not; the script goes on to show it.
[ "${behind:-0}" -le 1 ] || exit "$behind"

step "What it writes"
show "$PYTHON" tools/generate_text.py --load "$RUN/checkpoints" --prompt "HAMLET
" --num-tokens-to-generate 160 --temperature 0.8 --top-p 0.95

step "Curves"
show "$PYTHON" tools/report.py "$RUN/metrics.jsonl" --name quickstart --output "$RUN/report.html"
echo "checkpoints: $RUN/checkpoints   TensorBoard: tensorboard --logdir $RUN/tensorboard"
[ "${behind:-0}" = 0 ] || echo "after $ITERATIONS iterations the model is behind the bigram model; train longer"
exit "${behind:-0}"
