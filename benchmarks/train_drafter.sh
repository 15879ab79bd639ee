#!/bin/sh
# Trains a draft model for the default model on its own answers. Sized for about four minutes on an H200, but not timed
# there yet. `spill serve --speculative-model OUT` then drafts with it.
#   benchmarks/train_drafter.sh OUT [PROMPTS]
#
# OUT gets the draft model (model.safetensors, config.json, draft_vocab.json) and OUT/training, which may be removed.
# PROMPTS has one prompt per line, or is .json or .jsonl with texts or conversations; without it the model writes some.
# Needed besides the repository: the default model in the cache ($SPILLOVER_CACHE), or MODEL=PATH; PROMPTS if given.
set -eu
out=$1
spill=${SPILL:-spill}  # command to run
model=${MODEL:-default}
$spill draft train "$model" --out "$out" ${2:+--data "$2"} --layers "${LAYERS:-2}" --draft-vocab "${DRAFT_VOCAB:-8192}" \
    --answers "${ANSWERS:-6000}" --answer-tokens 256 --steps "${STEPS:-6000}" --batch-tokens "${BATCH_TOKENS:-16384}"
ls -l "$out"
