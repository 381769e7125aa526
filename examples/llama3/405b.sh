#!/usr/bin/env bash
# Llama 3 405B (Dubey et al., 2024, arXiv:2407.21783) on 16384 GPUs.
#
#   export DATA=my_text_document
#   sbatch --nodes 2048 examples/slurm/job.sbatch examples/llama3/405b.sh [FLAGS]
#   DRY_RUN=1 examples/llama3/405b.sh                         the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-2048}"
SAVE="${SAVE:-runs/llama3-405b}"
# A folder with Llama 3's tokenizer.json.
TOKENIZER="${TOKENIZER:-llama3}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
    --num-attention-heads 128 --group-query-attention --num-query-groups 8
    --seq-length 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
TEXT=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --padded-vocab-size 128256 --data-path "$DATA" --split 99,1,0
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128255)
# Section 3.4.1: batches of 4, 8 and 16 million tokens. (In the paper the first 252 million tokens
# have sequences of 4096; here all have 8192.)
TRAINING=(
    --train-iters 1200000 --micro-batch-size 1 --global-batch-size 2048
    --step-batch-size-schedule "0:512 252M:1024 2870B:2048"
    --lr 8e-5 --min-lr 8e-7 --lr-decay-style cosine --lr-warmup-iters 8000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# As in section 3.3.2 a layer's matrices lie over the 8 GPUs of a machine, and 16 pipeline ranks
# hold 8 layers each, but one less at either end. The paper needs no context ranks at this length,
# since its optimizer states are cut over the replicas; here they are whole, and 8 context ranks
# make room for them. With an all-to-all torch's fused attention serves.
LAYOUT=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --context-parallel-size 8 --cp-comm-type a2a
    --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 4
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --overlap-grad-reduce
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
