"""KV events: which blocks each tier holds, published in vLLM's format for routers and other observers."""
