"""The contract between the scheduler and whatever keeps KV outside the device: lookup, begin, progress, end, poll.

A request that waits is looked up, until `forget`; one that runs may be loaded, from `begin` until `end`. Everything is
called on the engine's thread and returns at once. Nothing that fails below the device fails a request: what is not
loaded is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spillover.memory.kv.events import BlockEvents
from spillover.memory.spill.report import TierReport
from spillover.memory.tiers.base import Tier


@dataclass(frozen=True)
class Progress:
    """How far the loads of one sequence have come."""

    num_computed: int  # tokens, those counted that were loaded right behind what is computed
    sources: Mapping[str, int] = field(default_factory=dict)  # tokens taken over by this call, by tier
    loading: bool = False  # whether loads are still under way
    ended: bool = True  # whether no token from here on will be loaded


class KVConnector(Protocol):
    """What the scheduler asks of the tiers. `seq` names a request; one that runs holds blocks of the KV cache."""

    # A request that waits

    def lookup(self, seq: str, tokens: Sequence[int], salt: str | None, coming: bool = False) -> bool:
        """Ask the tiers what they hold of the prompt, once; returns whether all have answered or had time to.
        `coming`: another engine is storing its blocks, so those that are missing are asked for again, for as long as
        computing them would take."""

    def forget(self, seq: str) -> None:
        """End the lookup: the request was admitted, or no longer waits."""

    # A request that runs

    def begin(self, seq: str, tokens: Sequence[int], salt: str | None) -> int | None:
        """Start loading the blocks that follow those a newly admitted sequence found on the device, where it is worth
        it. Returns up to which token it is to be computed meanwhile: all of them if nothing is loaded, and None, having
        changed nothing, if there is no room yet."""

    def progress(self, seq: str, num_computed: int) -> Progress | None:
        """Take over what has been loaded; None: the loads cannot end, and the sequence has to start over."""

    def limit(self, seq: str, num_computed: int, num_tokens: int) -> int:
        """Return up to which token the sequence is to be computed: what follows is loaded, or may be soon."""

    def offload(self, seq: str, num_blocks: int) -> bool:
        """Start moving the sequence's oldest blocks to host memory, because the device has no room for more.

        For a sequence that is alone and has no step in flight. True while blocks are on their way, so that room is to
        come; False if none can be moved. The prefix tree is emptied: all that is left in it belongs to this sequence.
        """

    def host_blocks(self, seq: str) -> tuple[int, ...]:
        """Return the addresses in host memory of the sequence's leading blocks, whose table entries are 0."""

    def end(self, seq: str) -> None:
        """Drop the sequence's loads and offloaded blocks; called just before the cache releases its blocks."""

    # Between steps

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step how long computing takes."""

    def reserve(self, num_blocks: int) -> None:
        """Keep n blocks free for requests that decode: other requests and copies leave them alone."""

    def poll_loads(self) -> None:
        """Take in what requests wait for: a small part of poll()."""

    def poll(self, hurried: bool = False) -> None:
        """Take in copies that have ended, and start new ones. `hurried`: all but loads may wait for another step."""

    def wait(self, seconds: float) -> None:
        """Sleep until a copy may have ended."""

    @property
    def busy(self) -> bool:
        """Return whether copies are under way that poll() would take further."""

    @property
    def hands_on(self) -> bool:
        """Return whether blocks are to leave at once that have not left yet, as other engines may wait for them."""

    # All that is stored

    @property
    def tiers(self) -> Sequence[Tier]:
        """Return the tiers below host memory, which may change without the engine's doing."""

    def tell(self, events: BlockEvents) -> None:
        """Tell of every block that the tiers hold now, and from now on of each that comes or goes."""

    def reports(self) -> list[TierReport]: ...

    def clear(self, external: bool = False) -> None:
        """Forget what host memory holds; `external`: also what lies on disk and in a remote store."""

    def close(self, deadline: float) -> None:
        """End all copies. What only the device or host memory has is first written to the tiers that last, in time."""

    def check(self) -> None:
        """Assert what must hold between any two steps."""


class NullConnector:
    """The connector where nothing lies below the device: finds nothing, loads nothing, keeps nothing."""

    busy = False
    hands_on = False
    tiers = ()

    def lookup(self, seq: str, tokens: Sequence[int], salt: str | None, coming: bool = False) -> bool:
        return True

    def begin(self, seq: str, tokens: Sequence[int], salt: str | None) -> int | None:
        return len(tokens)

    def progress(self, seq: str, num_computed: int) -> Progress | None:
        return Progress(num_computed)

    def limit(self, seq: str, num_computed: int, num_tokens: int) -> int:
        return num_tokens

    def offload(self, seq: str, num_blocks: int) -> bool:
        return False

    def host_blocks(self, seq: str) -> tuple[int, ...]:
        return ()

    def tell(self, events: BlockEvents) -> None:
        """Tell nothing: there is nothing."""

    def reports(self) -> list[TierReport]:
        return []

    def forget(self, seq: str) -> None: ...

    def end(self, seq: str) -> None: ...

    def observe(self, prefill_tokens: int, num_tokens: int, seconds: float) -> None: ...

    def reserve(self, num_blocks: int) -> None: ...

    def poll_loads(self) -> None: ...

    def poll(self, hurried: bool = False) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def clear(self, external: bool = False) -> None: ...

    def close(self, deadline: float) -> None: ...

    def check(self) -> None: ...
