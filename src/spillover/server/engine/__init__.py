"""The engine's process, and the side of it that the server sees."""
