"""The best that any router could do with a Mooncake trace, and what ours does with it, in simulated time.

    python benchmarks/router_trace.py mooncake_conversation_trace.jsonl --output-json results/router_trace.json

Four replicas as in `spill lab run router --scale trace`, run by the simulator (docs/cluster.md says how much it differs
from real runs). `ideal` is a bound: the same arrivals without the tokens that one unlimited cache for all replicas
would have found, so that nothing is evicted or computed twice, whatever the routing; it only decides which request
waits where.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spillover.bench.provenance import provenance
from spillover.cluster.simulate.arrivals import Arrival, BlockNames, reusable
from spillover.cluster.simulate.batching import ReplicaSettings
from spillover.cluster.simulate.costs import StepCosts
from spillover.cluster.simulate.run import FleetSettings, simulate
from spillover.plan.hardware import probe

BLOCK, REPLICAS, SCALE = 16, 4, 8
COSTS = StepCosts(step=5e-3, prefill_token=1e-4, decode_row=1e-4)  # --simulate-step 5,0.1
FLEETS = ((400, 3916), (2000, 3916), (2000, 16_000))  # requests of the trace, KV blocks of a replica
RATES = (10.0, 14.0, 18.0, 20.0, 22.0, 24.0)


def arrivals(path: Path, count: int, rate: float) -> list[Arrival]:
    """Read the trace with lengths divided by SCALE, and times scaled to this rate."""
    with path.open() as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, count)]
    names, made = BlockNames(BLOCK), []
    for row in rows:
        tokens, size = max(1, min(8000, row["input_length"] // SCALE)), 512 // SCALE
        parts = [(block, min(size, tokens - start)) for block, start in zip(row["hash_ids"], range(0, tokens, size),
                                                                             strict=False)]
        made.append(Arrival(row["timestamp"] / rows[-1]["timestamp"] * count / rate, tokens,
                            max(1, min(64, row["output_length"] // SCALE)), names.keys(parts)))
    return made


def ideal(given: Sequence[Arrival]) -> list[Arrival]:
    """Return the arrivals without the tokens that an unlimited cache would find."""
    seen: set[int] = set()
    left = []
    for arrival in given:
        known = next((place for place, key in enumerate(arrival.keys) if key not in seen), len(arrival.keys))
        seen.update(arrival.keys)
        found = min(known, (arrival.tokens - 1) // BLOCK) * BLOCK
        left.append(replace(arrival, tokens=arrival.tokens - found, keys=()))
    return left


def played(given: Sequence[Arrival], policy: str, blocks: int) -> dict[str, float]:
    outcome = simulate(given, FleetSettings(REPLICAS, policy=policy, replica=ReplicaSettings(num_blocks=blocks)), COSTS)
    first = sorted(each for each in outcome.first_token if not math.isnan(each))
    return {"ttft_mean": statistics.fmean(first), "ttft_p50": statistics.median(first),
            "ttft_p90": first[int(0.9 * (len(first) - 1))], "hit_rate": outcome.device_tokens / outcome.prompt_tokens,
            "requests_per_second": len(first) / outcome.seconds,
            "busy": statistics.fmean(outcome.busy_seconds) / outcome.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'requests':>9}{'blocks':>8}{'rate':>6}{'reusable':>9}   TTFT mean, ms: by turns, predicted, ideal   "
          "ratio, at most   hit rates")
    for (count, blocks), rate in itertools.product(FLEETS, RATES):
        given = arrivals(arguments.trace, count, rate)
        row: dict[str, Any] = {"requests": count, "blocks": blocks, "rate": rate, "reusable": reusable(given, BLOCK),
                               "round_robin": played(given, "round-robin", blocks),
                               "predicted": played(given, "predicted", blocks),
                               "ideal": played(ideal(given), "predicted", 1 << 20)}
        blind = row["round_robin"]["ttft_mean"]
        row |= {"ratio": blind / row["predicted"]["ttft_mean"], "ratio_at_most": blind / row["ideal"]["ttft_mean"]}
        rows.append(row)
        times = (row[name]["ttft_mean"] * 1e3 for name in ("round_robin", "predicted", "ideal"))
        print(f"{count:9}{blocks:8}{rate:6.0f}{row['reusable']:9.3f}   " + "".join(f"{time:9.0f}" for time in times)
              + f"{row['ratio']:18.2f}{row['ratio_at_most']:8.2f}{row['round_robin']['hit_rate']:11.3f}"
              f"{row['predicted']['hit_rate']:7.3f}", flush=True)
    if arguments.output_json is not None:
        command = f"python benchmarks/router_trace.py {arguments.trace.name}"
        arguments.output_json.write_text(json.dumps({"rows": rows, **provenance(asdict(probe())), "command": command},
                                                    indent=2) + "\n")


if __name__ == "__main__":
    main()
