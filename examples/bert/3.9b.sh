#!/usr/bin/env bash
# The largest BERT of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053, table 4) on 64 GPUs.
#
#   export DATA=my_text_sentence
#   sbatch --nodes 8 examples/slurm/job.sbatch examples/bert/3.9b.sh [FLAGS]
#   DRY_RUN=1 examples/bert/3.9b.sh                           the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-8}"
SAVE="${SAVE:-runs/bert-3.9b}"
# BERT's vocab.txt, of the kind that knows no capitals.
VOCABULARY="${VOCABULARY:-bert-large-uncased-vocab.txt}"
# Prefix of token files, as tools/preprocess_data.py --split-sentences makes them; "mock" trains on
# made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_sentence), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 48 --hidden-size 2560 --num-attention-heads 40
    --seq-length 512 --max-position-embeddings 512
    --attention-dropout 0.1 --hidden-dropout 0.1 --init-method-std 0.02
)
TEXT=(--vocab-file "$VOCABULARY" --data-path "$DATA" --split 949,50,1)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 30523)
TRAINING=(
    --train-iters 1500000 --micro-batch-size 16 --global-batch-size 1024
    --mask-prob 0.15 --short-seq-prob 0.1
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-iters 10000
    --weight-decay 0.01 --clip-grad 1.0 --bf16
)
# Two GPUs share each layer; masters and moments are shared out over the 32 replicas.
LAYOUT=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 5000 --save-keep-last 3
    --eval-interval 10000 --eval-iters 10 --log-interval 10 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_bert.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
