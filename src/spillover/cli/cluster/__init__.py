"""Commands that combine several servers."""
