"""One file per kind of task: how items are read, what a model is asked, how its answer is judged."""
