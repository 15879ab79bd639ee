"""Classifies each kernel of a step, or each call of a step on a CPU: by its name, and by its position between the norms
with which every half layer begins, because one kernel serves many matrices."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from spillover.plan.part_limits import (
    ATTENTION,
    DOWN,
    EXPERTS,
    GATE_UP,
    HEAD,
    NORMS,
    OUT,
    QKV,
    ROPE_STORE,
    ROUTER,
    SAMPLING,
)

ACTIVATION, PAGING, SUM = "activation", "expert paging", "sum of experts"
COPIES, ROWS, OTHER = "copies", "embedding and rows", "other"
ORDER = (COPIES, ROWS, NORMS, QKV, ROPE_STORE, ATTENTION, OUT, GATE_UP, ACTIVATION, DOWN, ROUTER, PAGING, EXPERTS, SUM,
         HEAD, SAMPLING, OTHER)  # in the order in which a step runs them

# Kinds of kernels whose part of the step depends on their position.
_PRODUCT, _NORM_PRODUCT, _REDUCTION, _CHOICE = "product", "norm and product", "sums of a product", "choice"
# The first pattern that matches a name decides its kind; add the name of a new kernel here.
_NAMES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in (
    (COPIES, r"memcpy|memset|_copy_inputs|update_tables|fill_tokens|aten::(copy_|index_put_)"),
    (ATTENTION, r"attention|_ordered_(decode|prefill)|_fold_short|flash|fmha"),
    (_NORM_PRODUCT, r"add_rms_norm_(few_rows|fp8_linear)"),
    (NORMS, r"add_rms_norm"),
    (ROPE_STORE, r"rope|store_kv|rms_norm"),
    (PAGING, r"_resolve|_assign|_gather_or_post|_post\b|_collect|_await"),
    (ROUTER, r"^_route|^_sort\b|^_count_by_rank|bincount"),
    (SUM, r"_combine|index_add"),
    (EXPERTS, r"expert|moe|mixture|_widen"),
    (SAMPLING, r"^_(peaks|sums|pick|keep_likely)\b|sampling"),
    (_REDUCTION, r"splitk.*reduce"),
    (ROWS, r"embedding|look_up|indexselect|gather|_rows_before|_keep_rows|_end_pass|aten::index"),
    (_PRODUCT, r"linear|gemm|gemv|(few|some|many)_rows|_described|cutlass|cublas|nvjet|wgmma|aten::(mm|addmm|matmul)|"
               r"^sm\d"),
    (ACTIVATION, r"^_gate\b|silu|swiglu|group_sums|quantize_rows"),
    (_CHOICE, r"argmax|topk|radix|scan|sort|softmax"),
))


def step_parts(names: Sequence[str]) -> list[str]:
    """Return for each kernel of a step the part that it belongs to, one of ORDER. `names`: kernels in launch order."""
    kinds = [_kind(name) for name in names]
    norms = [place for place, kind in enumerate(kinds) if kind in (NORMS, _NORM_PRODUCT)]
    kinds = [_PRODUCT if kind == _NORM_PRODUCT else kind for kind in kinds]
    bounds = [0, *norms, len(kinds)]
    parts: list[str] = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        section = kinds[begin:end]
        if number == 0 or number == len(norms):
            parts += _outer(section, norms != [])
        elif ATTENTION in section:
            parts += _attention_half(section)
        else:
            parts += _mlp_half(section)
    return parts


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), OTHER)


def _outer(kinds: Sequence[str], layered: bool) -> list[str]:
    """Classify the kernels before the first norm or after the last: any product computes logits, and any choice is
    sampling."""
    head = HEAD if layered else OTHER
    return [{_PRODUCT: head, _REDUCTION: head, _CHOICE: SAMPLING, ACTIVATION: OTHER}.get(kind, kind) for kind in kinds]


def _attention_half(kinds: Sequence[str]) -> list[str]:
    attention = kinds.index(ATTENTION)
    return [(QKV if place < attention else OUT) if kind in (_PRODUCT, _REDUCTION) else
            OTHER if kind in (_CHOICE, ACTIVATION) else kind for place, kind in enumerate(kinds)]


def _mlp_half(kinds: Sequence[str]) -> list[str]:
    """Classify the kernels of an MLP half layer: without experts the first product is gate and up; with experts,
    products before the choice of experts are the router's."""
    chosen = next((place for place, kind in enumerate(kinds) if kind in (ROUTER, PAGING, EXPERTS, _CHOICE)), None)
    parts, products = [], 0
    for place, kind in enumerate(kinds):
        products += kind == _PRODUCT
        if kind in (_PRODUCT, _REDUCTION):
            if chosen is not None:
                parts.append(ROUTER if place < chosen else EXPERTS)
            else:
                parts.append(GATE_UP if products == 1 else DOWN)
        elif kind == ACTIVATION and chosen is not None:
            parts.append(EXPERTS)
        elif kind == _CHOICE:
            parts.append(ROUTER)
        else:
            parts.append(kind)
    return parts
