"""Training of draft models: a few layers that learn to say what a model would."""
