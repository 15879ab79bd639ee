"""Servers and clients in separate processes: real ones and substitutes."""
