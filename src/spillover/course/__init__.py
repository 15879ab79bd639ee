"""A course of sixteen weeks on serving language models: pages, experiments for the lab, tables, and checks.

A week is a folder, `weekNN`: `page.md` to read, `week.yaml` (what to run, the table of metrics, the expected shape of
the result, questions), and experiments used only by it. Nothing is measured here: the lab runs the experiments, and
numbers are read from its result folders.
"""
