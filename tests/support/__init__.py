"""Code shared by tests: engines and tiers here; models, kernels, servers, the lab and KV events in the subpackages."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
