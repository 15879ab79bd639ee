"""KV events: engines that publish them, and a mirror that applies them."""
