"""vLLM as in the seeds."""

from __future__ import annotations

from typing import Any

from spillover.lab.presets.preset import Preset

MOE_30B = "Qwen/Qwen3-30B-A3B-FP8"
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
AWQ_7B = "Qwen/Qwen2.5-7B-Instruct-AWQ"
MIXTRAL = "mistralai/Mixtral-8x7B-Instruct-v0.1"
CUDA = ("cuda",)


def _seed_001() -> list[Preset]:
    """Return presets of two models on two GPUs: KV only in GPU memory, with OffloadingConnector, and with LMCache."""
    found = []
    for size, share, blocks, layers in (("0.6b", 0.2, 39072, 28), ("8b", 0.6, 64000, 36)):
        # vLLM now takes bytes: blocks of 16 tokens, keys and values of 8 heads of 128 in two bytes.
        host: dict[str, Any] = {"num_cpu_blocks": blocks, "cpu_bytes_to_use": blocks * 16 * layers * 2 * 8 * 128 * 2}
        gib = host["cpu_bytes_to_use"] / 2**30
        for short, about, connector, extra, more in (
            ("baseline", "KV in GPU memory alone", None, {}, ()),
            ("offloading", f"KV through OffloadingConnector to {blocks:,} host blocks, {gib:.0f} GiB",
             "OffloadingConnector", host, ()),
            ("lmcache", "KV through LMCache, whose size LMCACHE_MAX_LOCAL_CPU_SIZE sets: it does not read the number "
             "of blocks that was given to it", "LMCacheConnectorV1", {"num_cpu_blocks": blocks}, ("module:lmcache",)),
        ):
            args: dict[str, Any] = {"tensor-parallel-size": 2, "gpu-memory-utilization": share}
            if connector is not None:
                args["kv-transfer-config"] = {"kv_connector": connector, "kv_role": "kv_both",
                                              "kv_connector_extra_config": extra}
            found.append(Preset(f"vllm-qwen3-{size}-{short}", "vllm", about, args, seed="001",
                                model=f"Qwen/Qwen3-{size.upper()}", needs=("cuda:2", *more)))
    return found


def _seed_003() -> list[Preset]:
    def of(name: str, about: str, args: dict[str, Any], env: dict[str, str] | None = None, model: str = LLAMA_8B,
           needs: tuple[str, ...] = ()) -> Preset:
        return Preset(f"vllm-{name}", "vllm", about, args, env or {}, "003", model, needs)

    draft = {"method": "draft_model", "model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
    pair = ("one half of a pair: put a proxy before both and measure that as a 'url' arm (week 16; there by "
            "P2pNcclConnector, which vLLM no longer has)")
    nixl = {"kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    return [
        of("default", "default settings (week 1; week 10: with CUDA graphs)", {}),
        of("small-memory", "where the defaults run out of memory", {"max-model-len": 4096,
                                                                    "gpu-memory-utilization": 0.85}),
        *(of(f"seqs-{count}", f"at most {count} requests in a step (week 4)", {"max-num-seqs": count})
          for count in (1, 4, 16, 64, 256)),
        *(of(f"block-{size}", f"KV blocks of {size} tokens (week 4)", {"block-size": size}) for size in (8, 16, 32)),
        of("prefix-caching", "automatic prefix caching on (week 5)", {"enable-prefix-caching": True}),
        of("no-prefix-caching", "automatic prefix caching off (week 5)", {"enable-prefix-caching": False}),
        of("fp8-kv", "prefix caching with KV in fp8 (week 5)", {"enable-prefix-caching": True,
                                                                "kv-cache-dtype": "fp8"}, needs=CUDA),
        of("no-chunked-prefill", "a prompt is computed in one step (week 8)", {"enable-chunked-prefill": False}),
        of("chunked-prefill", "prompts are split over steps (week 8)", {"enable-chunked-prefill": True}),
        *(of(f"chunk-{tokens}", f"at most {tokens} tokens in a step (week 8)",
             {"enable-chunked-prefill": True, "max-num-batched-tokens": tokens})
          for tokens in (256, 512, 1024, 2048, 4096)),
        of("eager", "no CUDA graphs (week 10)", {"enforce-eager": True}),
        *(of(f"draft-{count}", f"TinyLlama drafts {count} tokens (week 11; written there as --speculative-model)",
             {"speculative-config": draft | {"num_speculative_tokens": count}}, needs=CUDA) for count in (1, 3, 5, 7)),
        of("ngram", "5 tokens guessed from the prompt's n-grams (week 11; there as --speculative-model [ngram])",
           {"speculative-config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}}),
        of("fp8-weights", "weights in fp8 (week 12)", {}, model="neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8",
           needs=CUDA),
        of("awq", "weights in 4 bits, AWQ (week 12)", {"quantization": "awq"},
           model="hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", needs=CUDA),
        *(of(f"tp-{ranks}", f"tensor parallel on {ranks} GPU{'s' if ranks > 1 else ''} (week 13)",
             {"tensor-parallel-size": ranks}, needs=(f"cuda:{ranks}",)) for ranks in (1, 2, 4)),
        of("mixtral-tp-2", "a mixture of experts on 2 GPUs (week 14)", {"tensor-parallel-size": 2}, model=MIXTRAL,
           needs=("cuda:2",)),
        *(of(f"lmcache-chunk-{size}", f"LMCache with 16 GB of host memory and 64 GB of disk, chunks of {size} tokens "
             "(week 15; there in a YAML file)",
             {"kv-transfer-config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
             {"LMCACHE_CHUNK_SIZE": str(size), "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "16",
              "LMCACHE_LOCAL_DISK": "file:///tmp/lmcache_disk/", "LMCACHE_MAX_LOCAL_DISK_SIZE": "64"},
             needs=("cuda", "module:lmcache")) for size in (64, 128, 256, 512, 1024)),
        *(of(f"{half}-node", f"{half} on GPU {gpu}, {pair}", nixl, {"CUDA_VISIBLE_DEVICES": gpu},
             needs=("cuda:2", "module:nixl")) for half, gpu in (("prefill", "0"), ("decode", "1"))),
    ]


PRESETS = [
    Preset("vllm-moe-no-offload", "vllm", "all weights on the GPU: out of memory on a 32 GB card, which is the result",
           {"enforce-eager": True}, seed="000", model=MOE_30B, needs=CUDA),
    Preset("vllm-cpu-offload-8", "vllm", "8 GB of the weights in host memory", {"enforce-eager": True,
                                                                               "cpu-offload-gb": 8},
           seed="000", model=MOE_30B, needs=CUDA),
    Preset("vllm-uvm", "vllm", "weights and KV in CUDA unified memory, paged on demand", {"enforce-eager": True},
           {"VLLM_USE_UVM": "1"}, "000", MOE_30B, ("cuda", "vllm-uvm")),
    Preset("vllm-uvm-prefetch", "vllm", "unified memory with a driver that prefetches pages in sequence",
           {"enforce-eager": True}, {"VLLM_USE_UVM": "1"}, "000", MOE_30B,
           ("cuda", "vllm-uvm", "driver:uvm-sequential-prefetch")),
    *_seed_001(),
    *_seed_003(),
    Preset("vllm-baseline-7b", "vllm", "GPU memory alone, as the 49x claim's slow side", {
        "max-model-len": 16384, "gpu-memory-utilization": 0.85, "quantization": "awq"}, seed="004", model=AWQ_7B,
        needs=CUDA),
    Preset("vllm-max-7b", "vllm", "62 GB of KV in host memory, fp8 KV, FlashInfer, asynchronous scheduling, as the 49x "
           "claim's fast side (there with VLLM_USE_V1 and VLLM_ATTENTION_BACKEND)", {
               "max-model-len": 16384, "gpu-memory-utilization": 0.85, "async-scheduling": True,
               "kv-offloading-backend": "native", "kv-offloading-size": 62, "kv-cache-dtype": "fp8",
               "disable-hybrid-kv-cache-manager": True, "max-num-seqs": 64, "quantization": "awq",
               "attention-backend": "FLASHINFER"}, seed="004", model=AWQ_7B, needs=CUDA),
    Preset("vllm-kv-offload", "vllm", "KV that leaves the GPU goes to 8 GiB of host memory", {
        "kv-offloading-backend": "native", "kv-offloading-size": 8, "disable-hybrid-kv-cache-manager": True},
        seed="004", needs=CUDA),
    Preset("vllm-cpu", "vllm", "on the CPU in float32, which is what a machine without bf16 units computes in", {
        "dtype": "float32", "enforce-eager": True}, {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1"}),
]
