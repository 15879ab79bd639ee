"""Spillover in the memory configurations that the seeds compare, and its counterparts of them."""

from __future__ import annotations

from typing import Any

from spillover.lab.presets.preset import Preset


def _of(name: str, about: str, args: dict[str, Any], seed: str | None = None, needs: tuple[str, ...] = ()) -> Preset:
    return Preset(f"spillover-{name}" if name else "spillover", "spillover", about, args, seed=seed, needs=needs)


PRESETS = [
    _of("", "default settings: KV on the device only, prefix caching on", {}),
    _of("host", "KV that leaves the device goes to 4 GB of host memory", {"host-memory": "4GB"}, "001"),
    _of("host-eager", "KV is written to 4 GB of host memory at once", {"host-memory": "4GB", "spill": "eager"}, "001"),
    _of("host-fp8", "4 GB of host memory that hold KV in fp8", {"host-memory": "4GB", "spill-dtype": "fp8"}, "004"),
    _of("no-restore", "host memory that is filled and never read: what spilling costs", {
        "host-memory": "4GB", "restore": "never"}, "001"),
    _of("fp8-kv", "KV in fp8 on the device", {"kv-cache-dtype": "fp8"}, "003"),
    _of("int8-kv", "KV in int8 on the device", {"kv-cache-dtype": "int8"}, "003"),
    _of("no-prefix-caching", "every prompt is computed", {"enable-prefix-caching": False}, "003"),
    *(_of(policy, f"waiting requests ordered by {policy}", {"schedule-policy": policy}, "003")
      for policy in ("fcfs", "lpm", "dfs-weight")),
    _of("static-batching", "static batching: a batch runs until its last request has finished",
        {"batching": "static"}, "003"),
    _of("no-chunked-prefill", "a prompt is computed in one step", {"enable-chunked-prefill": False}, "003"),
    *(_of(f"chunk-{tokens}", f"at most {tokens} tokens in a step", {"max-num-batched-tokens": tokens}, "003")
      for tokens in (256, 512, 1024, 2048, 4096)),
    *(_of(f"seqs-{count}", f"at most {count} requests in a step", {"max-num-seqs": count}, "003")
      for count in (1, 4, 16, 64, 256)),
    *(_of(f"block-{size}", f"KV blocks of {size} tokens", {"block-size": size}, "003") for size in (8, 16, 32)),
    _of("eager", "no CUDA graphs: every kernel is launched individually", {"enforce-eager": True}, "003", ("cuda",)),
    _of("cpu-offload-8", "8 GiB of the weights in host memory", {"cpu-offload-gb": 8}, "000"),
    *(_of(f"weights-{name}", about, {"weights": name}, seed) for name, about, seed in (
        ("demand", "weights fetched when they are needed, as unified memory does", "000"),
        ("sequential", "layers streamed ahead of compute", "000"),
        ("pinned", "a fixed part of the weights stays on the device", "002"),
        ("experts", "experts paged into slots on the device", "002"),
        ("host-experts", "experts computed on the host", "002"),
    )),
]
