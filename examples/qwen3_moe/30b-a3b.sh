#!/usr/bin/env bash
# Qwen3 30B-A3B (Yang et al., 2025, arXiv:2505.09388, table 2) on one machine of 8 GPUs.
#
#   export DATA=my_text_document
#   examples/qwen3_moe/30b-a3b.sh [FLAGS]
#   sbatch --nodes 16 examples/slurm/job.sbatch examples/qwen3_moe/30b-a3b.sh [FLAGS]     128 GPUs
#   DRY_RUN=1 examples/qwen3_moe/30b-a3b.sh                   the plan alone, anywhere
#
# FLAGS override what stands here. examples/launch.sh says what else it reads: GPUS, NODES, PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

SAVE="${SAVE:-runs/qwen3-30b-a3b}"
# A folder with Qwen3's tokenizer.json.
TOKENIZER="${TOKENIZER:-qwen3}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 48 --hidden-size 2048 --moe-ffn-hidden-size 768
    --num-attention-heads 32 --group-query-attention --num-query-groups 4
    --kv-channels 128 --qk-layernorm
    --seq-length 4096 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 128 --moe-router-topk 8 --moe-router-dtype fp32
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.001
)
TEXT=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --padded-vocab-size 151936 --data-path "$DATA" --split 99,1,0
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 151935)
# The first stage of the report, 30 trillion tokens. Batches and rates are not published.
TRAINING=(
    --train-iters 7152557 --micro-batch-size 1 --global-batch-size 1024
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# Each GPU has samples and 16 experts of each layer of its own. On 8 GPUs room is made by computing
# experts again in the backward and by moments of 16 bits; 32 or more need neither.
LAYOUT=(
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --recompute-granularity selective --recompute-modules moe
    --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
