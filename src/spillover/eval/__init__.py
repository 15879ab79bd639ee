"""Evaluation of models, and of quantised models against the original: tasks from local files, run on an engine behind a
URL or in this process, with a results file of all items, confidence intervals and paired comparisons."""
