#!/usr/bin/env bash
# GPT-3 with 175 billion parameters on 1024 GPUs: the training of Brown et al., 2020
# (arXiv:2005.14165), on tensor and pipeline ranks as in Narayanan et al., 2021 (arXiv:2104.04473).
#
#   export DATA=my_text_document
#   sbatch --nodes 128 examples/slurm/job.sbatch examples/gpt3/175b.sh [FLAGS]
#   DRY_RUN=1 examples/gpt3/175b.sh                          the plan alone, anywhere
#
# FLAGS override what stands here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export NODES="${NODES:-128}"
SAVE="${SAVE:-runs/gpt3-175b}"
# vocab.json and merges.txt of GPT-2.
TOKENIZER="${TOKENIZER:-gpt2}"
# Prefix of token files, as tools/preprocess_data.py makes them; "mock" trains on made-up tokens.
if [[ -z "${DATA:=${DRY_RUN:+not-set}}" ]]; then
    echo "set DATA to the prefix of token files (my_text_document), or to mock" >&2
    exit 2
fi

MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --attention-dropout 0.1 --hidden-dropout 0.1 --init-method-std 0.006
)
TEXT=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt"
    --data-path "$DATA" --split 98,2,0
)
[[ "$DATA" == mock ]] && TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256)
# In samples of 2048 tokens: 300 billion tokens in all, warm-up over 375 million, cosine to a tenth
# over 260 billion, batches from 32 thousand tokens to 3.2 million over 12 billion.
TRAINING=(
    --train-samples 146484375 --micro-batch-size 1 --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine
    --lr-warmup-samples 183105 --lr-decay-samples 126953125
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
# A layer's matrices over the 8 GPUs of a machine, 8 pipeline ranks of 4 stages of 3 layers each.
LAYOUT=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 3
    --overlap-grad-reduce
)
OUTPUT=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --save-keep-last 3
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --metrics-file "$SAVE/metrics.jsonl" --tensorboard-dir "$SAVE/tensorboard"
)

exec examples/launch.sh pretrain_gpt.py \
    "${MODEL[@]}" "${TEXT[@]}" "${TRAINING[@]}" "${LAYOUT[@]}" "${OUTPUT[@]}" "$@"
