"""The tiers below host memory: disk, remote store, and two for tests. They know keys and bytes; no model, no torch.

Nothing is imported here, so that the remote tier's client library is loaded only where that tier is used.
"""
