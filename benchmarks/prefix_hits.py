"""Host time of a prefix-cache hit, on the device and in host memory: everything except the model and the link.

    python benchmarks/prefix_hits.py --tokens 1024,8192,32768,65536 --block-size 16,64 --output-json results.json

The engine runs with a runner that computes nothing and a link that copies nothing, so that the time to the first token
is the host's alone. A prompt is requested repeatedly, with different last tokens: for a hit on the device nothing
happens in between, for a hit in host memory another prompt replaces it each time, and has to be evicted again. The
parts are CPU time of the engine thread until the first token; the minimum of several repeats is shown. `LLM` is the
wall time of a whole call for one token, `wire` the time to encode and decode a request's message.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from made_by import made_by

from spillover import LLM, SamplingParams
from spillover.engine.batch.request_table import RequestTable
from spillover.engine.loop import Engine
from spillover.engine.null_runner import NullRunner, NullStep
from spillover.engine.requests.request import Request, Status
from spillover.engine.requests.request_factory import RequestFactory
from spillover.engine.scheduler import Scheduler
from spillover.engine.scheduler_config import SchedulerConfig
from spillover.engine.step import Step
from spillover.engine.tiers import SWITCH_SECONDS
from spillover.memory.connector import KVConnector, NullConnector
from spillover.memory.kv.kv_cache import KVCache
from spillover.memory.spill.store import SpillStore
from spillover.memory.spill.tiered_connector import TieredConnector
from spillover.memory.tiers.disk import DiskTier
from spillover.memory.transfer.cpu_transfers import CpuTransfers
from spillover.memory.transfer.link_cpu import CpuLink
from spillover.models.config import parse_config
from spillover.server.engine.wire import Sequence as WireSequence
from spillover.server.engine.wire import decode_to_engine, encode_add

MODEL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072, "torch_dtype": "float32",
         "tie_word_embeddings": False}
TAIL = 8  # tokens after the prefix, different in each request
BLOCK_BYTES = 256
PARTS = ("make", "add", "schedule", "launch", "transfers", "finish")


@dataclass(frozen=True)
class Row:
    """The result of one kind of hit: the minimum of several repeats, in milliseconds."""

    source: str  # "device" | "host"
    tokens: int
    block_size: int
    first_token: float  # wall time
    end: float  # wall time from the first token until the request has left the engine
    cpu: dict[str, float]  # CPU time of the engine thread until the first token, by part
    llm: float | None = None  # wall time of LLM.generate for one token
    wire: float | None = None

    @property
    def us_per_block(self) -> float:
        return 1e3 * sum(self.cpu.values()) / (self.tokens // self.block_size)


class TableRunner(NullRunner):
    """A runner that applies updates of block tables, as runners with a model do."""

    def __init__(self, blocks: int) -> None:
        super().__init__(range(100))
        self._table = RequestTable(4, 1, blocks, torch.device("cpu"))
        self._flat = self._table.block_tables.view(-1).numpy()

    def launch(self, step: Step) -> NullStep:
        _, updates = self._table.begin(step)
        self._flat[updates.places] = updates.blocks
        return super().launch(step)


class EmptyLink(CpuLink):
    """A link that finds the runs to copy, and copies nothing, as nothing reads the data."""

    def copy_out(self, blocks: Sequence[int], slots: Sequence[memoryview]) -> None:
        self._slots.runs(blocks, slots)

    def copy_in(self, slots: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._slots.runs(blocks, slots)


class Bench:
    """An engine without a model, and the CPU time of each of its parts."""

    def __init__(self, factory: RequestFactory, tokens: int, block_size: int, host: bool, disk: Path | None) -> None:
        blocks = (tokens + TAIL) // block_size + 64
        self.kv = KVCache(blocks, block_size, (None,))
        self.connector: KVConnector = NullConnector()
        if host or disk is not None:
            transfers = CpuTransfers()
            link = EmptyLink(memoryview(bytearray((blocks + 1) * BLOCK_BYTES)), BLOCK_BYTES, transfers)
            sys.setswitchinterval(SWITCH_SECONDS)
            wake = threading.Event()
            capacity = 16 * blocks * 4608 + (1 << 20)
            tiers = [DiskTier(disk, capacity, BLOCK_BYTES, b"bench", {}, wake.set)] if disk is not None else []
            store = SpillStore(link, tiers, 8 * blocks, eager=bool(tiers), rates={"host": 1e12}, wake=wake)
            self.connector = TieredConnector(self.kv, store, restore="always")
        self.scheduler = Scheduler(SchedulerConfig(4, 8192, 1 << 20), self.kv, self.connector)
        self.engine = Engine(self.scheduler, TableRunner(blocks + 1))
        self.factory = factory
        self.spent = dict.fromkeys(PARTS, 0.0)
        for part, owner, name in (("add", self.scheduler, "add"), ("schedule", self.scheduler, "schedule"),
                                  ("launch", self.engine.runner, "launch"), ("finish", self.scheduler, "finish"),
                                  ("transfers", self.scheduler, "poll_transfers"), ("make", factory, "make")):
            setattr(owner, name, self._timed(part, getattr(type(owner), name).__get__(owner)))

    def run_request(self, prompt: list[int]) -> tuple[Request, float, float]:
        """Return the finished request, the seconds until its first token, and the seconds from there to its end."""
        self.spent.update(dict.fromkeys(PARTS, 0.0))
        begun = time.perf_counter()
        request = self.factory.make(None, prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0]
        self.scheduler.add(request)
        self._until(lambda: bool(request.first_token))
        first = time.perf_counter()
        self.cpu = dict(self.spent)
        self._until(lambda: request.status is Status.FINISHED)
        self._until(lambda: not self.engine.has_work)
        return request, first - begun, time.perf_counter() - first

    def flush(self) -> None:
        """Wait until everything is stored in the tiers."""
        if isinstance(self.connector, TieredConnector):
            while self.connector._spiller.flush() or self.connector.busy:
                self.connector.wait(0.005)
                self.connector.poll()

    def evict_prefix(self, prompt: list[int]) -> None:
        """Evict everything from the device, then compute this prompt there and store it in the tiers."""
        self.kv.tree.evict(self.kv.num_total)
        self.run_request(prompt)
        self.flush()

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            steps = self.engine.num_steps
            if not self.engine.step() and self.engine.num_steps == steps:
                self.engine.wait(0.005)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.spent[part] += time.thread_time() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,8192,32768,65536", help="lengths of the prefix, separated by commas")
    parser.add_argument("--block-size", default="16,64", help="separated by commas")
    parser.add_argument("--source", default="device,host", help="separated by commas")
    parser.add_argument("--disk", action="store_true", help="add a disk with a copy of every block (--spill eager)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output-json", type=Path)
    options = parser.parse_args()
    lengths, sizes = ([int(each) for each in text.split(",")] for text in (options.tokens, options.block_size))
    rows = []
    print(f"{'source':>8}{'tokens':>8}{'block':>7}{'first ms':>10}{'end ms':>9}"
          + "".join(f"{part:>11}" for part in PARTS) + f"{'us/block':>10}{'LLM':>8}{'wire':>7}")
    for source in options.source.split(","):
        for size in sizes:
            for tokens in lengths:
                row = measure(source, tokens, size, options.repeats, options.disk)
                rows.append(row)
                print(f"{row.source:>8}{row.tokens:8}{row.block_size:7}{row.first_token:10.2f}{row.end:9.2f}"
                      + "".join(f"{row.cpu[part]:11.3f}" for part in PARTS)
                      + f"{row.us_per_block:10.2f}{row.llm or 0:8.2f}{row.wire or 0:7.2f}",
                      flush=True)
    if options.output_json is not None:
        result = {"results": [asdict(row) | {"us_per_block": row.us_per_block} for row in rows],
                  **made_by()}
        options.output_json.write_text(json.dumps(result, indent=2) + "\n")


def measure(source: str, tokens: int, block_size: int, repeats: int, disk: bool) -> Row:
    with model_folder() as folder:
        config = parse_config(MODEL)
        factory = RequestFactory(config, None, config.max_position, 0)
        bench = Bench(factory, tokens, block_size, source == "host", folder / "disk" if disk else None)
        rng = random.Random(0)
        prefix, other = ([rng.randrange(config.vocab_size) for _ in range(tokens)] for _ in range(2))

        def prompt(prefix: list[int]) -> list[int]:
            return prefix + [rng.randrange(config.vocab_size) for _ in range(TAIL)]

        bench.run_request(prompt(prefix))
        bench.flush()
        found = []
        gc.collect()
        for _ in range(repeats):
            if source == "host":
                bench.evict_prefix(prompt(other))
            request, first, end = bench.run_request(prompt(prefix))
            bench.flush()
            assert request.sources is not None
            assert getattr(request.sources, source) == tokens // block_size * block_size, request.sources
            found.append((first, end, bench.cpu))
        bench.scheduler.check()
        bench.engine.close()
        llm = wire = None
        if source == "device" and not disk:
            llm = call_seconds(folder, tokens, block_size, lambda: prompt(prefix), repeats)
            wire = wire_seconds(factory.make(None, prefix, SamplingParams())[0], repeats)
    return Row(source, tokens, block_size, 1e3 * min(each[0] for each in found), 1e3 * min(each[1] for each in found),
               {part: 1e3 * min(each[2][part] for each in found) for part in PARTS},
               llm and 1e3 * llm, wire and 1e3 * wire)


@contextmanager
def model_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        yield Path(folder)


def call_seconds(folder: Path, tokens: int, block_size: int, prompt: Callable[[], list[int]], repeats: int) -> float:
    params, times = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), []
    with LLM(folder, load_format="null", skip_tokenizer_init=True, block_size=block_size, max_model_len=tokens + 64,
             progress=lambda done, total, stage: None) as llm:
        for _ in range(repeats + 1):
            ids = prompt()
            start = time.perf_counter()
            llm.generate([ids], params, use_tqdm=False)
            times.append(time.perf_counter() - start)
    return min(times[1:])


def wire_seconds(request: Request, repeats: int) -> float:
    """Return the time to encode a request for the engine's process, and to decode it there."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        message = decode_to_engine(encode_add({1: request}))
        for wire in message.requests:  # type: ignore[union-attr]
            WireSequence(wire, None)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
