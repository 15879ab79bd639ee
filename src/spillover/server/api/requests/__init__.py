"""Request processing: a body is checked and parsed, and converted to a prompt and sampling parameters."""
