#!/usr/bin/env bash
# BERT large (Devlin et al., 2019, arXiv:1810.04805) as Megatron-LM trains it (Shoeybi et al., 2019,
# arXiv:1909.08053, section 5.3), on 8 GPUs.
#
#   export DATA=my_text_sentence
#   examples/bert/336m.sh [FLAGS]
#   NODES=4 sbatch --nodes 4 examples/slurm/job.sbatch examples/bert/336m.sh [FLAGS]
#   DRY_RUN=1 examples/bert/336m.sh                           the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SAVE="${SAVE:-runs/bert-336m}"
# BERT's vocab.txt, of the kind that knows no capitals.
VOCABULARY="${VOCABULARY:-bert-large-uncased-vocab.txt}"
# Prefix of token files, as tools/preprocess_data.py --split-sentences makes them; "mock" trains on
# made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_sentence), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 512 --max-position-embeddings 512
    --attention-dropout 0.1 --hidden-dropout 0.1 --init-method-std 0.02
)
TEXT=(--vocab-file "$VOCABULARY" --data-path "$DATA" --split 949,50,1)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 30523)
# The share of tokens that are masked, and of shorter samples, are Megatron-LM's.
TRAINING=(
    --train-iters 2000000 --micro-batch-size 32 --global-batch-size 1024
    --mask-prob 0.15 --short-seq-prob 0.1
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-decay-iters 1980000
    --lr-warmup-iters 10000 --weight-decay 0.01 --clip-grad 1.0 --bf16
)
# Every GPU holds the whole model: 18 bytes per parameter, and room for activations.
LAYOUT=(--overlap-grad-reduce)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 10000 --save-keep-last 3
    --eval-interval 10000 --eval-iters 10 --log-interval 10 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_bert.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
