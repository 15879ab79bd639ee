"""A substitute for an engine, for tests that only check how the page and the metrics present its numbers."""

from __future__ import annotations

from types import SimpleNamespace

from spillover.server.engine.protocol import LiveStats, TierUse


class StubClient:
    """A substitute for an engine whose numbers are set by the test."""

    def __init__(self) -> None:
        plan = SimpleNamespace(block_size=16, num_blocks=100, slot_bytes=10, dtype="float32", kv_cache_dtype="auto",
                               device_name="a CPU", max_model_len=2048, max_num_seqs=8, placement=None)
        config = SimpleNamespace(enable_prefix_caching=True, speculation=None)
        self.info = SimpleNamespace(plan=plan, config=config, max_model_len=2048, started=1.0, restarts=0,
                                    null_model=False)
        self.ready, self.engine_state = True, "ready"
        self.heartbeat_age, self.hangs = 0.0, 0
        self.stats = LiveStats(time=2.0, blocks_total=100, blocks_free=70, blocks_evictable=20, blocks_protected=10,
                               block_size=16, tiers=(TierUse("device", 500, 1000, 100, 200),))

    def latest_stats(self) -> LiveStats:
        return self.stats
