"""The tiers below host memory: disk and remote store. They handle keys and bytes, without models or torch.

Nothing is imported here, so that the remote tier's client library is loaded only if that tier is used.
"""
