"""The maximum device memory of a step besides weights and KV: the widest layer, the logits, and sampling."""

from __future__ import annotations

from dataclasses import dataclass

from spillover.kernels.extents import (
    EXPERT_ROW,
    EXPERT_SCRATCH_BYTES,
    MOST_SCORES,
    SEGMENTS,
    chunk_sums_bytes,
    dequantizes,
    segment_blocks,
)
from spillover.kernels.fields import ITEMSIZE
from spillover.kernels.triton.attention.ordered_splits import max_items, scratch_bytes
from spillover.models.config import ModelConfig
from spillover.models.groups import layer_groups
from spillover.plan.shapes import kv_layer_bytes

# Per vocabulary entry: the logit, its copy edited by penalties, bias and masks, and the counts for penalties.
LOGIT_BYTES = 4 + 4 + (1 + 4)
# Per vocabulary entry while sampling: scaled and sorted logits, the sort's indices and buffers, integer weights, their
# running sum, the sum before each of them, and its comparison with the nucleus.
SAMPLE_BYTES = 4 + 4 + 8 + 8 + 8 + 8 + 8 + 8
SAMPLE_ENTRIES = {"cpu": 1 << 20, "cuda": 1 << 23}  # rows are sampled in chunks of about this many entries
SCORED_ROWS = 64  # prompt log probabilities are computed in chunks of this many rows
BLAS_BYTES = {"cpu": 0, "cuda": 32 << 20}  # cuBLAS has one workspace per handle
# Bytes for the float32 scores [heads, queries, keys] of one request, which attention without a native kernel stores.
SCORES_BYTES = 256 << 20
ITEM_ROWS = 24  # maximum number of rows in addition to a step's for which native attention stores totals
CAPTURED_ROWS = 1024  # rows of the largest prefill step captured as a CUDA graph
CAPTURED_MOVING_ROWS = 64  # rows of the largest captured step that verifies drafts, if weights are not all resident
RANK_CALL_BYTES = 16 << 20  # maximum bytes exchanged by ranks on CUDA devices in one call; more takes several calls
SMALLEST_BLOCK = 8  # smallest block size in tokens, for which block tables have the most entries


BRANCH_ROWS = 128  # rows of a drafting step of small batches, in which branches of drafts begin
DRAFTED_ROWS = 320  # rows to sample for small batches with drafts: 64 requests with 4 draft tokens each


def max_samples(max_num_seqs: int, max_num_batched_tokens: int, draft_tokens: int) -> int:
    """Return the maximum number of rows sampled in a step. Logits take much memory and large batches gain least from
    drafts: in these every request has one draft token, or fewer requests have more."""
    if not draft_tokens:
        return max_num_seqs
    wanted = min(max_num_seqs * (1 + draft_tokens), max(2 * max_num_seqs, DRAFTED_ROWS), max_num_batched_tokens)
    return max(max_num_seqs, wanted)


def draft_rows(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the maximum number of rows of a step that drafts with substitutes."""
    return max(max_num_seqs, min(BRANCH_ROWS, max_num_batched_tokens))


@dataclass(frozen=True)
class Workspace:
    activations: int  # on CUDA only the excess over logits and sampler, which reuse their memory
    logits: int
    sampler: int  # buffers computed from the logits while sampling
    rope: int  # cos and sin for every position
    kernels: int  # workspace of the kernels
    staging: int = 0  # buffers through which KV of sequences longer than the pool is streamed
    drafting: int = 0  # workspace of steps that draft

    @property
    def total(self) -> int:
        return (self.activations + self.logits + self.sampler + self.rope + self.kernels + self.staging
                + self.drafting)


def workspace(
    config: ModelConfig, dtype: str, device: str, native: bool, tokens: int, rows: int, positions: int,
    captured: int = 0, samples: int = 0,
) -> Workspace:
    """Return the workspace of steps of `tokens` in `rows` requests, in sequences of up to `positions`. `captured`: rows
    of the largest prefill step captured as a CUDA graph; `samples`: number of sampled rows if above `rows`."""
    samples = max(rows, samples)
    kernels = BLAS_BYTES[device] + (0 if native else SCORES_BYTES)
    if device == "cuda":
        kernels += _cuda_bytes(config, dtype, captured, rows, samples, positions) + _wide_bytes(config, dtype, tokens)
    if config.is_moe and device == "cpu" and native:
        pair = 2 * config.hidden_size + 3 * config.expert_intermediate_size
        kernels += min(EXPERT_SCRATCH_BYTES, 4 * tokens * config.experts_per_token * pair)
    vocab = config.vocab_size
    stored = ITEMSIZE[dtype] if dtype != "float32" else 0  # logits before the conversion to float32
    activations = tokens * _row_bytes(config, dtype, native)
    logits = min(max(samples, SCORED_ROWS), tokens) * vocab * (LOGIT_BYTES + stored)
    sampler = min(min(samples, tokens) * vocab, max(vocab, SAMPLE_ENTRIES[device])) * SAMPLE_BYTES
    if device == "cuda":  # sampling reuses the layers' memory, except one row per token
        activations = max(activations - logits - sampler, tokens * config.hidden_size * ITEMSIZE[dtype])
    return Workspace(
        activations=activations,
        logits=logits,
        sampler=sampler,
        rope=positions * config.head_dim * 4,
        kernels=kernels,
    )


def staging_bytes(
    config: ModelConfig, dtype: str, device: str, native: bool, tokens: int, block_size: int, kv_dtype: str = "auto",
    spill_dtype: str = "auto",
) -> int:
    """Return the additional bytes of steps of `tokens` in which offloaded blocks of a sequence are streamed."""
    positions = segment_blocks(block_size, device) * block_size
    buffers = SEGMENTS * positions * kv_layer_bytes(config, dtype, kv_dtype)
    totals = (tokens + ITEM_ROWS) * config.num_heads * (config.head_dim + 2) * 4
    if native:
        return buffers + totals
    # A segment is read into keys and values of the compute type, and dequantised first if it is quantised.
    segment = positions * kv_layer_bytes(config, dtype)
    quantised = (kv_dtype, spill_dtype) != ("auto", "auto")
    float_bytes = 4 * positions * kv_layer_bytes(config, "float32") if quantised else 0
    return buffers + 2 * totals + 3 * segment + float_bytes + 5 * 4 * MOST_SCORES


def _cuda_bytes(config: ModelConfig, dtype: str, captured: int, rows: int, samples: int, positions: int) -> int:
    """Return the bytes of partial results of split attention, of block tables, and of captured graphs."""
    items = max_items(rows + 1, positions, config.num_kv_heads)
    scratch = scratch_bytes(items, rows + 1, config.num_heads, config.num_kv_heads, config.head_dim)
    tables = (rows + 1) * len(layer_groups(config)) * -(-positions // SMALLEST_BLOCK) * 4
    graphs = max(rows, captured) * _row_bytes(config, dtype, False)
    graphs += samples * (config.hidden_size * ITEMSIZE[dtype] + config.vocab_size * (ITEMSIZE[dtype] + 1))
    return scratch + tables + graphs + _chunk_sums_bytes(config, max(rows, captured))


def _chunk_sums_bytes(config: ModelConfig, rows: int) -> int:
    """Return the bytes of a product's partial sums, for the product of a layer that has the most."""
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    matrices = [(qkv, hidden), (hidden, width), (2 * config.intermediate_size, hidden),
                (hidden, config.intermediate_size)]
    return max(chunk_sums_bytes(rows, channels, inner) for channels, inner in matrices if channels and inner)


def _wide_bytes(config: ModelConfig, dtype: str, tokens: int) -> int:
    """Return the bytes of a layer's dequantised experts; 0 if steps of `tokens` do not dequantise them."""
    from spillover.kernels.formats.base import make_format  # imported here, as reading a plan does not need torch

    expert = 3 * config.expert_intermediate_size * config.hidden_size * ITEMSIZE[dtype]
    experts, k = config.num_experts, config.experts_per_token
    gemm = make_format(config.expert_format, config.quantization).experts
    wide = gemm is not None and gemm.dequantizes and dequantizes(experts, k, expert, tokens)
    return experts * expert if wide else 0


def _row_bytes(config: ModelConfig, dtype: str, native: bool) -> int:
    """Return the maximum bytes per token within a layer."""
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = heads + 2 * kv_heads
    rotated = 0 if native and not config.qk_norm else heads + kv_heads  # q and k, unless rotated in place
    attention = 2 * hidden + qkv + rotated + heads + hidden
    inner = config.intermediate_size
    dense = 3 * hidden + 3 * inner
    # All tokens may use one expert: gathered rows, its two products, its output before and after weighting.
    mixture = (5 * hidden + 3 * config.expert_intermediate_size + 2 * config.num_experts) if config.is_moe else 0
    if config.is_moe and not native:  # a GPU stores all experts' results per token, between and after the products
        k = config.experts_per_token
        copied, inside = (-(-width // EXPERT_ROW) * EXPERT_ROW for width in (hidden, config.expert_intermediate_size))
        mixture = max(mixture, copied + (k + 3) * hidden + k * inside + 2 * config.num_experts)
    if config.is_moe and len(config.dense_layers) == 0:
        dense = 0
    wide = 0 if native else 3 * hidden * 4  # the plain norm works on float32 copies
    return max(attention, dense, mixture) * ITEMSIZE[dtype] + wide
