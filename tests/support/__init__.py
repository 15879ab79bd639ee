"""What tests share: models, stores, servers and engines to try things on. Tests lie beside this folder, none in it."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
