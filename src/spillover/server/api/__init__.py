"""The routes, one file per group of paths; `requests` parses request bodies, `answers` writes responses."""
