"""Where blocks live and who may hold them: ids, tokens and counts. No tensor, no model, no HTTP."""
