#!/usr/bin/env bash
# Llama 3 70B (Dubey et al., 2024, arXiv:2407.21783, table 3) on 512 GPUs.
#
#   export DATA=my_text_document
#   sbatch --nodes 64 examples/slurm/job.sbatch examples/llama3/70b.sh [FLAGS]
#   DRY_RUN=1 examples/llama3/70b.sh                         the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-64}"
SAVE="${SAVE:-runs/llama3-70b}"
# A folder with Llama 3's tokenizer.json.
TOKENIZER="${TOKENIZER:-llama3}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
TEXT=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --padded-vocab-size 128256 --data-path "$DATA" --split 99,1,0
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128255)
# The paper gives the peak rate of this size and everything else for 405B only: batches of 4 million
# tokens, with which that one begins, and its schedule scaled to 15 trillion tokens.
TRAINING=(
    --train-iters 3576279 --micro-batch-size 1 --global-batch-size 512
    --lr 1.5e-4 --min-lr 1.5e-6 --lr-decay-style cosine --lr-warmup-iters 8000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# A layer's matrices over the 8 GPUs of a machine, 4 pipeline ranks of 5 stages of 4 layers each.
LAYOUT=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4
    --overlap-grad-reduce
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
