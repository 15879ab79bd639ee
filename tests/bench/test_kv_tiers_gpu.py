"""The GPU measurement of KV tiers, with a tiny model: every variant really runs, and the file has the agreed keys."""

from __future__ import annotations

import json
from pathlib import Path

import kv_tiers_gpu
from click.testing import CliRunner
from kv_tiers_gpu import SMALL, Visit, break_even


def test_the_script_runs_and_writes_figures(tmp_path: Path) -> None:
    result = CliRunner().invoke(kv_tiers_gpu.main, ["--tiny", "--repeats", "1", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "was not measured" not in result.output
    figures = {figure["metric"]: figure for figure in json.loads((tmp_path / "kv-tiers-tiny.json").read_text())}
    for figure in figures.values():
        assert {"workload", "metric", "unit", "value", "repeats", "limit", "percent_of_limit", "commit", "date", "gpu",
                "versions", "command"} <= figure.keys()
    for length in SMALL.lengths:
        assert figures[f"TTFT of {length} tokens, computed"]["tokens_from_host"] == 0
        assert figures[f"TTFT of {length} tokens, from host memory"]["tokens_from_host"] == length
        assert figures[f"TTFT of {length} tokens, from disk"]["tokens_from_disk"] == length
    for length in SMALL.restore_lengths:
        assert figures[f"host restore of {length} tokens"]["value"] > 0


def test_break_even_is_where_a_way_wins_from_then_on() -> None:
    times = {1: (1.0, 0.5), 2: (2.0, 2.5), 4: (4.0, 3.0), 8: (8.0, 3.5)}
    visits = {(length, way): [Visit(seconds, 0.0, 0, 0)] for length, both in times.items()
              for way, seconds in zip(("cold", "host"), both, strict=True)}
    assert break_even(visits, "host") == 4
    visits[8, "host"] = [Visit(9.0, 0.0, 0, 0)]
    assert break_even(visits, "host") is None
    assert break_even(visits, "disk") is None
