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

lab() {  # an experiment of the lab, at most five minutes of it
    local name=$1
    shift
    "$python" -c 'from spillover.cli.main import main; main()' lab run "$@" --scale gpu --time-limit 5min --max-blocks 3 \
        --no-report --out "$out/lab-$name" --output-json "$out/$name.json"
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
        lab w1 w1 --arms default || failed=1
        lab w3 w3 --arms default || failed=1
        lab prefill prefill --arms default || failed=1
        for shape in gpt-oss-120b qwen3-30b-a3b-fp8; do
            lab "w3-$shape" w3 --arms default --model "shape:$shape" || failed=1
        done ;;
    quantized) lab formats formats --arms fp8-blocks,fp8,int4 || failed=1 ;;
    speculation) lab speculation speculation || failed=1 ;;
    tiers) run tiers kv_tiers_gpu.py --model llama-3.1-8b --folder "$out" || failed=1 ;;
    *) echo "no such part: $1; there are suite, speed, quantized, speculation and tiers" >&2; exit 2 ;;
    esac
}

mkdir -p "$out"
for name in "${@:-suite}"; do
    part "$name"
done
exit "$failed"
