"""The `spill` command. Each file is one command and does heavy imports inside it, so that `spill --help` is instant."""
