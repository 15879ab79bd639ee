"""Offline benchmarks: workloads, timing, statistics and the tables that report them.

This package depends on no engine: it drives any `target.Generates`, and callers pass in the limits that are printed.
"""
