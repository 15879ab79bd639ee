"""SGLang as in the seeds (003, weeks 1, 6, 9, 14 and 16)."""

from __future__ import annotations

from typing import Any

from spillover.lab.presets.preset import Preset
from spillover.lab.presets.vllm import LLAMA_8B, MIXTRAL


def _of(name: str, about: str, args: dict[str, Any], model: str = LLAMA_8B, needs: tuple[str, ...] = ("cuda",)
        ) -> Preset:
    return Preset(f"sglang-{name}", "sglang", about, args, seed="003", model=model, needs=needs)


PRESETS = [
    _of("default", "default settings: radix cache on, longest prefix match (weeks 1 and 6)", {}),
    _of("no-radix", "radix cache off (week 6)", {"disable-radix-cache": True}),
    *(_of(policy, f"waiting requests ordered by {policy} (weeks 6 and 9)", {"schedule-policy": policy})
      for policy in ("fcfs", "lpm", "dfs-weight")),
    _of("dp-2", "two replicas behind the cache-aware router (week 9)", {"dp-size": 2}, needs=("cuda:2",)),
    _of("mixtral-tp-2", "a mixture of experts on 2 GPUs (week 14)", {"tp-size": 2}, MIXTRAL, ("cuda:2",)),
    *(_of(f"{half}-node", f"the {half} half of a pair (week 16): put a router before both and measure that as a 'url' "
          "arm", {"disaggregation-mode": half}, needs=("cuda:2",)) for half in ("prefill", "decode")),
]
