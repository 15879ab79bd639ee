"""One server behind the router: whether it may be asked, what was sent there, and how fast it has shown to be.

No I/O; every method that depends on time is given it, so that a simulator can use its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spillover.cluster.predict import USUAL_TOKEN_SECONDS, Load, Prediction, Rates
from spillover.memory.spill.restore_plan import LEARN_TOKENS, ComputeCost

FAILURES = 5  # within FAILURE_SECONDS, then the breaker opens
FAILURE_SECONDS = 60.0
OPEN_SECONDS = 30.0  # until one request is let through again
SUCCESSES = 2  # of such, then it closes
SMOOTHING = 0.1  # weight of the latest in means
USUAL_OUTPUT_TOKENS = 128.0


class Breaker:
    """Keeps requests away from a replica that answers health checks and fails requests."""

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
        """Note a request; of those that follow each other while it is half open only one is let through."""
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
        """Note that a request ended and tells nothing: its client left."""
        self._trying = False

    def reset(self) -> None:
        self._failures.clear()
        self._opened, self._successes, self._trying = None, 0, False


@dataclass(eq=False)
class Flight:
    """A request that was sent to a replica and has not ended."""

    replica: int
    tokens: int
    prediction: Prediction
    sent: float
    alone: bool  # no other prompt waited there
    keys: Sequence[int] = ()  # of the prompt's blocks ...
    first: int = 0  # ... from this on it computes them
    block_size: int = 16
    apart: bool = False  # its blocks are brought from where another replica has just put them
    first_token: float | None = None


@dataclass(frozen=True)
class Told:
    """What a server says of itself; all that it does not say is learned, or left at these values."""

    token_seconds: float | None = None
    block_seconds: Mapping[str, float] = field(default_factory=dict)
    slots: int | None = None
    device_blocks: int | None = None
    device_blocks_used: int | None = None
    waiting_tokens: int = 0  # of prompts, of all its clients
    running: int = 0
    # That computed blocks go to at once, nearest first, and that replicas which name them share; seconds for a block.
    stores: Mapping[str, float] = field(default_factory=dict)


class Replica:
    def __init__(self, place: int, name: str) -> None:
        self.place = place
        self.name = name
        self.ready = False  # it answers, and takes requests
        self.draining = False  # it is to get no new ones
        self.for_prompts = False  # it computes prompts for others, and decodes only where they are far behind
        self.why = "it has not been asked yet"  # it is not ready
        self.models: frozenset[str] = frozenset()  # names that it serves; empty: not known
        self.breaker = Breaker()
        self.told = Told()
        self.flights: dict[Flight, None] = {}  # in order of sending
        self.sent_tokens = 0.0  # of prompts, that it had to compute
        self.output_tokens = USUAL_OUTPUT_TOKENS  # of an answer, on average
        self._waiting: dict[Flight, None] = {}  # flights without a first token
        self._waiting_seconds = 0.0  # their work
        self._waiting_tokens = 0
        self._foreign_tokens = 0  # prompt tokens that others have waiting there
        self._foreign_running = 0
        self._progress = 0.0  # when the head of the queue began
        self._cost = ComputeCost(None)
        self._sequence_seconds = 0.0
        self._least_seconds = 0.0  # to a first token, where next to nothing had to be computed

    def usable(self, now: float) -> bool:
        return self.ready and not self.draining and self.breaker.allows(now)

    def tell(self, told: Told) -> None:
        """Take in what the server says. What it has beyond this router's requests is others'."""
        self.told = told
        self._foreign_tokens = max(0, told.waiting_tokens - self._waiting_tokens)
        self._foreign_running = max(0, told.running - len(self.flights))

    @property
    def rates(self) -> Rates | None:
        """Return how fast it is, as it says or has shown; None: nobody knows."""
        token = self.told.token_seconds or self._cost.token_seconds
        return None if token is None else Rates(token, self.told.block_seconds, self._least_seconds)

    @property
    def token_seconds(self) -> float:
        return self.told.token_seconds or self._cost.token_seconds or USUAL_TOKEN_SECONDS

    def load(self, now: float, held_blocks: int = 0) -> Load:
        """Return what it has to do. `held_blocks`: on its device, as the index knows."""
        told = self.told
        running = len(self.flights) - len(self._waiting) + self._foreign_running
        use = 0.0
        if told.device_blocks:
            use = max(told.device_blocks_used or 0, held_blocks) / told.device_blocks
        return Load(backlog_seconds=self.backlog(now), running=running, open=running + len(self._waiting),
                    slots=told.slots or 1 << 30, sequence_seconds=self._sequence_seconds, device_use=use)

    def backlog(self, now: float) -> float:
        """Return the seconds that the prompts take that wait there, less what the first has had."""
        seconds = self._foreign_tokens * self.token_seconds
        if self._waiting:
            head = next(iter(self._waiting)).prediction.work
            seconds += max(self._waiting_seconds - min(now - self._progress, head), 0.0)
        return seconds

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # What becomes of requests

    def send(self, flight: Flight) -> None:
        if not self._waiting:
            self._progress = flight.sent
        self.flights[flight] = self._waiting[flight] = None
        self._waiting_seconds += flight.prediction.work
        self._waiting_tokens += flight.tokens
        self.sent_tokens += flight.tokens - flight.prediction.cached_tokens
        self.breaker.sent()

    def begin(self, flight: Flight, now: float) -> None:
        """Note the first token. Of a prompt whose blocks were brought nothing is learned: how long that took is no part
        of what computing takes, nor of the least that any request does."""
        flight.first_token = now
        self._leave_queue(flight, now)
        new = flight.tokens - flight.prediction.cached_tokens
        if flight.apart or not flight.alone:
            return
        if new >= LEARN_TOKENS:
            self._cost.observe(new, new, now - flight.sent)
        elif not flight.prediction.restore:
            least = max(now - flight.sent - new * self.token_seconds, 0.0)
            self._least_seconds += (SMOOTHING if self._least_seconds else 1.0) * (least - self._least_seconds)

    def end(self, flight: Flight, now: float, output_tokens: int | None = None) -> None:
        """Note that a request is over, however it ended."""
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
