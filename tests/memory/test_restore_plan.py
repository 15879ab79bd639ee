"""Which blocks to load and which to compute, by the rates alone."""

from hypothesis import given
from hypothesis import strategies as st

from spillover.memory.spill.restore_plan import first_to_load

seconds = st.floats(1e-6, 1.0)


def choose(blocks: int, load: float, compute: float, step: float = 0.0, mode: str = "auto", split: bool = True) -> int:
    return first_to_load(["host"] * blocks, mode, lambda _tier, n: n * load, compute, step, split)


def cost(blocks: int, first: int, load: float, compute: float, step: float) -> float:
    if first in (0, blocks):
        return blocks * (load if first == 0 else compute)
    return max(first * compute, (blocks - first) * load) + step


@given(st.integers(1, 500), seconds, seconds, seconds, st.booleans())
def test_the_choice_is_as_good_as_either_way_alone(blocks: int, load: float, compute: float, step: float,
                                                   split: bool) -> None:
    first = choose(blocks, load, compute, step, split=split)
    assert 0 <= first <= blocks
    assert split or first in (0, blocks)
    rounding = max(load, compute)  # the best place to meet may be within a block
    assert cost(blocks, first, load, compute, step) <= blocks * min(load, compute) + rounding


def test_modes_that_do_not_ask() -> None:
    assert choose(10, 1.0, 1e-6, mode="always") == 0
    assert choose(10, 1e-6, 1.0, mode="never") == 10
    assert choose(0, 1.0, 1.0) == 0


def test_equal_rates_meet_in_the_middle_unless_a_step_costs_more_than_that_saves() -> None:
    assert choose(100, 0.01, 0.01) == 50
    assert choose(100, 0.01, 0.01, step=0.6) == 0
    assert choose(100, 0.001, 0.1) == 0  # a fast link: the front is not worth computing
    assert choose(100, 0.1, 0.001) == 100


def test_a_split_that_promises_little_is_not_tried() -> None:
    """A split that promises little is not tried, because rates are estimates."""
    assert choose(100, 0.01, 0.055) == 0  # a split would save a sixth
    assert choose(100, 0.01, 0.03) == 25  # a split saves a quarter


def test_tiers_of_different_speed_add_up() -> None:
    rates = {"host": 0.001, "disk": 0.1}
    first = first_to_load(["host"] * 50 + ["disk"] * 50, "auto", lambda tier, n: n * rates[tier], 0.05, 0.0, True)
    assert 30 <= first <= 70
