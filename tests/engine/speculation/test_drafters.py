"""Drafters propose tokens that followed earlier, and never text of another salt."""

from __future__ import annotations

import random

import pytest

from spillover.engine.requests.request import Request
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.speculation.drafters import suffix
from spillover.engine.speculation.drafters.drafter import Draft
from spillover.engine.speculation.drafters.ngram import NgramDrafter
from spillover.engine.speculation.drafters.simulated import SimulatedDrafter, num_accepted
from spillover.engine.speculation.drafters.suffix import SuffixDrafter, TokenRing


def request(tokens: list[int], salt: str | None = None, prompt: int = 1) -> Request:
    made = Request("r", tokens[:prompt], SamplingParams(max_tokens=1000), cache_salt=salt)
    made.token_ids.extend(tokens[prompt:])
    return made


def propose(drafter: NgramDrafter | SuffixDrafter, tokens: list[int], most: int, salt: str | None = None) -> Draft:
    return drafter.propose([(request(tokens, salt), most)])[0]


def occurs(run: list[int], tokens: list[int]) -> bool:
    return any(tokens[i:i + len(run)] == run for i in range(len(tokens) - len(run) + 1))


@pytest.mark.parametrize("seed", range(40))
def test_ngram_drafts_are_continuations_that_occurred(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.randint(1, 4)
    high = rng.randint(low, 6)
    tokens = [rng.randrange(rng.choice([2, 5, 30])) for _ in range(rng.randint(1, 120))]
    most = rng.randint(1, 12)
    draft = propose(NgramDrafter(low, high), tokens, most)
    matched = max((n for n in range(1, high + 1) if n < len(tokens) and occurs(tokens[-n:], tokens[:-1])), default=0)
    if matched < low:
        assert draft.tokens == ()
        return
    assert len(draft.tokens) == len(draft.confidence) == most
    whole = tokens + list(draft.tokens)
    for end in range(len(tokens), len(whole)):  # each token followed the same tokens earlier
        assert occurs(whole[end - matched:end + 1], whole[:end])


def test_ngram_prefers_the_longest_then_the_newest_match() -> None:
    drafter = NgramDrafter(2, 4)
    assert propose(drafter, [1, 2, 3, 7, 9, 2, 3, 8, 4, 2, 3, 5, 1, 2, 3], 2).tokens == (7, 9)
    assert propose(drafter, [4, 2, 3, 8, 6, 2, 3, 5, 9, 2, 3], 2).tokens == (5, 9)
    assert propose(drafter, [1, 2, 1, 2, 1, 2], 5).tokens == (1, 2, 1, 2, 1)  # a repeating pattern is continued
    assert propose(drafter, [1], 3).tokens == ()
    assert propose(drafter, [5, 1, 2, 3], 3).tokens == ()


@pytest.mark.parametrize("seed", range(40))
def test_suffix_drafts_are_continuations_of_its_own_salt(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = rng.choice([3, 8, 40])
    drafter = SuffixDrafter(corpus_tokens=rng.choice([50, 400]))
    said: dict[str | None, list[list[int]]] = {None: [], "a": []}
    base = {None: 0, "a": 1000}  # the tokens of the two salts are disjoint
    for _ in range(rng.randint(0, 12)):
        salt = rng.choice([None, "a"])
        tokens = [base[salt] + rng.randrange(vocabulary) for _ in range(rng.randint(2, 60))]
        said[salt].append(tokens)
        drafter.end(request(tokens, salt))
        assert drafter.num_kept <= 400 + 1
    for salt in said:
        tokens = [base[salt] + rng.randrange(vocabulary) for _ in range(rng.randint(1, 40))]
        draft = propose(drafter, tokens, 8, salt)
        assert len(draft.tokens) == len(draft.confidence)
        assert all(0 < sure < 1 for sure in draft.confidence)
        whole = tokens + list(draft.tokens)
        for end in range(len(tokens), len(whole)):
            run = whole[end - 2:end + 1]
            assert any(occurs(run, one) for one in said[salt]) or occurs(run, whole[:end])
        other = "a" if salt is None else None
        stolen = [base[other] + token - base[salt] for token in tokens]
        foreign = propose(drafter, stolen, 8, salt)
        assert all(token in stolen for token in foreign.tokens)


def test_suffix_follows_the_most_frequent_continuation_and_says_how_sure_it_is() -> None:
    drafter = SuffixDrafter()
    for last in (7, 7, 7, 8):
        drafter.end(request([1, 2, 3, last, 5, 6]))
    draft = propose(drafter, [9, 1, 2, 3], 3)
    assert draft.tokens == (7, 5, 6)
    assert draft.confidence[0] == pytest.approx(3 / (4 + 1 / 3))
    assert draft.confidence[1] > draft.confidence[0]
    assert propose(drafter, [9, 1, 2, 3], 8).tokens == (7, 5, 6)  # stops at the end of the request
    assert propose(drafter, [9, 1, 2, 3], 3, "salt").tokens == ()


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    drafter = SuffixDrafter(corpus_tokens=100)
    for first in range(0, 300, 10):
        drafter.end(request(list(range(first, first + 10))))
        assert drafter.num_kept <= 100
    assert propose(drafter, [292, 293, 294], 2).tokens == (295, 296)
    assert propose(drafter, [2, 3, 4], 2).tokens == ()
    drafter.end(request(list(range(1000, 1200)), "a"))  # tokens of the other salt are discarded
    assert drafter.num_kept <= 100
    assert propose(drafter, [1192, 1193, 1194], 2, "a").tokens == (1195, 1196)


def test_many_salts_do_not_add_up() -> None:
    drafter = SuffixDrafter()
    for salt in range(suffix.MOST_SALTS + 20):
        drafter.end(request([1, 2, 3, 4], str(salt)))
    assert drafter.num_kept == suffix.MOST_SALTS * 5


def test_a_ring_that_was_cut_finds_what_is_left() -> None:
    ring = TokenRing()
    for _ in range(5):
        ring.add([1, 2, 3, 4, 5])
    ring.drop(7)
    length, places = ring.matches([9, 2, 3, 4])
    assert length == 3
    assert 1 <= len(places) <= 4
    assert all(ring.token(place) == 5 for place in places)


def test_simulated_acceptance_is_as_asked_and_the_same_each_time() -> None:
    rates = (0.8, 0.5, 0.25)
    drafter = SimulatedDrafter(rates, 50)
    one = request([3, 4, 5])
    assert drafter.propose([(one, 2)]) == drafter.propose([(one, 2)])
    assert len(drafter.propose([(one, 9)])[0].tokens) == 3
    found = [num_accepted(rates, 7, position, 3) for position in range(4000)]
    assert found == [num_accepted(rates, 7, position, 3) for position in range(4000)]
    for place, rate in enumerate(rates):
        assert sum(count > place for count in found) / 4000 == pytest.approx(rate, abs=0.03)
    assert max(num_accepted(rates, 7, position, 1) for position in range(100)) == 1
