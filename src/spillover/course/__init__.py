"""A course of sixteen weeks on serving language models: pages, experiments for the lab, tables, checks that can fail.

A week is a folder, `weekNN`: `page.md` to read, `week.yaml` (what to run, the table of metrics, the expected shape of
the result, questions), and experiments that only it has. Nothing is measured here: experiments are run by the lab, and
numbers are read from the folders that it leaves.
"""
