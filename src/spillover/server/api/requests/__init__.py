"""What comes in: a body is checked and parsed, and turned into a prompt and sampling parameters."""
