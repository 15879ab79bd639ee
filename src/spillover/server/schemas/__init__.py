"""Request and answer bodies."""
