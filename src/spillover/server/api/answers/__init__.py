"""What goes out: generation is run and watched, and its text, log probabilities and counts are put into events."""
