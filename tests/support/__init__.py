"""What tests share: engines and tiers here; models, kernels, servers, the lab and KV events below."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
