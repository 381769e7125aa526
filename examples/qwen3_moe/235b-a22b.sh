#!/usr/bin/env bash
# Qwen3 235B-A22B (Yang et al., 2025, arXiv:2505.09388, table 2) on 256 GPUs.
#
#   export DATA=my_text_document
#   sbatch --nodes 32 examples/slurm/job.sbatch examples/qwen3_moe/235b-a22b.sh [FLAGS]
#   DRY_RUN=1 examples/qwen3_moe/235b-a22b.sh                 the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-32}"
SAVE="${SAVE:-runs/qwen3-235b-a22b}"
# A folder with Qwen3's tokenizer.json.
TOKENIZER="${TOKENIZER:-qwen3}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 94 --hidden-size 4096 --moe-ffn-hidden-size 1536
    --num-attention-heads 64 --group-query-attention --num-query-groups 4
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
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# Attention is cut over 4 GPUs; 16 share out the 128 experts of a layer, 8 whole ones each. 4
# pipeline ranks have 8 stages of 3 layers each, but 2 at either end.
LAYOUT=(
    --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 8
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
