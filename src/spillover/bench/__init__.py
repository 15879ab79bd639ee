"""Offline benchmarks: workloads, timing, statistics and the tables they end in.

Knows no engine: it drives any object that satisfies `target.Generates`, and is handed the limits to print beside it.
"""
