"""Benchmarks of KV tiers: their cost where nothing is reused, and their gain where everything is.

The arms of a comparison take turns, in alternating order, and every ratio is of values measured one after the other, so
that drift of the machine affects both. All arms get the same prompts and must produce the same tokens.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spillover.bench.bounds import Achieved, achieved, workload_bound
from spillover.bench.serving.serve_request import ServeWorkload
from spillover.bench.statistics import Interval, Ratio, median_interval, paired_ratio
from spillover.bench.target import SOURCES, BenchRequest, Completion, GeneratesWithTiers, Limits, TierTraffic
from spillover.bench.throughput import offline, release_memory
from spillover.bench.workloads.workloads import WARMUP, Conversations

Progress = Callable[[int, int], None]  # (turns completed, total turns)
SETTLE_SECONDS = 0.05  # seconds in which threads of the previous arm may still be spinning


@dataclass(frozen=True)
class Arm:
    name: str
    make: Callable[[], GeneratesWithTiers] | None  # factory of the target; None if the arm cannot run here
    note: str = ""  # the arm's configuration, or why it cannot run


class Lineup:
    """Arms that take turns: all open at once, or one at a time if memory is short."""

    def __init__(self, arms: Sequence[Arm], together: bool, warm_up: Callable[[GeneratesWithTiers], None]) -> None:
        self._makers = {arm.name: arm.make for arm in arms if arm.make is not None}
        self._together = together
        self._warm_up = warm_up
        self._open: dict[str, GeneratesWithTiers] = {}
        self._before: dict[str, tuple[TierTraffic, ...]] = {}  # traffic of the warm-up, by arm
        self._moved: dict[str, tuple[TierTraffic, ...]] = {}  # traffic of targets that are closed, by arm
        self.limits: Limits | None = None  # the same for all arms, which share the model
        self.max_num_seqs = 1

    def __enter__(self) -> Lineup:
        try:
            for name in self.names if self._together else ():
                self.target(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        return list(self._makers)

    def order(self, turn: int) -> list[str]:
        """Return the arms, in forward order on even turns and in reverse on odd ones."""
        return self.names[::-1] if turn % 2 else self.names

    def target(self, name: str) -> GeneratesWithTiers:
        if name not in self._open:
            if not self._together:
                for other in list(self._open):
                    self._close(other)
            target = self._open[name] = self._makers[name]()
            self.limits, self.max_num_seqs = target.limits, target.max_num_seqs
            self._warm_up(target)
            self._before[name] = target.tiers()
            gc.collect()
            gc.freeze()  # long-lived objects of engines are not traversed again between turns
        return self._open[name]

    def generate(self, name: str, requests: Sequence[BenchRequest]) -> tuple[list[Completion], float]:
        """Return the completions, and the seconds until copies to other tiers had completed too."""
        target = self.target(name)
        gc.collect()
        time.sleep(SETTLE_SECONDS)
        start = time.perf_counter()
        completions = target.generate(requests)
        return completions, time.perf_counter() - start

    def traffic(self, name: str) -> tuple[TierTraffic, ...]:
        """Return the traffic of an arm since its warm-up."""
        if name not in self._open:
            return self._moved.get(name, ())
        now = _each(self._open[name].tiers(), self._before[name], TierTraffic.since)
        return _each(now, self._moved.get(name, ()), TierTraffic.plus)

    def close(self) -> None:
        for name in list(self._open):
            self._close(name)

    def _close(self, name: str) -> None:
        if name in self._before:
            self._moved[name] = self.traffic(name)
            del self._before[name]
        self._open.pop(name).close()
        gc.unfreeze()
        release_memory()


@dataclass
class Agreement:
    """A check that all arms produce the same tokens for the same prompts."""

    compared: int = 0
    different: list[str] = field(default_factory=list)  # descriptions of the arm and prompt of each difference
    _known: dict[Any, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def compare(self, prompt: Any, arm: str, tokens: tuple[int, ...]) -> None:
        """Compare an arm's tokens with the first arm's. `prompt`: a name of the prompt, the same for every arm."""
        first, expected = self._known.setdefault(prompt, (arm, tokens))
        if first == arm:
            return
        self.compared += 1
        if tokens != expected:
            self.different.append(f"{arm} differs from {first} on {prompt}")

    def as_dict(self) -> dict[str, Any]:
        return {"requests_compared": self.compared, "different": self.different}


@dataclass(frozen=True)
class Repeat:
    """One turn of an arm: all requests at once."""

    elapsed: float  # seconds from the first request to the last token
    settled: float  # seconds until copies to other tiers had completed too
    output_tokens: int
    first_tokens: tuple[float, ...]  # TTFT of each request
    token_times: tuple[float, ...]  # TPOT of each request with more than one token
    sources: dict[str, int]

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.elapsed


@dataclass(frozen=True)
class NoReuseResult:
    arm: Arm
    repeats: tuple[Repeat, ...] = ()
    ratio: Ratio | None = None  # ratio of output tokens per second to the first arm's
    traffic: tuple[TierTraffic, ...] = ()
    limit: Achieved | None = None

    @property
    def output_rate(self) -> Interval:
        return median_interval([repeat.output_rate for repeat in self.repeats])

    @property
    def first_tokens(self) -> list[float]:
        return [seconds for repeat in self.repeats for seconds in repeat.first_tokens]

    @property
    def token_times(self) -> list[float]:
        return [seconds for repeat in self.repeats for seconds in repeat.token_times]

    @property
    def sources(self) -> dict[str, int]:
        return _sum_sources([repeat.sources for repeat in self.repeats])

    def as_dict(self) -> dict[str, Any]:
        header = {"workload": "no-reuse", "arm": self.arm.name, "note": self.arm.note}
        if not self.repeats:
            return header
        return {
            **header,
            "output_tokens_per_second": self.output_rate.median,
            "output_tokens_per_second_interval": self.output_rate.as_dict(),
            "mean_ttft_ms": 1e3 * float(np.mean(self.first_tokens)),
            "mean_tpot_ms": 1e3 * float(np.mean(self.token_times)) if self.token_times else None,
            "num_requests": len(self.first_tokens),
            "ratio_to_first": None if self.ratio is None else self.ratio.as_dict(),
            "tokens_by_source": self.sources,
            "traffic": [traffic.as_dict() for traffic in self.traffic],
            "roofline": None if self.limit is None else self.limit.as_dict(),
            "repeats": [{"elapsed": repeat.elapsed, "settled": repeat.settled, "output_tokens": repeat.output_tokens,
                         "ttft": list(repeat.first_tokens), "tpot": list(repeat.token_times)}
                        for repeat in self.repeats],
        }


def no_reuse(arms: Sequence[Arm], workload: ServeWorkload, repeats: int, together: bool, agreement: Agreement,
             on_turn: Progress = lambda done, total: None) -> list[NoReuseResult]:
    """Measure prompts that are never repeated, as ratios to the first arm over blocks of two opposite repeats."""

    def warm_up(target: GeneratesWithTiers) -> None:
        target.generate(offline(workload, WARMUP))  # fills the device's pool, so that later requests evict

    with Lineup(arms, together, warm_up) as lineup:
        done: dict[str, list[Repeat]] = {name: [] for name in lineup.names}
        for repeat in range(repeats):
            requests = offline(workload, repeat)
            for name in lineup.order(repeat):
                completions, settled = lineup.generate(name, requests)
                done[name].append(_repeat(completions, settled))
                for index, completion in enumerate(completions):
                    agreement.compare(f"prompt {index} of repeat {repeat}", name, completion.token_ids)
                on_turn(sum(map(len, done.values())), repeats * len(done))
        base = [repeat.output_rate for repeat in next(iter(done.values()))]
        results = []
        for arm in arms:
            runs = done.get(arm.name)
            if runs is None:
                results.append(NoReuseResult(arm))
                continue
            rates = [repeat.output_rate for repeat in runs]
            result = NoReuseResult(arm, tuple(runs), None if arm is arms[0] else paired_ratio(rates, base, block=2),
                                   lineup.traffic(arm.name))
            results.append(replace(result, limit=_limit(lineup, workload, result)))
        return results


@dataclass(frozen=True)
class Turn:
    """One question in one chat."""

    chat: int
    turn: int  # 0 for the first turn of the chat
    first_token: float
    sources: dict[str, int]


@dataclass(frozen=True)
class MultiTurnResult:
    arm: Arm
    turns: tuple[Turn, ...] = ()
    speedup: Ratio | None = None  # TTFT of the first arm over this one's, for the same chat and turn
    traffic: tuple[TierTraffic, ...] = ()

    @property
    def warm(self) -> list[Turn]:
        """Return the turns whose prompt, except for the last question, was sent before."""
        return [turn for turn in self.turns if turn.turn > 0]

    @property
    def first_token(self) -> Interval:
        return median_interval([turn.first_token for turn in self.warm])

    @property
    def sources(self) -> dict[str, int]:
        return _sum_sources([turn.sources for turn in self.warm])

    @property
    def hit_rate(self) -> float:
        sources = self.sources
        return 1 - sources["computed"] / max(1, sum(sources.values()))

    def as_dict(self) -> dict[str, Any]:
        header = {"workload": "multi-turn", "arm": self.arm.name, "note": self.arm.note}
        if not self.warm:
            return header
        return {
            **header,
            "warm_ttft_ms": 1e3 * self.first_token.median,
            "warm_ttft_interval": self.first_token.as_dict(),
            "mean_warm_ttft_ms": 1e3 * float(np.mean([turn.first_token for turn in self.warm])),
            "num_warm_requests": len(self.warm),
            "recompute_over_this": None if self.speedup is None else self.speedup.as_dict(),
            "tokens_by_source": self.sources,
            "hit_rate": self.hit_rate,
            "traffic": [traffic.as_dict() for traffic in self.traffic],
            "turns": [{"chat": turn.chat, "turn": turn.turn, "ttft": turn.first_token, "sources": turn.sources}
                      for turn in self.turns],
        }


def multi_turn(arms: Sequence[Arm], workload: Conversations, first_rounds: int, together: bool, agreement: Agreement,
               on_turn: Progress = lambda done, total: None) -> list[MultiTurnResult]:
    """Run one request at a time, chat after chat. The first arm, which recomputes every prompt, stops after
    `first_rounds`; up to then, each TTFT is compared with the first arm's for the same prompt."""

    def warm_up(target: GeneratesWithTiers) -> None:
        prompt = workload.vocabulary.draw(np.random.default_rng([workload.seed, 0]), workload.prefix_len)
        target.generate([BenchRequest(prompt, workload.answer_len)])

    with Lineup(arms, together, warm_up) as lineup:
        done: dict[str, list[Turn]] = {name: [] for name in lineup.names}
        answers: dict[tuple[int, int], tuple[int, ...]] = {}
        rounds = {name: min(first_rounds, workload.rounds) if name == arms[0].name else workload.rounds
                  for name in lineup.names}
        visits = [(turn, chat) for turn in range(workload.rounds) for chat in workload.order(turn)]
        if together:
            plan = [(name, turn, chat) for index, (turn, chat) in enumerate(visits) for name in lineup.order(index)]
        else:  # an arm's tiers exist only while it is open
            plan = [(name, turn, chat) for name in lineup.names for turn, chat in visits]
        plan = [(name, turn, chat) for name, turn, chat in plan if turn < rounds[name]]
        for index, (name, turn, chat) in enumerate(plan, start=1):
            prompt = tuple(token for earlier in range(turn + 1)
                           for token in (*answers.get((chat, earlier - 1), ()), *workload.question(chat, earlier)))
            [completion], _ = lineup.generate(name, [BenchRequest(prompt, workload.answer_len)])
            answers.setdefault((chat, turn), completion.token_ids)
            agreement.compare(f"turn {turn} of chat {chat}", name, completion.token_ids)
            done[name].append(Turn(chat, turn, completion.first_token, dict(completion.sources)))
            on_turn(index, len(plan))
        return [_multi_turn_result(arm, done, arms[0].name, lineup.traffic(arm.name)) for arm in arms]


def _multi_turn_result(arm: Arm, done: dict[str, list[Turn]], first: str,
                       traffic: tuple[TierTraffic, ...]) -> MultiTurnResult:
    result = MultiTurnResult(arm, tuple(done.get(arm.name, ())), None, traffic)
    base = {(turn.chat, turn.turn): turn.first_token for turn in done.get(first, ())}
    pairs = [(base[turn.chat, turn.turn], turn.first_token) for turn in result.warm if (turn.chat, turn.turn) in base]
    if not pairs or arm.name == first:
        return result
    return replace(result, speedup=paired_ratio([computed for computed, _ in pairs], [own for _, own in pairs]))


def _repeat(completions: Sequence[Completion], settled: float) -> Repeat:
    return Repeat(
        elapsed=max(done.first_token + done.decode for done in completions),
        settled=settled,
        output_tokens=sum(done.output_tokens for done in completions),
        first_tokens=tuple(done.first_token for done in completions),
        token_times=tuple(done.decode / (done.output_tokens - 1) for done in completions if done.output_tokens > 1),
        sources=_sum_sources([done.sources for done in completions]),
    )


def _limit(lineup: Lineup, workload: ServeWorkload, result: NoReuseResult) -> Achieved | None:
    """Return how close the median time came to the limit of the machine."""
    if lineup.limits is None:
        return None
    requests = offline(workload, 0)  # all repeats have the same lengths
    bound = workload_bound(lineup.limits, requests, [0] * len(requests), lineup.max_num_seqs)
    return achieved(float(np.median([repeat.elapsed for repeat in result.repeats])), bound, lineup.limits)


def _sum_sources(counts: Sequence[Any]) -> dict[str, int]:
    return {source: sum(count.get(source, 0) for count in counts) for source in SOURCES}


def _each(now: Sequence[TierTraffic], other: Sequence[TierTraffic],
          combine: Callable[[TierTraffic, TierTraffic], TierTraffic]) -> tuple[TierTraffic, ...]:
    """Combine two reports tier by tier; a tier that is missing in `other` stays unchanged."""
    by_name = {tier.name: tier for tier in other}
    return tuple(combine(tier, by_name[tier.name]) if tier.name in by_name else tier for tier in now)
