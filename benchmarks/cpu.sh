#!/usr/bin/env bash
# Measures the tables of docs/benchmarks.md on this machine with the default model. Each is one `spill bench` command;
# results are written to benchmarks/results/ as JSON. Takes about 30 minutes on two cores of an otherwise idle machine.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v spill >/dev/null || PATH="$PWD/.venv/bin:$PATH"
results=${RESULTS:-benchmarks/results}
mkdir -p "$results"

run() {
    local name=$1
    shift
    printf '\n\033[1m%s\033[0m\n$ spill %s\n' "$name" "$*"
    spill "$@" --output-json "$results/$name.json"
}

# Batch-1 decode, 256-token prefill and batch-16 decode, compared with the limits of this machine.
run latency bench latency --batch-size 1,16 --input-len 256 --output-len 64 --num-iters 5

# Compared with transformers.generate with static padding, at its best batch size.
run transformers bench throughput --dataset-name mixed --num-prompts 64 --mixed-input-range 16,256 \
    --mixed-output-range 8,128 --backend hf,spillover --hf-max-batch-size 16,32 --num-iters 2

# Paging: concurrency, and block size with block counts and wasted slots.
run max-num-seqs bench throughput --dataset-name mixed --num-prompts 32 --mixed-input-range 16,256 \
    --mixed-output-range 8,64 --max-num-seqs 1,4,16,64
run block-size bench throughput --dataset-name mixed --num-prompts 32 --mixed-input-range 16,256 \
    --mixed-output-range 8,64 --block-size 8,16,32,64

# Batching: static compared with continuous, with outputs of equal length and with outputs that vary.
run batching-uniform bench throughput --input-len 64 --output-len 64 --num-prompts 64 --max-num-seqs 16 \
    --batching static,continuous --num-iters 3
run batching-varied bench throughput --dataset-name mixed --num-prompts 64 --mixed-input-range 64,64 \
    --mixed-output-range 8,256 --max-num-seqs 16 --batching static,continuous --num-iters 2

# Prefix caching: all prompts share 512 tokens.
run prefix-caching bench throughput --input-len 64 --output-len 32 --random-prefix-len 512 --num-prompts 32 \
    --enable-prefix-caching=off,on

# KV tiers: their cost if nothing is reused, their gain if everything is, and what is found after a restart.
run kv-tiers-no-reuse-cpu bench tiers --workload no-reuse --arms off,host --output-len 64 --repeats 60
run kv-tiers-cpu bench tiers
run restart-cpu bench restart --block-size 64,128,256,512,1024
run restart-kill-cpu bench restart --kill --block-size 64,256,1024
