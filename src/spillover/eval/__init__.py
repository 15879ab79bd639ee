"""What a model knows and how far a quantised one is from the original: tasks from local files, asked of any engine by
URL or of one in this process, item by item into a results file; confidence intervals and paired comparisons."""
