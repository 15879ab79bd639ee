"""KV events: which blocks each tier holds, published as vLLM publishes it, for routers and other observers."""
