#!/usr/bin/env bash
# T5 base (Raffel et al., 2020, arXiv:1910.10683, section 3.1) on 8 GPUs.
#
#   export DATA=my_text_document
#   examples/t5/220m.sh [FLAGS]
#   sbatch --nodes 2 examples/slurm/job.sbatch examples/t5/220m.sh [FLAGS]
#   DRY_RUN=1 examples/t5/220m.sh                             the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SAVE="${SAVE:-runs/t5-220m}"
# T5's spiece.model, to which 100 sentinels are added.
TOKENIZER="${TOKENIZER:-t5/spiece.model}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 3072
    --num-attention-heads 12 --kv-channels 64
    --encoder-seq-length 512 --decoder-seq-length 128
    --position-embedding-type relative --relative-attention-num-buckets 32
    --relative-attention-max-distance 128
    --normalization RMSNorm --norm-epsilon 1e-6 --relu --disable-bias-linear
    --attention-dropout 0.1 --hidden-dropout 0.1
)
TEXT=(
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" --vocab-extra-ids 100
    --padded-vocab-size 32128 --data-path "$DATA" --split 99,1,0
)
if [[ "$DATA" == mock ]]; then
    TEXT=(--mock-data --tokenizer-type ByteLevelTokenizer --vocab-extra-ids 100)
    TEXT+=(--padded-vocab-size 32128)
fi
# Documents end to end, of which spans of 3 tokens on average are taken out: targets of 114 tokens.
TRAINING=(
    --span-corruption random_spans --mask-prob 0.15 --mean-noise-span-length 3
    --train-iters 524288 --micro-batch-size 16 --global-batch-size 128
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-iters 10000
    --weight-decay 0.01 --clip-grad 1.0 --bf16
)
# Every GPU holds the whole model: 18 bytes per parameter, and room for activations.
LAYOUT=(--overlap-grad-reduce)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 5000 --save-keep-last 3
    --eval-interval 5000 --eval-iters 10 --log-interval 10 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_t5.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
