"""The engine process, and the front's interface to it."""
