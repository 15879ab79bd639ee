"""One file per model architecture."""
