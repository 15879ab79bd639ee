#!/usr/bin/env bash
# Checks a tree on one GPU before a release, part by part:
#
#   bash benchmarks/release_gpu.sh suite        # all GPU tests, and 64 greedy chats over six schedules at the same time
#   bash benchmarks/release_gpu.sh speed        # W1, W3, prefill, mixtures
#   bash benchmarks/release_gpu.sh quantized    # Llama-3.1-8B in bfloat16, FP8 and int4
#   bash benchmarks/release_gpu.sh speculation  # an EAGLE-3 head with simulated acceptance, 1 and 64 requests
#   bash benchmarks/release_gpu.sh tiers        # first tokens of prefixes from device, host memory and disk
#
# JSON files go to OUT (default: benchmarks/results). MODEL: the default model's file, if it is not in the model cache.
# Without a checkout's .git, SPILLOVER_COMMIT names the commit in these files. A part that fails does not stop the rest.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
python=${PYTHON:-python3}
model=${MODEL:+--model $MODEL}
export PYTHONPATH="src:tests:.gpu-deps${PYTHONPATH:+:$PYTHONPATH}"
failed=0

run() {  # a benchmark, with its log next to its result
    local name=$1 script=$2
    shift 2
    "$python" "benchmarks/$script" "$@" > "$out/$name.log" 2>&1 && rm "$out/$name.log" && return
    echo "$script $* failed; $out/$name.log ends with:"
    tail -n 15 "$out/$name.log"
    return 1
}

part() {
    case $1 in
    suite)
        # shellcheck disable=SC2086  # $model is two words or none
        run same-bits same_bits.py $model --gpu-memory 16GB --dtype bfloat16 --tokens 128 \
            --random 0 --output "$out/same-bits-128.json" &
        # The folders with GPU tests: others need packages that a machine for measurements may lack.
        "$python" -m pytest -q -rs -n "${GPU_WORKERS:-12}" -m gpu --results-to "$out/test-gpu.json" \
            tests/gpu tests/engine tests/kernels tests/lab || failed=1
        wait $! || failed=1 ;;
    speed)
        run dense default_speed.py --only qwen3-0.6b --only llama-3.1-8b --mode default --output "$out/dense.json" || failed=1
        run mixtures default_speed.py --only qwen3-30b-a3b-fp8 --only gpt-oss-120b --mode default --output "$out/mixtures.json" || failed=1 ;;
    quantized) run quantized quantized_models.py --only bf16 --only fp8-blocks --only fp8 --only int4 \
        --output "$out/quantized-models.json" || failed=1 ;;
    speculation)
        for requests in 1 64; do
            run "head-$requests" speculation.py --model llama-3.1-8b --device cuda --gpu-memory 42GB --length 256 \
                --simulate 0.8,0.6,0.4,0.28 --head --requests "$requests" --repeats 3 --output "$out/speculation-$requests.json" || failed=1
        done ;;
    tiers) run tiers kv_tiers_gpu.py --model llama-3.1-8b --parts ttft --folder "$out" || failed=1 ;;
    *) echo "no such part: $1; there are suite, speed, quantized, speculation and tiers" >&2; exit 2 ;;
    esac
}

mkdir -p "$out"
for name in "${@:-suite}"; do
    part "$name"
done
exit "$failed"
