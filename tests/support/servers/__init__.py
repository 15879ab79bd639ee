"""Servers and clients in processes of their own, real ones and stand-ins."""
