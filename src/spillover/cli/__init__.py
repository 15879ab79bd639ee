"""The `spill` command. Each file is one command; heavy imports happen inside it, so that `spill --help` is instant."""
