"""Memory tiers: bookkeeping of KV blocks, expert slots and managed pages, copies between tiers. No models, no HTTP."""
