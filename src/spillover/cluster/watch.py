"""Watches replicas: their health, models, speed and waiting work; subscribes to their KV events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import msgspec

from spillover.cluster.fleet import Fleet
from spillover.cluster.keys import TEXT, TokenSpace
from spillover.cluster.mirror import Approximation, Mirror
from spillover.cluster.replica import Replica, ReplicaReport
from spillover.cluster.segments import SegmentEncoder
from spillover.cluster.subscriber import Subscriber, reachable
from spillover.cluster.upstream import Upstream
from spillover.errors import SpilloverError
from spillover.http_wire import NoAnswer
from spillover.memory.kv.digest import root_digest
from spillover.models.literal_text import LiteralText
from spillover.models.tokenizer import Tokenizer, load_tokenizer
from spillover.server.schemas.schemas_kv import KvInfo

log = logging.getLogger("spillover.router")

CHECK_SECONDS = 1.0  # between two checks of a replica that answers
RECHECK_SECONDS = 0.25  # between two checks of one that does not
MISSES = 3  # consecutive checks without an answer after which the replica is considered gone


@dataclass(frozen=True)
class WatchSettings:
    tokenizer: str | None = None  # folder or GGUF file, in place of the one that a server names
    health_seconds: float = 1.0  # timeout of a health check
    # Ports of KV events in vLLM's format, for servers without /kv/info: one for all, or one each; 0 for none.
    events_ports: tuple[int, ...] = ()
    replay_ports: tuple[int, ...] = ()
    block_size: int = 16  # block size of such servers

    def ports(self, index: int) -> tuple[int | None, int | None]:
        """Return the ports at which a server publishes and replays events; None for those it does not have."""
        events, replay = ((ports[index if len(ports) > 1 else 0] or None) if ports else None
                          for ports in (self.events_ports, self.replay_ports))
        return events, replay


class Watcher:
    """A task that keeps one replica's state in the fleet up to date."""

    def __init__(self, fleet: Fleet, replica: Replica, upstream: Upstream, spaces: Spaces,
                 settings: WatchSettings, changed: Callable[[], None]) -> None:
        """Create the watcher. `changed` is called whenever the replica has become ready or has gone."""
        self.upstream = upstream
        self.note: str | None = None  # how blocks are guessed and why; None if they are known by KV events
        self._fleet = fleet
        self._replica = replica
        self._spaces = spaces
        self._settings = settings
        self._changed = changed
        self._instance: str | None = None
        self._subscription: asyncio.Task[None] | None = None
        self._has_info = True  # False once the server turned out to have no /kv/info
        self._misses: deque[float] = deque(maxlen=MISSES)  # times of the last requests that got no answer
        self._suspended = False  # there is no server to check

    async def run(self) -> None:
        try:
            while True:
                await self.check()
                await asyncio.sleep(CHECK_SECONDS if self._replica.ready and not self._misses else RECHECK_SECONDS)
        finally:
            await self.close()

    async def close(self) -> None:
        task, self._subscription = self._subscription, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def set_upstream(self, upstream: Upstream) -> None:
        """Watch the same replica at another address, after it was started or restarted."""
        self.upstream.close()
        self.upstream = upstream
        self._has_info = True
        self._suspended = False

    def suspend(self, why: str) -> None:
        """Mark the replica as gone and do not check it until `set_upstream`."""
        self._suspended = True
        if self._replica.ready:
            log.info("%s was removed: %s", self._replica.name, why)
            self._replica.ready = False
        self.mark_gone(why)

    def mark_gone(self, why: str) -> None:
        """Mark the replica as gone until it passes a health check again; requests without an answer go elsewhere."""
        if self._replica.ready:
            log.warning("%s is unavailable: %s", self._replica.name, why)
        self._fleet.mark_gone(self._replica, why)
        self._instance = None
        self.upstream.abort_unanswered()
        self._changed()

    async def check(self) -> None:
        """Check the replica once. One that refuses connections is gone at once; a silent one after MISSES checks."""
        if self._suspended:
            await self.close()
            return
        upstream, sent_at = self.upstream, clock()
        try:
            answer, body = await upstream.fetch("GET", "/health", timeout=self._settings.health_seconds)
        except NoAnswer as error:
            self._missed(upstream, sent_at, error)
            return
        self._misses.clear()
        if answer.status != 200:
            if self._current(upstream):
                self.mark_gone(f"its /health answers {answer.status}: {body[:200].decode(errors='replace')}")
            return
        sent_at = clock()
        try:
            await self._learn(upstream)
            models = self._replica.models if self._replica.ready else await self._models(upstream)
            if self._current(upstream) and not self._replica.ready:
                self._replica.models = models
                self._replica.ready, self._replica.why = True, ""
                self._replica.breaker.reset()
                log.info("%s at %s is ready; its blocks are known from %s", self._replica.name, upstream.url,
                         self.note or "its events")
                self._changed()
        except NoAnswer as error:
            self._missed(upstream, sent_at, error)

    def _missed(self, upstream: Upstream, sent_at: float, error: NoAnswer) -> None:
        """Record that a request sent at the time `sent_at` got no answer."""
        self._misses.append(sent_at)
        if self._current(upstream) and ("cannot be reached" in str(error) or len(self._misses) == MISSES):
            self.mark_gone(str(error))
            upstream.abort_stalled(self._misses[0])

    def _current(self, upstream: Upstream) -> bool:
        """Return whether a result just received is from the server that is watched now."""
        return upstream is self.upstream and not self._suspended

    async def _models(self, upstream: Upstream) -> frozenset[str]:
        answer, body = await upstream.fetch("GET", "/v1/models", timeout=self._settings.health_seconds)
        try:
            listed = msgspec.json.decode(body)["data"] if answer.status == 200 else []
            return frozenset(str(card["id"]) for card in listed)
        except (msgspec.DecodeError, KeyError, TypeError):
            return frozenset()

    async def _learn(self, upstream: Upstream) -> None:
        info = None
        if self._has_info:
            answer, body = await upstream.fetch("GET", "/kv/info", timeout=self._settings.health_seconds)
            with contextlib.suppress(ValueError):
                info = KvInfo.model_validate_json(body) if answer.status == 200 else None
            self._has_info = info is not None or answer.status in (401, 503)
        if not self._current(upstream):
            return
        if info is None:
            if self._instance is None:
                self._instance = "unknown"
                await self._follow_foreign(upstream)
            return
        self._replica.update(replica_report(info, upstream.url))
        if info.instance != self._instance:
            self._instance = info.instance
            await self._follow(upstream, info)

    async def _follow_foreign(self, upstream: Upstream) -> None:
        """Follow a server without /kv/info: by vLLM's events if their port was given, otherwise by guesses."""
        await self.close()
        fleet, replica, settings = self._fleet, self._replica, self._settings
        if settings.tokenizer is None:
            self.note = "the requests sent to it, as text (it has no /kv/info, and no --tokenizer was given)"
            fleet.follow(replica, TEXT, Approximation(fleet.prefix_index, replica.index))
            return
        name, space = await asyncio.to_thread(self._spaces.foreign)
        ports = settings.ports(replica.index)
        if ports[0] is None:
            self.note = "the requests sent to it (it has no /kv/info, and no --kv-events-port was given)"
            fleet.follow(replica, name, Approximation(fleet.prefix_index, replica.index))
            return
        self.note = None
        mirror = Mirror(fleet.prefix_index, replica.index, root=root_digest(space.identity, None))
        fleet.follow(replica, name, mirror)
        events, replay = (None if port is None else reachable(f"tcp://*:{port}", upstream.url) for port in ports)
        assert events is not None
        self._subscription = asyncio.create_task(self._subscribe(Subscriber(mirror, events, replay)))

    async def _follow(self, upstream: Upstream, info: KvInfo) -> None:
        """Follow an engine that was just started or discovered."""
        await self.close()
        fleet, replica = self._fleet, self._replica
        try:
            space = await asyncio.to_thread(self._spaces.find, info)
        except SpilloverError as error:
            self.note = f"the requests sent to it, as text ({error})"
            log.warning("%s: its tokenisation is unknown, so prefixes are compared as text: %s", replica.name, error)
            fleet.follow(replica, TEXT, Approximation(fleet.prefix_index, replica.index))
            return
        if info.events is None or not info.prefix_caching:
            self.note = "the requests sent to it (it publishes no KV events)"
            fleet.follow(replica, space, Approximation(fleet.prefix_index, replica.index, info.device_blocks))
            return
        self.note = None
        group = next((index for index, window in enumerate(info.windows) if window is None), 0)
        mirror = Mirror(fleet.prefix_index, replica.index, group if len(info.windows) > 1 else None)
        fleet.follow(replica, space, mirror)
        replay = info.events.replay_endpoint
        subscriber = Subscriber(mirror, reachable(info.events.endpoint, upstream.url),
                                None if replay is None else reachable(replay, upstream.url), info.events.topic)
        self._subscription = asyncio.create_task(self._subscribe(subscriber))

    async def _subscribe(self, subscriber: Subscriber) -> None:
        try:
            await subscriber.run()
        except Exception:
            log.exception("KV events of %s are no longer followed", self._replica.name)
            self._fleet.follow(self._replica, self._fleet.spaces[self._replica.index],
                               Approximation(self._fleet.prefix_index, self._replica.index))
            self.note = "the requests sent to it (its KV events could not be followed)"


def replica_report(info: KvInfo, url: str) -> ReplicaReport:
    """Return the state that the server at this address reports."""
    return ReplicaReport(
        info.prefill_token_seconds,
        {tier.medium: tier.block_seconds for tier in info.tiers if tier.block_seconds is not None},
        info.max_num_seqs, info.device_blocks, info.device_blocks_used, info.waiting_prompt_tokens,
        info.num_running, {store_name(each.name, url): each.block_seconds or 0.0 for each in info.stores})


def store_name(name: str, url: str) -> str:
    """Return a store's name, with the machine added if the name is only valid on that machine."""
    host = urlsplit(name).hostname
    local = host is None or host == "localhost" or host == "::1" or host.startswith("127.")
    return f"{name} of {urlsplit(url).hostname}" if local else name


class Spaces:
    """The key spaces that replicas use, and the tokenizers for their keys."""

    def __init__(self, settings: WatchSettings) -> None:
        self.known: dict[str, TokenSpace | None] = {TEXT: None}
        self._settings = settings
        self._tokenizers: dict[tuple[str, str | None], Tokenizer] = {}

    def used(self, fleet: Fleet) -> Mapping[str, TokenSpace | None]:
        """Return the spaces of ready replicas, for which a request needs keys."""
        names = {fleet.spaces[replica.index] for replica in fleet.replicas if replica.ready}
        return {name: self.known[name] for name in names if name in self.known}

    def foreign(self) -> tuple[str, TokenSpace]:
        """Return the space of servers that name blocks by their own hashes. Reads files."""
        name, path = "tokens", self._settings.tokenizer
        space = self.known.get(name)
        if space is None:
            assert path is not None
            tokenizer = load_tokenizer(path)
            space = self.known[name] = TokenSpace(b"", self._settings.block_size, tokenizer,
                                                  segments=SegmentEncoder(tokenizer))
        return name, space

    def find(self, info: KvInfo) -> str:
        """Return the name of a server's space; SpilloverError if its tokens cannot be made here. Reads files."""
        name = f"{info.model_identity}:{info.block_size}:{info.tokenizer_digest}:{info.special_tokens_in_user_text}"
        if name in self.known:
            return name
        path = self._settings.tokenizer or info.tokenizer
        if path is None:  # its prompts are token ids
            self.known[name] = TokenSpace(bytes.fromhex(info.model_identity), info.block_size, None)
            return name
        if not Path(path).expanduser().exists():
            raise SpilloverError(f"{path} is not on this machine; give the router the model's tokenizer with "
                                 "--tokenizer")
        given = (path, info.chat_template)
        if given not in self._tokenizers:
            self._tokenizers[given] = load_tokenizer(path, info.chat_template)
        tokenizer = self._tokenizers[given]
        if tokenizer.fingerprint != info.tokenizer_digest:
            raise SpilloverError(f"the tokenizer or chat template of {path} is not the server's; give its own with "
                                 "--tokenizer")
        self.known[name] = TokenSpace(bytes.fromhex(info.model_identity), info.block_size, tokenizer,
                                      None if info.special_tokens_in_user_text else LiteralText(tokenizer),
                                      SegmentEncoder(tokenizer))
        return name


def clock() -> float:
    """Return the time to pass to the router's fleet."""
    return monotonic()
