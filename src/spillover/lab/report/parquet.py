"""data.parquet: one row per request of every run, for other analyses of the same events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillover.bench.target import PHASES, SOURCES
from spillover.errors import SpilloverError
from spillover.lab.report.data import Report, Visit

TEXTS = ("experiment", "arm", "workload", "run", "error")
WHOLE = ("block", "request", "session", "turn", "prompt_tokens", "output_tokens", "requested_output_len",
         *(f"tokens_{source}" for source in SOURCES))
NUMBERS = ("scheduled", "sent", "first_token", "last_token", "done", "start_unix", "ttft", "tpot", "e2el",
           *(f"{phase}_seconds" for phase in PHASES))


def write_requests(path: Path, report: Report) -> Path:
    """Write all requests. Times are seconds since the run began; `start_unix` relates them to the monitors."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SpilloverError("writing data.parquet needs the lab extra: pip install 'spillover[lab]'") from error
    schema = pa.schema([*((name, pa.string()) for name in TEXTS), *((name, pa.int64()) for name in WHOLE),
                        *((name, pa.float64()) for name in NUMBERS), ("token_times", pa.list_(pa.float64())),
                        ("token_counts", pa.list_(pa.int32()))])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for visit in report.visits:  # one run at a time: all together may not fit in memory
            rows = _rows(report, visit)
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return path


def _rows(report: Report, visit: Visit) -> list[dict[str, Any]]:
    run = visit.run()
    rows: list[dict[str, Any]] = []
    for record in run.records if run is not None else ():
        assert run is not None
        first = record.chunks[0][0] if record.chunks else None
        last = record.chunks[-1][0] if record.chunks else None
        spread = None if first is None or last is None or record.output_tokens < 2 else (
            (last - first) / (record.output_tokens - 1))
        rows.append({
            "experiment": report.name, "arm": visit.arm, "workload": visit.workload, "run": visit.key,
            "block": visit.block, "request": record.index, "session": record.session, "turn": record.turn,
            "error": record.error, "prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens,
            "requested_output_len": record.requested_output_len, "scheduled": record.scheduled, "sent": record.sent,
            "first_token": first, "last_token": last, "done": record.done, "start_unix": run.start_unix,
            "ttft": None if first is None else first - record.sent, "tpot": spread,
            "e2el": None if last is None else last - record.sent,
            **{f"tokens_{source}": (record.sources or {}).get(source) for source in SOURCES},
            **{f"{phase}_seconds": (record.timings or {}).get(phase) for phase in PHASES},
            "token_times": [at for at, _ in record.chunks], "token_counts": [count for _, count in record.chunks],
        })
    return rows
