"""llama.cpp's own HTTP server from the xllamacpp wheel, with llama-server's flags.

Run as a file by the interpreter that has xllamacpp, which need not have spillover: imports nothing of this package.
Unknown flags are refused, as in llama-server.
"""

from __future__ import annotations

import argparse
import importlib
import signal
from typing import Any


def main() -> None:
    asked = parser().parse_args()
    xllamacpp = importlib.import_module("xllamacpp")
    server = xllamacpp.Server(params_of(asked, xllamacpp))
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def parser() -> argparse.ArgumentParser:
    """Return the flags of llama-server that affect measurements, under both of their names."""
    flags = argparse.ArgumentParser(prog="llama-server (xllamacpp)", allow_abbrev=False)
    flags.add_argument("-m", "--model", required=True)
    flags.add_argument("-a", "--alias")
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=8080)
    flags.add_argument("-c", "--ctx-size", type=int, dest="n_ctx")
    flags.add_argument("-np", "--parallel", type=int, dest="n_parallel")
    flags.add_argument("-b", "--batch-size", type=int, dest="n_batch")
    flags.add_argument("-ub", "--ubatch-size", type=int, dest="n_ubatch")
    flags.add_argument("-ngl", "--n-gpu-layers", type=int, dest="n_gpu_layers")
    flags.add_argument("-t", "--threads", type=int)
    flags.add_argument("-tb", "--threads-batch", type=int)
    flags.add_argument("--threads-http", type=int, dest="n_threads_http")
    flags.add_argument("-ctk", "--cache-type-k")
    flags.add_argument("-ctv", "--cache-type-v")
    flags.add_argument("-fa", "--flash-attn", choices=("on", "off", "auto"))
    flags.add_argument("--cache-ram", type=int, dest="cache_ram_mib")
    flags.add_argument("--cache-prompt", action=argparse.BooleanOptionalAction)
    flags.add_argument("--cache-reuse", type=int, dest="n_cache_reuse")
    flags.add_argument("-kvu", "--kv-unified", action=argparse.BooleanOptionalAction)
    flags.add_argument("-nkvo", "--no-kv-offload", action="store_const", const=True)
    flags.add_argument("--cont-batching", action=argparse.BooleanOptionalAction)
    flags.add_argument("--warmup", action=argparse.BooleanOptionalAction)
    flags.add_argument("--jinja", action=argparse.BooleanOptionalAction, dest="use_jinja")
    flags.add_argument("--metrics", action="store_const", const=True, dest="endpoint_metrics")
    flags.add_argument("--slots", action=argparse.BooleanOptionalAction, dest="endpoint_slots")
    flags.add_argument("--slot-save-path", dest="slot_save_path")
    flags.add_argument("-lv", "--verbosity", type=int)
    return flags


def params_of(asked: argparse.Namespace, xllamacpp: Any) -> Any:
    """Return llama.cpp's parameters; flags that were not given keep llama.cpp's defaults."""
    params = xllamacpp.CommonParams()
    params.model.path = asked.model
    params.hostnames, params.port = [asked.host], asked.port
    if asked.alias:
        params.model_alias = {asked.alias}
    if asked.threads is not None:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    if asked.threads_batch is not None:
        params.cpuparams_batch.n_threads = asked.threads_batch
    if asked.flash_attn is not None:
        params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, {
            "on": "LLAMA_FLASH_ATTN_TYPE_ENABLED", "off": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
            "auto": "LLAMA_FLASH_ATTN_TYPE_AUTO"}[asked.flash_attn])
    for name in ("cache_type_k", "cache_type_v"):
        if (value := getattr(asked, name)) is not None:
            setattr(params, name, getattr(xllamacpp.ggml_type, f"GGML_TYPE_{value.upper()}"))
    for name in ("n_ctx", "n_parallel", "n_batch", "n_ubatch", "n_gpu_layers", "n_threads_http", "cache_ram_mib",
                 "cache_prompt", "n_cache_reuse", "kv_unified", "no_kv_offload", "cont_batching", "warmup", "use_jinja",
                 "endpoint_metrics", "endpoint_slots", "slot_save_path", "verbosity"):
        value = getattr(asked, name)
        if value is not None:
            setattr(params, name, value)
    return params


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
