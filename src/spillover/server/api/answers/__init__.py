"""Answers: generation is run and monitored, and its text, log probabilities and counts are written as events."""
