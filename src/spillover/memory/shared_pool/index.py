"""The index of a shared pool: where each block is, which clients write or read it, and what is evicted.

The memory is divided into slabs, and a slab into slots of one size. A slab belongs to that size until all of its slots
are free, so that blocks of different models share one budget. A slot is free, leased (one client writes a block that
cannot be found yet) or has a block, which stays in place while a client has it pinned. No bytes are accessed here.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spillover.errors import SpilloverError
from spillover.units import format_bytes

PAGE = 4096
HUGE_PAGE = 2 << 20
SLAB_BYTES = 64 << 20
LEAST_SLABS = 16
MOST_SLABS = 2048

PRESENT = -1  # returned instead of an offset: the block is in the pool, or another client is writing it
FULL = -2  # returned instead of an offset: every slot is being written or read


def slab_size(capacity: int) -> int:
    """Return the bytes of a slab: large, so that little of it is wasted, but a small share of a small pool."""
    wanted = min(max(SLAB_BYTES, capacity // MOST_SLABS), capacity // LEAST_SLABS)
    unit = HUGE_PAGE if wanted >= HUGE_PAGE else PAGE
    return max(PAGE, wanted // unit * unit)


class Slab:
    """A piece of memory with contiguous slots of one size; `blocks` maps slot indices to blocks, even leased ones."""

    __slots__ = ("blocks", "busy", "free", "number", "ready", "size", "uses")

    def __init__(self, number: int, size: SlotSize) -> None:
        self.number = number
        self.size = size
        self.free = list(reversed(range(size.per_slab)))
        self.blocks: dict[int, Block] = {}
        self.busy = 0  # number of slots that are leased or pinned
        self.ready = 0  # number of blocks that can be found
        self.uses = 0.0  # sum of these blocks' times of last use

    @property
    def age(self) -> float:
        """Return the mean time of last use of its blocks."""
        return self.uses / self.ready if self.ready else 0.0


class SlotSize:
    """The slabs whose slots have one size."""

    __slots__ = ("idle", "open", "per_slab", "slabs", "stride")

    def __init__(self, stride: int, slab_bytes: int) -> None:
        self.stride = stride
        self.per_slab = slab_bytes // stride
        self.slabs: dict[int, Slab] = {}
        self.open: dict[int, Slab] = {}  # slabs with a free slot
        self.idle: OrderedDict[Block, None] = OrderedDict()  # blocks without readers, least recently used first


class Block:
    __slots__ = ("checksum", "found", "key", "model", "pins", "place", "slab", "used")

    def __init__(self, key: bytes, model: Model, slab: Slab, place: int) -> None:
        self.key = key
        self.model = model
        self.slab = slab
        self.place = place
        self.checksum = 0
        self.found = False  # whether it can be found by its key: it was written, and not dropped since
        self.pins = 0  # number of readers; 1 while the block is being written
        self.used = 0.0


@dataclass(eq=False)
class Model:
    """The blocks of one identity, and counters of requests for them."""

    identity: bytes
    payload_bytes: int
    description: Mapping[str, str]
    blocks: dict[bytes, Block] = field(default_factory=dict)
    writing: dict[bytes, Block] = field(default_factory=dict)
    clients: int = 0
    hits: int = 0  # number of blocks that were read
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    last_use: float = 0.0  # time of the last use in seconds since 1970


class Client:
    """A connection, with the blocks that it is writing and reading, by offset in the memory."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.leases: dict[int, Block] = {}
        self.pins: dict[int, tuple[Block, int]] = {}


class PoolIndex:
    def __init__(self, capacity: int, slab_bytes: int | None = None, prepare: Callable[[int], bool] = lambda _: True,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """Create the index of `capacity` bytes. `prepare` allocates a slab's memory when it is first used; if that
        fails, the pool does not grow further."""
        self.reclaim: Callable[[], object] = lambda: None  # called to free a slab when none is unused
        self.slab_bytes = slab_bytes or slab_size(capacity)
        self.capacity = capacity // self.slab_bytes * self.slab_bytes
        if not self.capacity:
            raise SpilloverError(f"a pool of {format_bytes(capacity)} holds nothing; give it at least "
                                 f"{format_bytes(LEAST_SLABS * PAGE)}")
        self.models: dict[bytes, Model] = {}
        self._prepare = prepare
        self._clock = clock
        self._now = 0.0
        self._unused = list(reversed(range(self.capacity // self.slab_bytes)))  # slabs not prepared
        self._spare: list[int] = []  # prepared slabs that belong to no size now
        self._sizes: dict[int, SlotSize] = {}

    # Clients

    def join(self, identity: bytes, payload_bytes: int, description: Mapping[str, str]) -> Client:
        """Return a new client that reads and writes blocks of this identity."""
        if payload_bytes < 1:
            raise SpilloverError(f"a block has at least one byte, not {payload_bytes}")
        if payload_bytes > self.slab_bytes:
            raise SpilloverError(f"the pool of {format_bytes(self.capacity)} cannot hold KV blocks of "
                                 f"{format_bytes(payload_bytes)}; give it at least "
                                 f"{format_bytes(LEAST_SLABS * payload_bytes)}")
        model = self.models.get(identity)
        if model is None:
            model = self.models[identity] = Model(identity, payload_bytes, dict(description), last_use=time.time())
        elif model.payload_bytes != payload_bytes:
            raise SpilloverError(f"blocks of this identity have {model.payload_bytes} bytes, not {payload_bytes}")
        model.clients += 1
        return Client(model)

    def leave(self, client: Client) -> None:
        """Release the blocks that the client was writing or reading."""
        for block in client.leases.values():
            self._free(block)
        for block, count in client.pins.values():
            self._unpin(block, count)
        client.leases.clear()
        client.pins.clear()
        client.model.clients -= 1
        self._tidy(client.model)

    # Writing

    def take(self, client: Client, keys: Sequence[bytes]) -> list[int]:
        """Return for each block the offset to write it to, leased by the client until it publishes the block or leaves;
        or PRESENT or FULL."""
        model, places = client.model, []
        stride = -(-model.payload_bytes // PAGE) * PAGE
        size = self._sizes.get(stride) or SlotSize(stride, self.slab_bytes)
        oldest: list[Slab | None] = []  # the oldest slab of another size, once it has been determined
        self._touch([model.blocks[key] for key in keys if key in model.blocks])  # so that they are evicted last
        for key in keys:
            if key in model.blocks or key in model.writing:
                places.append(PRESENT)
                continue
            slab = self._slab(size, oldest)
            if slab is None:
                places.append(FULL)
                continue
            block = Block(key, model, slab, slab.free.pop())
            if not slab.free:
                del size.open[slab.number]
            block.pins = 1
            slab.busy += 1
            slab.blocks[block.place] = block
            model.writing[key] = block
            client.leases[self.offset(block)] = block
            places.append(self.offset(block))
        return [FULL if place == PRESENT and key not in model.blocks and key not in model.writing else place
                for key, place in zip(keys, places, strict=True)]

    def publish(self, client: Client, places: Sequence[int], checksums: Sequence[int]) -> list[bool]:
        """Publish blocks that the client has written, so that they can be found; False for those without a lease."""
        published: list[Block] = []
        done = []
        for place, checksum in zip(places, checksums, strict=True):
            block = client.leases.pop(place, None)
            done.append(block is not None)
            if block is None:
                continue
            model = block.model
            if model.writing.get(block.key) is not block:  # the model's blocks were cleared since
                self._free(block)
                done[-1] = False
                continue
            del model.writing[block.key]
            block.checksum, block.found, block.pins = checksum, True, 0
            model.blocks[block.key] = block
            model.stores += 1
            slab = block.slab
            slab.busy -= 1
            slab.ready += 1
            slab.uses += block.used
            slab.size.idle[block] = None
            published.append(block)
        self._touch(published)
        return done

    # Reading

    def find(self, client: Client, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks the pool has, and count them as just used."""
        blocks = client.model.blocks
        found = [key in blocks for key in keys]
        self._touch([blocks[key] for key, there in zip(keys, found, strict=True) if there])
        return found

    def pin(self, client: Client, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """Return each block's offset and checksum, and pin it there until release(); None for missing blocks."""
        model = client.model
        blocks = [model.blocks.get(key) for key in keys]
        self._touch([block for block in blocks if block is not None])
        pinned: list[tuple[int, int] | None] = []
        for block in blocks:
            if block is None:
                model.misses += 1
                pinned.append(None)
                continue
            model.hits += 1
            offset = self.offset(block)
            client.pins[offset] = (block, client.pins[offset][1] + 1 if offset in client.pins else 1)
            if block.pins == 0:
                block.slab.busy += 1
                del block.slab.size.idle[block]
            block.pins += 1
            pinned.append((offset, block.checksum))
        return pinned

    def release(self, client: Client, places: Sequence[int]) -> None:
        for place in reversed(places):
            block, count = client.pins.pop(place, (None, 0))
            if block is None:
                continue
            if count > 1:
                client.pins[place] = (block, count - 1)
            self._unpin(block, 1)

    # Dropping

    def drop(self, client: Client, keys: Sequence[bytes]) -> int:
        """Drop blocks, such as damaged ones; return how many there were."""
        found = [block for block in (client.model.blocks.get(key) for key in keys) if block is not None]
        for block in found:
            self._forget(block)
        return len(found)

    def evict(self, count: int, model: Model | None = None, older_than: float | None = None) -> int:
        """Drop the least recently used blocks without readers, of one model or of all; return how many."""
        before = None if older_than is None else self._clock() - older_than
        idle = [block for size in self._sizes.values() for block in size.idle
                if (model is None or block.model is model) and (before is None or block.used < before)]
        idle.sort(key=lambda block: block.used)
        self._evict(idle[:count])
        return len(idle[:count])

    def clear(self, model: Model) -> int:
        """Drop all blocks of a model, and those being written; return how many could be found. A slot that a client
        reads or writes is freed when that ends."""
        count = len(model.blocks)
        model.writing.clear()
        for block in list(model.blocks.values()):
            self._forget(block)
        return count

    # Slabs lent for other uses than blocks

    @property
    def unused(self) -> int:
        """Return the number of slabs that no block has used yet."""
        return len(self._unused)

    def lend(self, slabs: int) -> None:
        """Remove n slabs that no block has used from the pool."""
        assert 0 <= slabs <= len(self._unused)
        del self._unused[:slabs]  # the slabs with the highest numbers
        self.capacity -= slabs * self.slab_bytes

    def return_slabs(self, slabs: int) -> None:
        first = self.capacity // self.slab_bytes
        self._unused[:0] = reversed(range(first, first + slabs))
        self.capacity += slabs * self.slab_bytes

    # Statistics

    def offset(self, block: Block) -> int:
        return block.slab.number * self.slab_bytes + block.place * block.slab.size.stride

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all slots that are not free."""
        return sum(len(slab.blocks) * size.stride for size in self._sizes.values() for slab in size.slabs.values())

    @property
    def prepared_bytes(self) -> int:
        """Return the bytes allocated from the system."""
        return self.capacity - len(self._unused) * self.slab_bytes

    def slabs(self) -> Iterator[Slab]:
        return (slab for size in self._sizes.values() for slab in size.slabs.values())

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        numbers = [*self._unused, *self._spare, *(slab.number for slab in self.slabs())]
        assert sorted(numbers) == list(range(self.capacity // self.slab_bytes)), "a slab is lost or there twice"
        for size in self._sizes.values():
            assert size.slabs, "a size without slabs"
            assert set(size.open) == {slab.number for slab in size.slabs.values() if slab.free}
            for slab in size.slabs.values():
                assert sorted([*slab.free, *slab.blocks]) == list(range(size.per_slab)), "a slot is lost or there twice"
                assert slab.blocks, "an empty slab was not given back"
                assert slab.busy == sum(block.pins > 0 for block in slab.blocks.values())
                found = [block for block in slab.blocks.values() if block.found]
                assert slab.ready == len(found)
                assert abs(slab.uses - sum(block.used for block in found)) <= 1e-6 * max(1.0, abs(slab.uses))
                for block in slab.blocks.values():
                    assert (block in size.idle) == (block.found and block.pins == 0)
                    assert block.found == (block.model.blocks.get(block.key) is block)
            assert all(one.used < other.used for one, other in zip(size.idle, list(size.idle)[1:], strict=False))

    # Internal methods

    def _slab(self, size: SlotSize, oldest: list[Slab | None]) -> Slab | None:
        """Return a slab of this size with a free slot, evicting blocks if need be; None if no slot can be freed."""
        if not size.open and not self._grow(size):
            if not oldest:
                oldest.append(self._oldest_slab(size))
            rival, block = oldest[0], next(iter(size.idle), None)
            # Only whole slabs can change size; that is fair if their mean last use is before this size's oldest block.
            if rival is not None and (block is None or rival.age < block.used):
                oldest.clear()
                self._evict(list(rival.blocks.values()))
            elif block is not None:
                self._evict([block])
            if not size.open:
                self._grow(size)
        return next(iter(size.open.values()), None)

    def _grow(self, size: SlotSize) -> bool:
        """Add a slab to this size, if one is available that belongs to none."""
        number = self._spare.pop() if self._spare else self._prepared()
        if number is None:
            return False
        self._sizes[size.stride] = size
        size.slabs[number] = size.open[number] = Slab(number, size)
        return True

    def _prepared(self) -> int | None:
        if not self._unused:
            self.reclaim()
        if not self._unused:
            return None
        if self._prepare(self._unused[-1]):
            return self._unused.pop()
        self.capacity -= len(self._unused) * self.slab_bytes  # the slabs with the highest numbers
        self._unused.clear()
        return None

    def _oldest_slab(self, size: SlotSize) -> Slab | None:
        """Return the slab of another size with the earliest mean last use, among those not being read or written."""
        others = [slab for other in self._sizes.values() if other is not size for slab in other.slabs.values()
                  if not slab.busy]
        return min(others, key=lambda slab: slab.age, default=None)

    def _touch(self, blocks: Sequence[Block]) -> None:
        """Note a use. The first block counts as the most recent: a prefix without its beginning is useless."""
        now = self._clock()
        for block in reversed(blocks):
            self._now = max(now, math.nextafter(self._now, math.inf))
            block.slab.uses += self._now - block.used
            block.used = self._now
            if block.pins == 0:
                block.slab.size.idle.move_to_end(block)
        if blocks:
            blocks[0].model.last_use = time.time()

    def _unpin(self, block: Block, count: int) -> None:
        block.pins -= count
        if block.pins:
            return
        block.slab.busy -= 1
        if block.found:
            block.slab.size.idle[block] = None
            self._touch([block])
        else:  # it was dropped while it was pinned
            self._remove(block)

    def _evict(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.model.evictions += 1
            self._forget(block)

    def _forget(self, block: Block) -> None:
        """Remove a block from the index, so that it is not found; its slot is freed once it has no readers."""
        del block.model.blocks[block.key]
        block.found = False
        slab = block.slab
        slab.ready -= 1
        slab.uses = slab.uses - block.used if slab.ready else 0.0
        if block.pins == 0:
            del slab.size.idle[block]
            self._remove(block)

    def _free(self, block: Block) -> None:
        """Free a slot that was leased."""
        if block.model.writing.get(block.key) is block:
            del block.model.writing[block.key]
        block.pins = 0
        block.slab.busy -= 1
        self._remove(block)

    def _remove(self, block: Block) -> None:
        """Free a block's slot, and the slab if that was its last used slot."""
        slab, size = block.slab, block.slab.size
        del slab.blocks[block.place]
        slab.free.append(block.place)
        if slab.blocks:
            size.open[slab.number] = slab
        else:
            del size.slabs[slab.number]
            size.open.pop(slab.number, None)
            self._spare.append(slab.number)
            if not size.slabs:
                del self._sizes[size.stride]
        self._tidy(block.model)

    def _tidy(self, model: Model) -> None:
        """Remove a model that has no blocks and no clients."""
        if not model.clients and not model.blocks and not model.writing and self.models.get(model.identity) is model:
            del self.models[model.identity]
