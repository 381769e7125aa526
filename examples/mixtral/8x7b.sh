#!/usr/bin/env bash
# Mixtral 8x7B (Jiang et al., 2024, arXiv:2401.04088, table 1) on 64 GPUs, or on 8.
#
#   export DATA=my_text_document
#   sbatch --nodes 8 examples/slurm/job.sbatch examples/mixtral/8x7b.sh [FLAGS]
#   NODES=1 examples/mixtral/8x7b.sh [FLAGS]      one machine with 0.8 TB of memory for optimizers
#   DRY_RUN=1 examples/mixtral/8x7b.sh                        the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-8}"
SAVE="${SAVE:-runs/mixtral-8x7b}"
# A folder with Mixtral's tokenizer.json.
TOKENIZER="${TOKENIZER:-mixtral}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 32768 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 8 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02
)
TEXT=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --padded-vocab-size 32000 --data-path "$DATA" --split 99,1,0
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 31999)
# Batches and rates are not published: 4 million tokens, 2 trillion in all, a usual schedule.
TRAINING=(
    --train-iters 500000 --micro-batch-size 1 --global-batch-size 128
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# Context ranks cut each sample of 32768 tokens into 8, and the same 8 GPUs hold an expert of each
# layer apiece, so that tokens travel to experts within a machine.
LAYOUT=(
    --context-parallel-size 8 --cp-comm-type a2a --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if ((NODES > 1)); then
    # 2 pipeline ranks of 4 stages of 4 layers each.
    LAYOUT+=(--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4)
else
    # 8 GPUs have no room for masters and moments, nor for what experts keep for the backward.
    LAYOUT+=(--optimizer-cpu-offload --recompute-granularity selective --recompute-modules moe)
fi
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
