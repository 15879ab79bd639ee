"""Training of draft models and draft heads: a few layers that learn to predict a model's tokens."""
