"""KV events of other engines and versions: maps and arrays, newer fields, and data that is no event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.index import PrefixIndex
from spillover.cluster.mirror import Mirror
from spillover.memory.kv.digest import root_digest
from spillover.memory.kv.event_wire import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    block_hash,
    read_events,
)

# Written by vLLM 0.32's own classes: two blocks by number, with a session; one by its digest, of an image, offloaded;
# one that is removed; and all.
VLLM_0_32 = bytes.fromhex(
    "93cb3ff8000000000000948ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf800000000000000507b1706172656e"
    "745f626c6f636b5f68617368c0a9746f6b656e5f696473980001020304050607aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d65646975"
    "6da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e"
    "64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a1738da474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865"
    "7391c4200101010101010101010101010101010101010101010101010101010101010101b1706172656e745f626c6f636b5f68617368c420020202"
    "0202020202020202020202020202020202020202020202020202020202a9746f6b656e5f6964739408090a0baa626c6f636b5f73697a6504a76c6f"
    "72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0aa65787472615f6b657973919192a5696d61676503a967726f75705f696478"
    "00b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ea86c6f63616c697479a54c4f43414ca96f776e6572736869"
    "70a17884a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f69647800"
    "81a474797065b0416c6c426c6f636b73436c656172656400")


def test_what_vllm_writes_is_read() -> None:
    assert read_events(VLLM_0_32) == [
        BlockStored([2**63 + 5, 7], None, list(range(8)), 4, None, GPU, None, [None, None], 0, "full_attention"),
        BlockStored([block_hash(b"\1" * 32)], block_hash(b"\2" * 32), list(range(8, 12)), 4, None, CPU, None,
                    [[["image", 3]]], 0, "full_attention", None, "LOCAL"),
        BlockRemoved([7], GPU, 0), AllBlocksCleared()]


def test_what_is_published_has_vllms_names() -> None:
    """Published events were read by vLLM 0.32's own classes, and contain every field that these require."""
    stored = BlockStored([9], 8, [1, 2], 2, None, CPU, None)
    batch = msgspec.msgpack.encode(EventBatch(1.5, [stored, BlockRemoved([9], CPU), AllBlocksCleared()], 0))
    assert msgspec.msgpack.decode(batch) == [1.5, [
        {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": 8, "token_ids": [1, 2], "block_size": 2,
         "lora_id": None, "medium": "CPU", "lora_name": None},
        {"type": "BlockRemoved", "block_hashes": [9], "medium": "CPU"}, {"type": "AllBlocksCleared"}], 0]
    assert read_events(batch) == [stored, BlockRemoved([9], CPU), AllBlocksCleared()]


HASHES = st.lists(st.integers(-2**63, 2**64 - 1), max_size=3)


@given(hashes=HASHES, parent=st.none() | st.integers(0, 2**64 - 1), fields=st.integers(4, 12), more=st.booleans(),
       rank=st.booleans())
@settings(max_examples=60, deadline=None)
def test_maps_and_arrays_of_every_version_say_the_same(hashes: list[int], parent: int | None, fields: int, more: bool,
                                                       rank: bool) -> None:
    """Newer fields were added at the end; a reader of any version finds those that it knows."""
    values: list[Any] = [hashes, parent, [1, 2, 3, 4] * len(hashes), 4, None, CPU, None, [None] * len(hashes), 1,
                         "sliding_window", 64, "LOCAL"]
    names = BlockStored.__struct_fields__[:fields]
    array = ["BlockStored", *values[:fields], *(["newer", {"than": "this"}] if more and fields == 12 else [])]
    mapped = {"type": "BlockStored", **dict(zip(names, values, strict=False)), **({"newer": [1]} if more else {})}
    removed = ["BlockRemoved", hashes], {"type": "BlockRemoved", "block_hashes": hashes}
    tail = [0] if rank else []
    one, other = (read_events(msgspec.msgpack.encode([1.0, [stored, gone, cleared], *tail])) for stored, gone, cleared
                  in ((array, removed[0], ["AllBlocksCleared"]), (mapped, removed[1], {"type": "AllBlocksCleared"})))
    assert one == other
    assert isinstance(one[0], BlockStored)
    assert one[0].block_hashes == hashes
    assert one[0].medium == (CPU if fields > 5 else None)


def test_events_of_other_kinds_are_passed_over_and_what_is_none_is_refused() -> None:
    others: list[Any] = [{"type": "BlockMoved", "to": 3}, ["BlockMoved", 3], {"type": "BlockRemoved",
                                                                           "block_hashes": [1]}]
    assert read_events(msgspec.msgpack.encode([1.0, others])) == [BlockRemoved([1], None)]
    wrongs: list[Any] = [5, "BlockStored", [], {}, [3], {"type": "BlockRemoved"}, ["BlockStored", "x", None, [], 4]]
    for wrong in wrongs:
        with pytest.raises(msgspec.ValidationError):
            read_events(msgspec.msgpack.encode([1.0, [wrong]]))
    with pytest.raises(msgspec.DecodeError):
        read_events(b"\xc1 no msgpack")


def test_a_group_with_full_attention_stands_for_the_others() -> None:
    """The groups' blocks have the same hashes; those of a sliding window are evicted long before."""
    index = PrefixIndex()
    index.add(0)
    mirror = Mirror(index, 0, root=root_digest(b"", None))

    def stored(group: int, kind: str) -> BlockStored:
        return BlockStored([1, 2], None, list(range(8)), 4, None, GPU, None, None, group, kind)

    batches: list[list[Any]] = [[stored(1, "sliding_window"), stored(0, "full_attention")],
                                [BlockRemoved([1, 2], GPU, 1)], [BlockRemoved([2], GPU, 0)]]
    mirror.begin_partial(-1)
    held = []
    for number, events in enumerate(batches):
        assert mirror.apply_batch(number, msgspec.msgpack.encode(EventBatch(1.0, events)))
        held.append(len(index.keys(0, GPU)))
    assert held == [2, 2, 1]
