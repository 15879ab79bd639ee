"""One server behind the router: whether it is usable, the requests sent to it, and its measured speed.

No I/O and no clock: methods get the time as an argument, so that a simulator can use simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spillover.cluster.predict import USUAL_TOKEN_SECONDS, Load, Prediction, Rates
from spillover.memory.spill.restore_plan import LEARN_TOKENS, ComputeCost

FAILURES = 5  # within FAILURE_SECONDS, after which the breaker opens
FAILURE_SECONDS = 60.0
OPEN_SECONDS = 30.0  # seconds until one request is let through again
SUCCESSES = 2  # number of such requests that must succeed to close it
SMOOTHING = 0.1  # weight of the latest value in means
USUAL_OUTPUT_TOKENS = 128.0


class Breaker:
    """Keeps requests away from a replica that answers health checks but fails requests."""

    def __init__(self) -> None:
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._opened: float | None = None
        self._successes = 0
        self._trying = False

    def allows(self, now: float) -> bool:
        return self._opened is None or (now - self._opened >= OPEN_SECONDS and not self._trying)

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def sent(self) -> None:
        """Record that a request was sent; while half open, only one at a time is let through."""
        self._trying = self._opened is not None

    def succeeded(self) -> None:
        self._trying = False
        if self._opened is None:
            return
        self._successes += 1
        if self._successes >= SUCCESSES:
            self.reset()

    def failed(self, now: float) -> None:
        self._trying, self._successes = False, 0
        self._failures.append(now)
        recent = len(self._failures) == FAILURES and now - self._failures[0] <= FAILURE_SECONDS
        if self._opened is not None or recent:
            self._opened = now

    def cancelled(self) -> None:
        """Record that a request finished without a result, as its client disconnected."""
        self._trying = False

    def reset(self) -> None:
        self._failures.clear()
        self._opened, self._successes, self._trying = None, 0, False


@dataclass(eq=False)
class Flight:
    """A request that was sent to a replica and has not finished."""

    replica: int
    tokens: int
    prediction: Prediction
    sent: float
    alone: bool  # no other prompt waited there
    keys: Sequence[int] = ()  # keys of the prompt's blocks
    first: int = 0  # index of the first block that the replica computes
    block_size: int = 16
    remote_prefill: bool = False  # its blocks are loaded from a store to which another replica has just written them
    first_token: float | None = None


@dataclass(frozen=True)
class ReplicaReport:
    """The state that a server reports; values that it does not report are learned, or keep these defaults."""

    token_seconds: float | None = None
    block_seconds: Mapping[str, float] = field(default_factory=dict)
    max_num_seqs: int | None = None
    device_blocks: int | None = None
    device_blocks_used: int | None = None
    waiting_tokens: int = 0  # prompt tokens waiting, of all its clients
    running: int = 0
    # Stores that computed blocks go to at once, nearest first, with seconds per block; equal names are shared stores.
    stores: Mapping[str, float] = field(default_factory=dict)


class Replica:
    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.ready = False  # it answers health checks and accepts requests
        self.draining = False  # it gets no new requests
        self.prefill_role = False  # it computes prompts for others, and decodes only if they are far behind
        self.why = "its health has not been checked yet"  # why it is not ready
        self.models: frozenset[str] = frozenset()  # model names that it serves; empty if unknown
        self.breaker = Breaker()
        self.report = ReplicaReport()
        self.flights: dict[Flight, None] = {}  # in the order in which they were sent
        self.sent_tokens = 0.0  # prompt tokens that it had to compute
        self.output_tokens = USUAL_OUTPUT_TOKENS  # mean number of tokens per answer
        self._waiting: dict[Flight, None] = {}  # flights without a first token
        self._waiting_seconds = 0.0  # sum of their predicted work
        self._waiting_tokens = 0
        self._foreign_tokens = 0  # waiting prompt tokens of other clients
        self._foreign_running = 0
        self._progress = 0.0  # time when the first waiting flight began
        self._cost = ComputeCost(None)
        self._sequence_seconds = 0.0
        self._least_seconds = 0.0  # to a first token if almost nothing had to be computed

    def usable(self, now: float) -> bool:
        return self.ready and not self.draining and self.breaker.allows(now)

    def update(self, report: ReplicaReport) -> None:
        """Apply the server's report. Requests in it beyond this router's belong to other clients."""
        self.report = report
        self._foreign_tokens = max(0, report.waiting_tokens - self._waiting_tokens)
        self._foreign_running = max(0, report.running - len(self.flights))

    @property
    def rates(self) -> Rates | None:
        """Return its speed as reported or measured; None if unknown."""
        token = self.report.token_seconds or self._cost.token_seconds
        return None if token is None else Rates(token, self.report.block_seconds, self._least_seconds)

    @property
    def token_seconds(self) -> float:
        return self.report.token_seconds or self._cost.token_seconds or USUAL_TOKEN_SECONDS

    def load(self, now: float, held_blocks: int = 0) -> Load:
        """Return its current load. `held_blocks` is the number of blocks on its device according to the index."""
        report = self.report
        running = len(self.flights) - len(self._waiting) + self._foreign_running
        use = 0.0
        if report.device_blocks:
            use = max(report.device_blocks_used or 0, held_blocks) / report.device_blocks
        return Load(backlog_seconds=self.backlog(now), running=running, open=running + len(self._waiting),
                    max_num_seqs=report.max_num_seqs or 1 << 30, sequence_seconds=self._sequence_seconds,
                    device_use=use)

    def backlog(self, now: float) -> float:
        """Return the work in seconds of the prompts waiting there, less the time already spent on the first."""
        seconds = self._foreign_tokens * self.token_seconds
        if self._waiting:
            head = next(iter(self._waiting)).prediction.work
            seconds += max(self._waiting_seconds - min(now - self._progress, head), 0.0)
        return seconds

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # The life of a request

    def send(self, flight: Flight) -> None:
        if not self._waiting:
            self._progress = flight.sent
        self.flights[flight] = self._waiting[flight] = None
        self._waiting_seconds += flight.prediction.work
        self._waiting_tokens += flight.tokens
        self.sent_tokens += flight.tokens - flight.prediction.cached_tokens
        self.breaker.sent()

    def begin(self, flight: Flight, now: float) -> None:
        """Record the first token. Nothing is learned from a prompt whose blocks were loaded: the time of loading is
        neither part of the time of computing, nor of the least time of any request."""
        flight.first_token = now
        self._leave_queue(flight, now)
        new = flight.tokens - flight.prediction.cached_tokens
        if flight.remote_prefill or not flight.alone:
            return
        if new >= LEARN_TOKENS:
            self._cost.observe(new, new, now - flight.sent)
        elif not flight.prediction.restore:
            least = max(now - flight.sent - new * self.token_seconds, 0.0)
            self._least_seconds += (SMOOTHING if self._least_seconds else 1.0) * (least - self._least_seconds)

    def end(self, flight: Flight, now: float, output_tokens: int | None = None) -> None:
        """Record that a request finished, whatever its outcome."""
        self._leave_queue(flight, now)
        del self.flights[flight]
        if flight.first_token is not None and output_tokens:
            taken = now - flight.sent
            self._sequence_seconds += (SMOOTHING if self._sequence_seconds else 1.0) * (taken - self._sequence_seconds)
            self.output_tokens += SMOOTHING * (output_tokens - self.output_tokens)

    def _leave_queue(self, flight: Flight, now: float) -> None:
        if flight in self._waiting:
            del self._waiting[flight]
            self._progress = now
            self._waiting_tokens -= flight.tokens
            self._waiting_seconds = max(self._waiting_seconds - flight.prediction.work, 0.0) if self._waiting else 0.0
