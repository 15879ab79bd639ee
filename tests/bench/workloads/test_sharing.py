"""The simulated sharing is that of a cache that never evicts, token by token."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.bench.workloads.sharing import Part, PrefixTree, simulate, token_parts

PARTS = st.lists(st.builds(Part, st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5)


def spelled(parts: list[Part]) -> list[object]:
    """Return each token as its part's key and its position there."""
    return [(part.key, place) for part in parts for place in range(part.length)]


@settings(max_examples=300, deadline=None)
@given(prompts=st.lists(PARTS, min_size=1, max_size=8), answer=st.integers(1, 6), block=st.sampled_from([1, 3, 4]))
def test_it_equals_a_cache_of_tokens(prompts: list[list[Part]], answer: int, block: int) -> None:
    known: set[tuple[object, ...]] = set()  # every prefix ever computed
    shared = 0
    for index, prompt in enumerate(prompts):
        tokens = spelled(prompt)
        whole_blocks = range(block, len(tokens), block)  # at least one token must be computed
        shared += max((size for size in whole_blocks if tuple(tokens[:size]) in known), default=0)
        kept = [*tokens, *((f"answer {index}", place) for place in range(answer - 1))]
        known |= {tuple(kept[:size]) for size in range(1, len(kept) + 1)}
    result = simulate([(prompt, Part(f"answer {index}", answer)) for index, prompt in enumerate(prompts)], block)
    assert result.prompt_tokens == sum(len(spelled(prompt)) for prompt in prompts)
    assert result.shared_tokens == shared
    assert result.working_set_tokens == len(known)


def test_a_full_hit_still_computes_a_token() -> None:
    prompt = [Part("same", 32)]
    assert simulate([(prompt, Part("a", 1)), (prompt, Part("b", 1))]).shared_tokens == 16


def test_of_a_part_with_the_same_key_the_shorter_is_shared() -> None:
    tree = PrefixTree()
    assert tree.add([Part("system", 100)]) == 0
    assert tree.add([Part("system", 40), Part("question", 9)]) == 40
    assert tree.add([Part("system", 60), Part("other", 9)]) == 60
    assert tree.add([Part("system", 40), Part("question", 9), Part("more", 1)]) == 49


def test_known_tokens_share_by_whole_blocks() -> None:
    rng = random.Random(0)
    common = [rng.randrange(1000) for _ in range(40)]
    prompts = [token_parts([*common, *(rng.randrange(1000) for _ in range(20))]) for _ in range(5)]
    assert [sum(part.length for part in prompt) for prompt in prompts] == [60] * 5
    result = simulate((prompt, Part(index, 1)) for index, prompt in enumerate(prompts))
    assert result.shared_tokens == 4 * 32
    assert result.share == 4 * 32 / 300
