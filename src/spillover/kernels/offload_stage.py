"""Copies of one layer of offloaded blocks from main memory to the stage, a contiguous buffer that attention reads.

Blocks pass through the stage one segment at a time. A segment consists of whole splits, so that attention over segments
gives the same bits as attention over resident blocks.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from spillover.kernels import native
from spillover.kernels.kv_quant import KVCodec


def stage_blocks(blocks: Tensor, layer: int, stage: Tensor, codec: KVCodec | None) -> None:
    """Copy one layer of `blocks` [n] int64, addresses in main memory, to `stage` [n, 2, Hk, size] on the CPU, laid out
    as a layer of the pool. `codec`: decodes the blocks; None if they are stored in the type of the pool."""
    library, count = native.library(), len(blocks)
    if codec is None:
        layer_bytes = stage[0].nbytes
        if library is not None:
            library.stage_blocks(blocks.data_ptr(), layer * layer_bytes, layer_bytes, count, stage.data_ptr())
            return
        for place, block in enumerate(blocks.tolist()):
            ctypes.memmove(stage.data_ptr() + place * layer_bytes, block + layer * layer_bytes, layer_bytes)
        return
    codec = codec.one_layer
    if (library := codec.native()) is not None:
        offset = layer * codec.slot_bytes
        library.stage_decoded(blocks.data_ptr(), offset, count, stage.data_ptr(), *codec.numbers[1:])
        return
    for place, block in enumerate(blocks.tolist()):
        codes = (ctypes.c_uint8 * codec.slot_bytes).from_address(block + layer * codec.slot_bytes)
        decoded = codec.decode_tensor(torch.frombuffer(codes, dtype=torch.uint8))
        stage[place].view(-1).view(torch.uint8).copy_(decoded)
