#!/usr/bin/env bash
# Mixtral 8x22B (Mistral AI, 2024; the shapes are those of its published weights) on 256 GPUs.
#
#   export DATA=my_text_document
#   sbatch --nodes 32 examples/slurm/job.sbatch examples/mixtral/8x22b.sh [FLAGS]
#   DRY_RUN=1 examples/mixtral/8x22b.sh                       the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-32}"
SAVE="${SAVE:-runs/mixtral-8x22b}"
# A folder with Mixtral's tokenizer.json.
TOKENIZER="${TOKENIZER:-mixtral}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384
    --num-attention-heads 48 --group-query-attention --num-query-groups 8
    --seq-length 32768 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 8 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001
)
TEXT=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --padded-vocab-size 32000 --data-path "$DATA" --split 99,1,0
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 31999)
# Batches and rates are not published: 4 million tokens, 2 trillion in all, a usual schedule.
TRAINING=(
    --train-iters 500000 --micro-batch-size 1 --global-batch-size 128
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# Attention is cut over a machine's 8 GPUs, 2 tensor x 4 context ranks, which hold an expert of each
# layer apiece; 4 pipeline ranks have 7 stages of 2 layers each. Experts are computed again in the
# backward: what they keep would take 57 GiB more.
LAYOUT=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --context-parallel-size 4 --cp-comm-type a2a --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 7
    --recompute-granularity selective --recompute-modules moe
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
