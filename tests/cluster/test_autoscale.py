"""The number of replicas: enough for a constant load, no more than needed, and without oscillation."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from spillover.cluster.fleet import Fleet, Prompt
from spillover.cluster.owned.autoscale import UP_SECONDS, Autoscaler, Observed, ScaleSettings, observe
from spillover.cluster.policy import PredictedTime
from spillover.cluster.replica import ReplicaReport

STEP = 0.5


@dataclass
class World:
    """A fleet in simulated time: prompts for `load` replicas arrive, and a replica takes `start_seconds` to start."""

    scale: ScaleSettings
    start_seconds: float
    replicas: int
    backlog: float = 0.0
    now: float = 0.0
    sizes: list[int] = field(default_factory=list)
    starting: list[float] = field(default_factory=list)  # time at which each will be ready

    def run(self, load: float, seconds: float) -> None:
        if not hasattr(self, "scaler"):
            self.scaler = Autoscaler(self.scale)
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            self.starting = [ready for ready in self.starting if ready > self.now]
            ready = self.replicas - len(self.starting)
            self.backlog = max(self.backlog + (load - ready) * STEP, 0.0)
            seen = Observed(self.replicas, ready, len(self.starting), self.backlog, min(load / ready, 1.0))
            target = self.scaler.decide(seen, self.now)
            if target > self.replicas:
                self.starting += [self.now + self.start_seconds] * (target - self.replicas)
            self.replicas = target
            self.sizes.append(target)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    least = draw(st.integers(1, 4))
    scale = ScaleSettings(least, draw(st.integers(least, 12)), draw(st.floats(0.5, 5)), draw(st.floats(1, 60)))
    return World(scale, draw(st.floats(0, 60)), draw(st.integers(scale.least, scale.most)))


@settings(max_examples=60, deadline=None)
@given(worlds(), st.floats(0, 10))
def test_a_load_that_stays_gets_what_it_needs_and_then_nothing_changes(world: World, load: float) -> None:
    world.run(load, 1500)
    settled = world.sizes[-100:]
    assert len(set(settled)) == 1, settled
    assert all(world.scale.least <= size <= world.scale.most for size in world.sizes)
    rest = settled[-1] - 1
    if rest >= world.scale.least and load <= 0.6 * rest and world.backlog == 0:
        raise AssertionError(f"{settled[-1]} replicas for a load of {load}")  # no replica is idle forever ...
    if load < world.scale.most and world.backlog > world.scale.backlog_seconds * settled[-1] + 1e-6:
        assert settled[-1] == world.scale.most  # ... and no request waits forever: the largest fleet is catching up
        before = world.backlog
        world.run(load, 60)
        assert world.backlog <= before


@settings(max_examples=30, deadline=None)
@given(worlds(), st.lists(st.floats(0, 10), min_size=1, max_size=4))
def test_after_any_loads_an_idle_fleet_becomes_the_least(world: World, loads: list[float]) -> None:
    for load in loads:
        world.run(load, 60)
    world.backlog = 0.0
    world.run(0.0, 70 * 13 + 120)
    assert world.replicas == world.scale.least


@given(st.integers(1, 8), st.floats(0, 1000), st.floats(0, UP_SECONDS * 0.99))
def test_a_burst_that_is_soon_over_starts_nothing(count: int, backlog: float, seconds: float) -> None:
    scaler = Autoscaler(ScaleSettings(1, 16, 1.0, 1e9))
    for now in (0.0, seconds / 2, seconds):
        assert scaler.decide(Observed(count, count, 0, backlog, 1.0), now) == count
    assert scaler.decide(Observed(count, count, 0, 0.0, 0.0), seconds + 0.1) == count
    assert scaler.decide(Observed(count, count, 0, backlog, 1.0), seconds + UP_SECONDS) == count


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 1000), st.floats(0, 1), st.floats(0, 2))
def test_nothing_is_decided_while_replicas_start_and_growth_is_bounded(count: int, starting: int, backlog: float,
                                                                       busy: float, occupied: float) -> None:
    scaler = Autoscaler(ScaleSettings(1, 64, 1.0, 0.0))
    for now in range(10):
        seen = Observed(count + starting, count, starting, backlog, busy, occupied)
        assert scaler.decide(seen, float(now)) == count + starting
    for now in range(10, 20):
        target = scaler.decide(Observed(count, count, 0, backlog, busy, occupied), float(now))
        assert count - 1 <= target <= 2 * count


def test_a_replica_that_is_lost_or_full_keeps_the_others() -> None:
    scaler = Autoscaler(ScaleSettings(1, 4, 1.0, 1.0))
    for now in range(10):  # one is being restarted: the load is not yet meaningful
        assert scaler.decide(Observed(3, 2, 0), float(now)) == 3
    for now in range(10, 20):  # no prompt waits, but decoding requests occupy the batch
        assert scaler.decide(Observed(3, 3, 0, 0.0, 0.0, 0.5), float(now)) == 3
    assert [scaler.decide(Observed(3, 3, 0, 0.0, 0.0, 0.3), float(now)) for now in (20, 21)] == [3, 2]


def test_what_is_seen_of_a_fleet_is_what_its_replicas_have_to_do() -> None:
    fleet = Fleet(PredictedTime())
    for place in range(3):
        replica = fleet.add(f"replica-{place}")
        replica.ready = place < 2
        replica.update(ReplicaReport(token_seconds=0.01, max_num_seqs=2))
    for _ in range(3):
        prompt = Prompt(100)
        decision = fleet.decide(prompt, 0.0)
        assert decision is not None
        fleet.send(prompt, decision, 0.0)
    seen = observe(fleet, 0.0, [0, 1, 2], {2})
    assert seen[:3] == (3, 2, 1)
    assert seen.backlog_seconds == 3.0  # three prompts of a second each
    assert seen.occupied == 0.75
    assert 0 < seen.busy <= 1
    assert observe(fleet, 0.0, [0]).replicas == 1
    fleet.replicas[0].draining = True
    assert observe(fleet, 0.0, [0]).ready == 0
