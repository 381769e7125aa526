#!/usr/bin/env bash
# T5 11B (Raffel et al., 2020, arXiv:1910.10683, section 3.7) on 128 GPUs.
#
#   export DATA=my_text_document
#   sbatch --nodes 16 examples/slurm/job.sbatch examples/t5/11b.sh [FLAGS]
#   NODES=1 examples/t5/11b.sh --global-batch-size 256 [FLAGS]           one machine
#   DRY_RUN=1 examples/t5/11b.sh                              the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-16}"
SAVE="${SAVE:-runs/t5-11b}"
# T5's spiece.model, to which 100 sentinels are added.
TOKENIZER="${TOKENIZER:-t5/spiece.model}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 65536
    --num-attention-heads 128 --kv-channels 128
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
    --train-iters 1000000 --micro-batch-size 8 --global-batch-size 2048
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-iters 10000
    --weight-decay 0.01 --clip-grad 1.0 --bf16
)
# The 8 GPUs of a machine share each layer, whose width is in its heads and feed-forward blocks;
# masters and moments are shared out over the replicas.
LAYOUT=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 2000 --save-keep-last 3
    --eval-interval 2000 --eval-iters 10 --log-interval 10 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_t5.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
