"""One module per kind of task: how items are read, what is sent to the model, and how its answer is scored."""
