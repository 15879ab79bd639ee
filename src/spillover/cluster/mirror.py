"""The router's view of a replica's blocks, from its KV events or guessed from the requests sent to it, and its state.

EXACT: every event since a snapshot has been applied. DEGRADED: some events are missing and have been requested; until
they arrive the last known view is used. FALLBACK: there are no events, and the index holds guesses. A view that is not
exact never has the state EXACT. No I/O: a subscriber passes events to a mirror and recovers as `apply_batch` demands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from spillover.cluster.index import PrefixIndex
from spillover.memory.kv.digest import block_digest, packed
from spillover.memory.kv.event_wire import (
    GPU,
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    block_hash,
    read_events,
)

MOST_GUESSED = 1 << 16  # number of blocks a replica is assumed to hold if it does not report its own
LEAST_GUESSED = 256
MOST_ORPHANS = 1 << 16  # maximum number of unknown parents whose child blocks are kept
FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")  # kinds of layers that need every block


class IndexState(StrEnum):
    EXACT = "exact"
    DEGRADED = "degraded"
    FALLBACK = "fallback"


class Mirror:
    """A view that applies a replica's events to the index, in order."""

    def __init__(self, index: PrefixIndex, replica: int, group: int | None = None, root: bytes | None = None) -> None:
        """Follow a replica. `group`: the layer group that stands for all, if there are several. `root`: the digest at
        which token chains begin, for servers that name blocks by their own hashes; None if the names are keys."""
        self.state = IndexState.DEGRADED
        self.sequence: int | None = None  # number of the last applied batch
        self.gaps = 0
        self._index = index
        self._replica = replica
        self._group = group
        self._resolver = None if root is None else _NameResolver(root)

    def apply_batch(self, sequence: int, payload: bytes) -> bool:
        """Apply the next batch. Return False if batches before it are missing: `restore` or `replay` is needed."""
        if self.sequence is None or sequence != self.sequence + 1:
            self.gaps += self.state is IndexState.EXACT
            self.state = IndexState.DEGRADED
            return False
        self._apply(payload)
        self.sequence = sequence
        return True

    def restore(self, sequence: int, payloads: Iterable[bytes]) -> None:
        """Replace the view by a snapshot, whose last batch is number `sequence`."""
        self._forget()
        for payload in payloads:
            self._apply(payload)
        self.sequence, self.state = sequence, IndexState.EXACT

    def replay(self, batches: Sequence[tuple[int, bytes]], whole: bool) -> bool:
        """Apply missed batches. `whole`: they begin with the process's first batch, so there is nothing before them.
        Return False if batches are still missing."""
        if whole:
            self._forget()
            self.sequence = batches[0][0] - 1 if batches else -1
        for sequence, payload in batches:
            if self.sequence is not None and sequence > self.sequence and not self.apply_batch(sequence, payload):
                return False
        if whole or (batches and self.sequence == batches[-1][0]):
            self.state = IndexState.EXACT
            return True
        return False

    def begin_partial(self, sequence: int) -> None:
        """Continue from this batch although earlier ones are lost: the view is correct, but incomplete."""
        self.sequence, self.state = sequence, IndexState.DEGRADED

    def reset(self) -> None:
        """Forget all blocks, as the process is gone."""
        self._forget()
        self.sequence, self.state = None, IndexState.DEGRADED

    def computed(self, keys: Sequence[int]) -> None:
        """Do nothing: the events report computed blocks."""

    def answered(self, found: bool) -> None:
        """Do nothing: the events report the blocks held."""

    def _forget(self) -> None:
        self._index.clear(self._replica)
        if self._resolver is not None:
            self._resolver.clear()

    def _apply(self, payload: bytes) -> None:
        for event in read_events(payload):
            if isinstance(event, AllBlocksCleared):
                self._forget()
                continue
            if self._resolver is not None and isinstance(event, BlockStored):
                self._choose_group(event)
            if self._group is None or event.group_idx in (None, self._group):
                self._apply_blocks(event)

    def _choose_group(self, event: BlockStored) -> None:
        """Choose a group with full attention to stand for all, for servers that do not announce their groups: blocks of
        the other groups have the same names and may be evicted earlier. Until one is seen, every group counts."""
        if self._group is None and event.group_idx is not None and event.kv_cache_spec_kind in FULL_ATTENTION:
            self._forget()
            self._group = event.group_idx

    def _apply_blocks(self, event: BlockStored | BlockRemoved) -> None:
        medium = event.medium if event.medium in MEDIA else GPU
        if isinstance(event, BlockRemoved):
            keys = event.block_hashes if self._resolver is None else self._resolver.forget(medium, event.block_hashes)
            self._index.remove(self._replica, medium, keys)
        elif self._resolver is None:
            self._index.store(self._replica, medium, event.block_hashes)
        else:
            for held_on, key in self._resolver.learn(medium, event):
                self._index.store(self._replica, held_on, (key,))


class _NameResolver:
    """Another engine's block names, translated to keys by the tokens in its events. A block whose parent is not known
    is kept until the parent is."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._digests: dict[int, bytes] = {}  # name -> digest
        self._media: dict[int, set[str]] = {}  # name -> media that hold the block; also for orphans
        self._orphans: OrderedDict[int, dict[int, bytes]] = OrderedDict()  # parent's name -> name -> tokens

    def clear(self) -> None:
        self._digests.clear()
        self._media.clear()
        self._orphans.clear()

    def learn(self, medium: str, event: BlockStored) -> Iterator[tuple[str, int]]:
        """Yield medium and key of every block that is now known to be held."""
        parent, size = event.parent_block_hash, event.block_size
        if any(event.extra_keys or ()) or event.lora_id is not None or event.lora_name is not None:
            return  # these blocks are not named by their tokens alone
        for index, name in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size:(index + 1) * size]
            self._media.setdefault(name, set()).add(medium)
            if name in self._digests:
                yield medium, block_hash(self._digests[name])
            elif len(tokens) == size:
                yield from self._resolve(name, parent, packed(tokens))
            parent = name

    def forget(self, medium: str, names: Sequence[int]) -> list[int]:
        """Return the keys of blocks that were removed from a medium."""
        gone = []
        for name in names:
            media = self._media.get(name, set())
            media.discard(medium)
            if name in self._digests:
                gone.append(block_hash(self._digests[name]))
            if not media:
                self._media.pop(name, None)
                self._digests.pop(name, None)
        return gone

    def _resolve(self, name: int, parent: int | None, tokens: bytes) -> Iterator[tuple[str, int]]:
        before = self._root if parent is None else self._digests.get(parent)
        if before is None:
            assert parent is not None
            self._orphans.setdefault(parent, {})[name] = tokens
            if len(self._orphans) > MOST_ORPHANS:
                self._orphans.popitem(last=False)
            return
        self._digests[name] = block_digest(before, tokens)
        resolved = [name]
        while resolved:
            known = resolved.pop()
            for medium in self._media.get(known, ()):
                yield medium, block_hash(self._digests[known])
            for child, span in self._orphans.pop(known, {}).items():
                if child in self._media:  # it may have been removed while its parent was unknown
                    self._digests[child] = block_digest(self._digests[known], span)
                    resolved.append(child)


class Approximation:
    """A view that guesses: a replica holds the blocks last sent to it, up to its capacity."""

    state = IndexState.FALLBACK

    def __init__(self, index: PrefixIndex, replica: int, capacity: int = MOST_GUESSED) -> None:
        """Guess the blocks of a replica with room for `capacity` blocks."""
        self.capacity = capacity
        self._index = index
        self._replica = replica
        self._used: OrderedDict[int, None] = OrderedDict()  # keys, least recently used first

    def computed(self, keys: Sequence[int]) -> None:
        """Assume that a prompt's blocks are held. Of blocks used together the prompt's last is evicted first, as other
        prompts share its beginning."""
        used = self._used
        new = [key for key in keys if key not in used]
        used.update(dict.fromkeys(new))
        for key in reversed(keys):
            used.move_to_end(key)
        self._index.store(self._replica, GPU, new)
        gone = [used.popitem(last=False)[0] for _ in range(len(used) - self.capacity)]
        self._index.remove(self._replica, GPU, gone)

    def answered(self, found: bool) -> None:
        """Adjust the capacity by whether the replica had the blocks that were assumed: if not, it has less room."""
        self.capacity = (min(self.capacity + self.capacity // 100 + 1, MOST_GUESSED) if found
                         else max(min(self.capacity, len(self._used)) * 9 // 10, LEAST_GUESSED))

    def reset(self) -> None:
        """Forget all blocks, as the process is gone."""
        self._used.clear()
        self._index.clear(self._replica)
