"""Programs compared with the same calls by hand: prompt tokens by source, time, and the hits that were possible.

    python benchmarks/programs.py --model PATH --runs 3 --json benchmarks/results/programs.json
    python benchmarks/programs.py --http --runs 3 --json benchmarks/results/programs-http.json

Every run begins with an empty prefix cache. By hand, requests are sent as by a script: concurrently if none needs
another's answer, or one after another. The oracle counts the tokens that the program's own requests, in their order,
could have found in an unlimited cache. With --http the model runs in a `spill serve`, for all arms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "programs"))

import few_shot
import json_by_fields
import multi_turn
import tree_of_thought
from calls import Calls
from made_by import made_by
from server_process import ServerProcess

from spillover import LLM
from spillover.bench.serving.served_model import JsonServer
from spillover.programs import TokenCounts, backend_of
from spillover.programs.recording import RecordingBackend, findable

EXAMPLES = {module.__name__: module for module in (tree_of_thought, few_shot, multi_turn, json_by_fields)}
LEAST_SHARE = 0.98  # minimum share of the oracle's hits that a program must have


class Served:
    """A server, with the methods of an LLM that are used here."""

    def __init__(self, url: str) -> None:
        self.url = url

    def reset_prefix_cache(self) -> None:
        JsonServer(self.url, {}).post("/reset_prefix_cache", {})


def connection_of(llm: LLM | Served) -> LLM | str:
    return llm.url if isinstance(llm, Served) else llm


@contextmanager
def serving(model: str | None, flags: dict[str, Any], http: bool) -> Iterator[LLM | Served]:
    """Load the model in this process, or serve it."""
    if not http:
        with LLM(model, **flags) as llm:
            yield llm
        return
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with ServerProcess(*([model] if model else []), *words, "--enable-admin-routes", "--no-log-requests") as server:
        yield Served(server.url)


def measured(llm: LLM | Served, work: Callable[[], Any]) -> tuple[Any, float]:
    llm.reset_prefix_cache()
    backend_of(connection_of(llm)).gate.forget()
    begun = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begun


def as_program(llm: LLM | Served, example: Any) -> dict[str, Any]:
    backend = RecordingBackend(backend_of(connection_of(llm)))
    result, seconds = measured(llm, lambda: example.run(backend))
    return row(result, seconds, backend.counts, len(backend.requests)) | {
        "findable": findable(backend.requests, backend.gate.block_size)}


def by_hand(llm: LLM | Served, example: Any, concurrent: bool) -> dict[str, Any]:
    calls = Calls(connection_of(llm), concurrent)
    result, seconds = measured(llm, lambda: example.by_hand(calls))
    return row(result, seconds, calls.counts, calls.requests)


def row(result: Any, seconds: float, counts: TokenCounts, requests: int) -> dict[str, Any]:
    return {"result": json.dumps(result), "seconds": seconds, "requests": requests, "prompt_tokens": counts.total,
            "computed": counts.computed, "device": counts.device, "hit_rate": counts.hit_rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder or GGUF file; default: the default model")
    parser.add_argument("--http", action="store_true", help="run the model in a server instead of this process")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=list(EXAMPLES), action="append", help="examples to run; default: all")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--flags", default="{}", help='flags of the LLM as JSON, such as {"load_format": "dummy"}')
    given = parser.parse_args()
    arms: dict[str, Callable[[LLM | Served, Any], dict[str, Any]]] = {
        "program": as_program,
        "by hand": lambda llm, example: by_hand(llm, example, True),
        "by hand, in turn": lambda llm, example: by_hand(llm, example, False)}
    results: dict[str, dict[str, Any]] = {}
    short = False
    with serving(given.model, {"max_model_len": 4096, **json.loads(given.flags)}, given.http) as llm:
        print(f"{'example':16} {'arm':17} {'requests':>8} {'prompt':>7} {'computed':>8} {'hit rate':>8} "
              f"{'of oracle':>9} {'seconds':>8} {'same text':>9}")
        for name in given.only or EXAMPLES:
            found: dict[str, Any] = {}
            for arm, work in arms.items():
                work(llm, EXAMPLES[name])  # warm-up: compiles grammars and kernels
                runs = [work(llm, EXAMPLES[name]) for _ in range(given.runs)]
                found[arm] = runs[-1] | {"seconds": statistics.median(run["seconds"] for run in runs),
                                         "all_seconds": [run["seconds"] for run in runs]}
            oracle, expected = found["program"]["findable"], found["program"]["result"]
            for arm, one in found.items():
                one["of_oracle"] = one["device"] / oracle if arm == "program" and oracle else None
                one["same_text"] = one.pop("result") == expected
                share = "" if one["of_oracle"] is None else f"{one['of_oracle']:.1%}"
                print(f"{name:16} {arm:17} {one['requests']:8} {one['prompt_tokens']:7} {one['computed']:8} "
                      f"{one['hit_rate']:8.1%} {share:>9} {one['seconds']:8.2f} {one['same_text']!s:>9}", flush=True)
            short |= found["program"]["of_oracle"] is not None and found["program"]["of_oracle"] < LEAST_SHARE
            results[name] = found
            if given.json is not None:  # after each example, as a run may be interrupted
                given.json.write_text(json.dumps({"provenance": made_by(), "results": results}, indent=1) + "\n")
    if short:
        sys.exit(f"a program found less than {LEAST_SHARE:.0%} of what its own requests could have found")


if __name__ == "__main__":
    main()
