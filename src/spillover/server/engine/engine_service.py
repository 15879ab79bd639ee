"""The engine's side of the socket: builds the engine, receives messages between steps and sends their results.

It waits on the socket while there is no work, so an idle engine takes no CPU time.
"""

from __future__ import annotations

import gc
import os
import queue
import socket as sockets
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch
import zmq

from spillover.engine.assemble import Assembly, assemble
from spillover.engine.output.outputs import TokenSources
from spillover.engine.parallel.parallel_runner import ParallelRunner, ranks_report
from spillover.engine.profiling.profile_session import ProfileSession
from spillover.engine.requests.request import Request, Status
from spillover.engine.speculation.speculator import SpeculationStats
from spillover.engine.structured.structured import Grammar, GrammarCompiler, GrammarLimits, GrammarStats
from spillover.errors import RequestError, SpilloverError
from spillover.memory.spill.report import by_name
from spillover.models.tokenizer import Tokenizer
from spillover.plan.hardware import probe
from spillover.server.engine.heartbeat import CALL, IDLE, LOADING, STEP, Pulse
from spillover.server.engine.protocol import (
    Abort,
    Add,
    Call,
    Failed,
    FromEngine,
    Launch,
    LiveStats,
    Method,
    Planned,
    Progress,
    Ready,
    Reply,
    Step,
    Stop,
    TierUse,
    ToEngine,
    Update,
)
from spillover.server.engine.wire import Sequence, added, decode_to_engine, encode
from spillover.units import format_bytes

STATS_SECONDS = 0.25  # maximum age of the front's view of the engine's state while it works
COPYING_MS = 1  # timeout of waiting for a message while KV is being copied from another tier
IDLE_TIERS_MS = 5000  # between two checks of unused tiers, whose disk or server may fail or recover
STALLED_MS = 5  # timeout of waiting for a message while there is work but none of it can proceed
PROGRESS_SECONDS = 0.1


def serve(socket: zmq.Socket[bytes], line: bytes, pulse: Pulse) -> int:
    """Build the engine of the launch line, run it until it is stopped, and return the exit code."""

    def send(message: FromEngine) -> None:
        socket.send(encode(message))

    try:
        launch = msgspec.json.decode(line, type=Launch)
        pulse.at(LOADING)
        started = time.monotonic()
        parts = assemble(launch.config, lambda plan: send(Planned(plan)), _throttled(send))
        gc.collect()
        gc.freeze()  # all loaded objects stay; the collector need not scan them again
        send(Ready(os.getpid(), parts.config, str(parts.path), parts.model_config, parts.plan,
                   time.monotonic() - started, parts.engine.scheduler.kv.identity))
        service = EngineService(socket, parts, pulse)
        try:
            service.run()
        finally:
            service.close()
        return 0
    except SpilloverError as error:
        send(Failed(str(error), True))
        return 2
    except (MemoryError, torch.OutOfMemoryError) as error:
        send(Failed(f"memory ran out ({error}); lower --gpu-memory or --max-num-batched-tokens", True))
        return 2
    except Exception:
        send(Failed(traceback.format_exc(), False))
        return 1


class EngineService:
    def __init__(self, socket: zmq.Socket[bytes], parts: Assembly, pulse: Pulse) -> None:
        self._socket = socket
        self._pulse = pulse
        self._parts = parts
        self._engine = parts.engine
        self._scheduler = parts.engine.scheduler
        self._grammars = GrammarWorker(parts.tokenizer, GrammarLimits.of(parts.config))
        self._profile = ProfileSession(parts.plan.device)
        self._sequences: dict[int, Sequence] = {}  # sequences that the front still wants updates of
        self._compiling: set[int] = set()  # ids of sequences not yet scheduled, as their grammar is being compiled
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._grammars.fileno(), zmq.POLLIN)
        runner = parts.engine.runner
        self._ranks = runner if isinstance(runner, ParallelRunner) else None
        if self._ranks is not None and self._ranks.lost_descriptor is not None:  # wakes an idle engine too
            self._poller.register(self._ranks.lost_descriptor, zmq.POLLIN)
        self._stopped = False
        self._sleeping = False
        self._stalled = False
        self._last_sent = 0.0  # time when the engine's state was last sent to the front
        self._stats_current = False  # whether that state is still current
        self._weight_bytes = parts.engine.runner.weight_bytes
        self._sources = TokenSources()
        self._output_tokens = 0

    def run(self) -> None:
        while True:
            self._receive()
            if self._stopped:
                return
            if self._engine.has_work and not self._sleeping:
                self._step()

    def close(self) -> None:
        self._profile.close()
        self._grammars.close()
        self._engine.close()

    def _step(self) -> None:
        steps = self._engine.num_steps
        self._pulse.at(STEP, steps)
        changed = self._engine.step()
        self._profile.stepped(self._engine.num_steps - steps)
        self._stalled = not changed and self._engine.num_steps == steps
        self._send_updates([update for request in changed if (update := self._update(request))])

    # Messages in

    def _receive(self) -> None:
        """Receive all pending messages; wait for one if there is nothing else to do."""
        if self._sleeping or not self._engine.has_work:
            if not self._stats_current:
                self._send_updates([], now=True)
            self._pulse.at(IDLE)
            self._poller.poll(IDLE_TIERS_MS if self._scheduler.connector.tiers else None)
            self._stats_current = False
            if self._ranks is not None:
                self._ranks.check()
        elif self._stalled:
            self._poller.poll(COPYING_MS if self._scheduler.connector.busy else STALLED_MS)
        while not self._stopped:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(decode_to_engine(message))
        for sequences, error in self._grammars.finished():
            self._compiled(sequences, error)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                for id in message.ids:
                    self._abort(id, message.reason)
            case Call():
                self._call(message)
            case Stop():
                self._stopped = True

    def _add(self, message: Add) -> None:
        parent = None
        sequences = []
        for wire in message.requests:
            sequence = Sequence(wire, parent)
            parent = parent or sequence.request
            self._sequences[sequence.id] = sequence
            sequences.append(sequence)
        if message.requests[0].params.structured_outputs is not None:
            self._compiling.update(sequence.id for sequence in sequences)
            self._grammars.submit(sequences)
        else:
            for sequence in sequences:
                self._scheduler.add(sequence.request)

    def _compiled(self, sequences: list[Sequence], error: str | None) -> None:
        wanted = [sequence for sequence in sequences if sequence.id in self._compiling]
        self._compiling.difference_update(sequence.id for sequence in wanted)
        if error is None:
            for sequence in wanted:
                self._scheduler.add(sequence.request)
            return
        for sequence in wanted:
            del self._sequences[sequence.id]
        self._send_updates([Update(sequence.id, [], finish_reason="error", error=error) for sequence in wanted])

    def _abort(self, id: int, reason: str) -> None:
        sequence = self._sequences.pop(id, None)
        if sequence is None:  # it has finished already
            return
        if id in self._compiling:
            self._compiling.discard(id)
            sequence.request.status = Status.FINISHED  # so that its siblings do not wait for it
        else:
            self._scheduler.stop(sequence.request, reason)

    # Calls

    def _call(self, message: Call) -> None:
        self._pulse.at(CALL)
        try:
            reply = Reply(message.id, self._answer(message.method, message.argument))
        except (SpilloverError, MemoryError, RuntimeError) as error:  # RuntimeError: torch, when memory ran out
            reply = Reply(message.id, error=f"{message.method} failed: {error}")
        self._send(reply)

    def _answer(self, method: Method, argument: str) -> LiveStats | dict[str, object]:
        match method:
            case "start_profile":
                self._profile.start(argument)
            case "stop_profile":
                return self._profile.stop()
            case "reset_prefix_cache":
                self._scheduler.reset_prefix_cache()
            case "sleep":
                self._sleep()
            case "wake_up":
                self._wake_up()
        return self._stats()

    def _sleep(self) -> None:
        if self._sleeping:
            return
        self._check_host_memory()
        self._sleeping = True  # no step is launched from here on, even if moving the weights fails half way
        self._send_updates([update for request in self._engine.drain() if (update := self._update(request))])
        self._engine.sleep()

    def _wake_up(self) -> None:
        if self._sleeping:
            self._engine.wake_up()
            self._sleeping = False

    def _check_host_memory(self) -> None:
        kept = len(self._scheduler.kv.used_blocks()) * self._parts.plan.block_bytes
        needed = self._weight_bytes + kept
        if self._parts.plan.device != "cpu" and needed > (available := probe().memory_available):
            raise SpilloverError(f"cannot sleep: weights and KV would take {format_bytes(needed)} of host memory, and "
                                 f"{format_bytes(available)} are free; free some, or stop the server instead")

    # Messages out

    def _update(self, request: Request) -> Update | None:
        """Return a request's update; None for one that was aborted while the step ran."""
        sequence = self._sequences.get(int(request.request_id))
        if sequence is None:
            return None
        update = sequence.update()
        self._output_tokens += len(update.token_ids)
        if update.sources is not None and len(request.output_token_ids) == len(update.token_ids):  # the first update
            self._sources = added(self._sources, update.sources)
        if request.finish_reason is not None:
            del self._sequences[sequence.id]
        return update

    def _send_updates(self, updates: list[Update], now: bool = False) -> None:
        """Send the updates; also the engine's state if it is due, or at once with `now`."""
        time_now = time.monotonic()
        due = now or time_now - self._last_sent >= STATS_SECONDS
        if due:
            self._last_sent = time_now
        self._stats_current = due
        if updates or due:
            self._send(Step(updates, self._stats() if due else None))

    def _stats(self) -> LiveStats:
        engine, plan = self._engine, self._parts.plan
        cache = self._scheduler.kv.stats
        away = self._sleeping and plan.device != "cpu"  # on the CPU sleeping weights stay where they are
        weights = self._weight_bytes
        reports = by_name(self._scheduler.connector.reports())
        tiers = [TierUse(
            name="device",
            weight_bytes=0 if away else weights,
            kv_bytes=cache.total * plan.block_bytes,
            kv_used_bytes=(cache.protected + cache.in_flight) * plan.block_bytes,
            kv_cached_bytes=cache.evictable * plan.block_bytes,
        )]
        tiers += [TierUse(
            name=report.name,
            weight_bytes=weights if away and report.name == "host" else 0,
            kv_bytes=(report.capacity_blocks or 0) * plan.slot_bytes,
            kv_used_bytes=0,
            kv_cached_bytes=report.blocks * plan.slot_bytes,
        ) for report in reports]
        if away and not any(tier.name == "host" for tier in tiers):
            tiers.append(TierUse("host", weights, 0, 0, 0))
        moved = engine.runner.weight_traffic()
        grammars = self._grammars.stats()
        speculation = self._scheduler.speculator.stats() or SpeculationStats()
        return LiveStats(
            grammars_compiled=grammars.compiled,
            grammars_reused=grammars.reused,
            grammars_refused=dict(grammars.refused),
            grammar_bytes=grammars.kept_bytes,
            weight_bytes_moved=moved.bytes_moved,
            weight_disk_bytes=moved.disk_bytes,
            expert_hits=moved.expert_hits,
            expert_misses=moved.expert_misses,
            expert_hosted=moved.expert_hosted,
            weight_bytes_back=moved.bytes_back,
            weight_faults=moved.faults,
            drafts=speculation.counts,
            simulated_drafts=speculation.simulated,
            draft_seconds=speculation.draft_seconds,
            draft_proposed=speculation.proposed,
            verify_seconds=speculation.verify_seconds,
            branches=speculation.branches,
            branches_accepted=speculation.branches_accepted,
            time=time.monotonic(),
            sleeping=self._sleeping,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._compiling),
            blocks_total=cache.total,
            blocks_free=cache.free,
            blocks_evictable=cache.evictable,
            blocks_protected=cache.protected,
            blocks_in_flight=cache.in_flight,
            block_size=plan.block_size,
            steps=engine.num_steps,
            preemptions=self._scheduler.num_preemptions,
            prefix_queries=cache.query_tokens,
            prefix_hits=cache.hit_tokens,
            evictions=cache.evictions,
            prompt_tokens=self._sources.total,
            output_tokens=self._output_tokens,
            sources=self._sources,
            slots_held=engine.slots_held,
            slots_wasted=engine.slots_wasted,
            tiers=tuple(tiers),
            kv_tiers=reports,
            link=engine.runner.transfers.queue.report(),
            host_pool=engine.runner.transfers.pool.bytes_by_use,
            ranks=ranks_report(engine.runner),
            prefill_token_seconds=engine.prefill_cost.token_seconds or 0.0,
        )

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


class GrammarWorker:
    """A thread that compiles grammars, each of which may take seconds; `fileno` is readable when some are finished."""

    def __init__(self, tokenizer: Tokenizer | None, limits: GrammarLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._compiler: GrammarCompiler | None = None
        self._pool = ThreadPoolExecutor(1, "spillover-grammar-worker")  # reading the vocabulary is slow
        self._done: queue.SimpleQueue[tuple[list[Sequence], str | None]] = queue.SimpleQueue()
        self._wakeup_receiver, self._wakeup_sender = sockets.socketpair()

    def submit(self, sequences: list[Sequence]) -> None:
        """Submit the sequences of one request; each gets a copy of the grammar."""
        self._pool.submit(self._begin, sequences)

    def finished(self) -> list[tuple[list[Sequence], str | None]]:
        """Return the sequences whose grammar is compiled, or failed to compile with the error."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
            self._wakeup_receiver.recv(1)
        return found

    def stats(self) -> GrammarStats:
        return self._compiler.stats() if self._compiler is not None else GrammarStats()

    def fileno(self) -> int:
        return self._wakeup_receiver.fileno()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _begin(self, sequences: list[Sequence]) -> None:
        try:
            if self._tokenizer is None:
                raise RequestError("structured output needs a tokenizer; start without --skip-tokenizer-init")
            self._compiler = self._compiler or GrammarCompiler(self._tokenizer, self._limits)
            wanted = sequences[0].request.params.structured_outputs
            assert wanted is not None
            self._compiler.begin(wanted).add_done_callback(lambda future: self._end(sequences, future))
        except Exception as error:  # a grammar must never fail other requests
            self._finish(sequences, str(error))

    def _end(self, sequences: list[Sequence], future: Future[Grammar]) -> None:
        error = future.exception()
        if error is None:
            for sequence in sequences:
                sequence.request.grammar = future.result().copy()
        elif not isinstance(error, RequestError):
            error = RequestError(f"structured output could not be prepared: {error}")
        self._finish(sequences, None if error is None else str(error))

    def _finish(self, sequences: list[Sequence], error: str | None) -> None:
        self._done.put((sequences, error))
        self._wakeup_sender.send(b"!")


def _throttled(send: Callable[[FromEngine], None]) -> Callable[[int, int, str], None]:
    last, current = 0.0, ""

    def progress(done: int, total: int, stage: str) -> None:
        nonlocal last, current
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS or done == total or stage != current:
            last, current = now, stage
            send(Progress(stage, done, total))

    return progress
