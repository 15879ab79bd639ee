"""The tiers below host memory: disk and remote store. They know keys and bytes; no model, no torch.

Nothing is imported here, so that the remote tier's client library is loaded only where that tier is used.
"""
