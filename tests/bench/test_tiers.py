"""Alternating arms: what each is sent, how they are compared, and what the tables show. No model, no clock."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from spillover.bench import tiers
from spillover.bench.restart import RestartResult, folder_bytes, run_stage
from spillover.bench.target import BenchRequest, TierTraffic
from spillover.bench.throughput import offline
from spillover.bench.tiers import Agreement, Arm, multi_turn, no_reuse
from spillover.bench.tiers_report import (
    agreement_line,
    multi_turn_table,
    no_reuse_table,
    restart_table,
    traffic_table,
)
from spillover.bench.workloads.workloads import Conversations, Vocabulary
from spillover.bench.workloads.workloads_synthetic import random_workload
from support.lab.fake_target import FakeTierTarget

RANDOM = random_workload(Vocabulary(1000), 3, input_len=12, output_len=5)
CHATS = Conversations(Vocabulary(1000), count=4, rounds=3, prefix_len=40, question_len=8, answer_len=4)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SETTLE_SECONDS", 0.0)


class Made:
    """Arms, and all targets that were created for them."""

    def __init__(self) -> None:
        self.targets: dict[str, list[FakeTierTarget]] = {}
        self.most_open = 0

    def arm(self, name: str, **options: object) -> Arm:
        return Arm(name, self._maker(name, options))

    def _maker(self, name: str, options: dict[str, object]) -> Callable[[], FakeTierTarget]:
        def make() -> FakeTierTarget:
            target = FakeTierTarget(**options)  # type: ignore[arg-type]
            self.targets.setdefault(name, []).append(target)
            self.most_open = max(self.most_open, sum(not each.closed for made in self.targets.values()
                                                     for each in made))
            return target

        return make


def shown(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


@pytest.mark.parametrize("together", [True, False])
def test_every_arm_gets_the_same_prompts_and_none_twice(together: bool) -> None:
    made, agreement = Made(), Agreement()
    arms = [made.arm("off"), made.arm("host", host=True)]
    results = no_reuse(arms, RANDOM, 4, together, agreement)
    sent = {name: [request.prompt_token_ids for target in targets for call in target.calls for request in call]
            for name, targets in made.targets.items()}
    warm_up = {request.prompt_token_ids for request in offline(RANDOM, -1)}
    measured = {name: [prompt for prompt in prompts if prompt not in warm_up] for name, prompts in sent.items()}
    assert sorted(measured["off"]) == sorted(measured["host"])
    assert len(set(measured["off"])) == len(measured["off"]) == 12
    assert results[1].sources["host"] == 0
    assert agreement.compared == 12
    assert not agreement.different
    assert all(target.closed for targets in made.targets.values() for target in targets)
    assert made.most_open == (2 if together else 1)
    # Three requests of 12 tokens, with stored blocks that end at 4 and 8; the warm-up is not counted.
    assert results[1].traffic[0].bytes_in == 12 * 2 * 40


def test_the_ratio_is_of_rates_that_stand_beside_each_other() -> None:
    made = Made()
    results = no_reuse([made.arm("off"), made.arm("host", host=True, slowness=1.25)], RANDOM, 4, True, Agreement())
    assert results[0].ratio is None
    ratio = results[1].ratio
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.8, 0.8, 0.8))
    assert ratio.count == 2  # blocks of two repeats
    off = results[0]
    assert off.repeats[0].elapsed == pytest.approx(0.12 + 0.4)  # to the last token of the slowest request
    assert off.output_rate.median == pytest.approx(15 / 0.52)
    assert off.token_times == pytest.approx([0.1] * 12)
    assert off.first_tokens == pytest.approx([0.12] * 12)
    assert off.limit is not None
    text = shown(no_reuse_table(results, "title"))
    assert "28.8 (n=4)" in text
    assert "120.0 (n=12)" in text
    assert "0.800 (0.800 .. 0.800, n=2)" in text
    as_json = json.loads(json.dumps(results[1].as_dict()))
    assert as_json["ratio_to_first"]["value"] == pytest.approx(0.8)
    assert as_json["mean_ttft_ms"] == pytest.approx(150)
    assert len(as_json["repeats"]) == 4


def test_arms_go_forward_and_backward_in_turn() -> None:
    turns: list[str] = []

    class Noting(FakeTierTarget):
        name = ""

        def generate(self, requests: object, progress: bool = False) -> object:  # type: ignore[override]
            turns.append(self.name)
            return super().generate(requests, progress)  # type: ignore[arg-type]

    def maker(name: str) -> Callable[[], FakeTierTarget]:
        def make() -> FakeTierTarget:
            target = Noting()
            target.name = name
            return target

        return make

    no_reuse([Arm(name, maker(name)) for name in "abc"], RANDOM, 3, True, Agreement())
    assert "".join(turns) == "abc" + "abc" + "cba" + "abc"  # the warm-ups, and three repeats


@pytest.mark.parametrize("together", [True, False])
def test_chats_hold_what_was_said_and_only_the_first_round_is_cold(together: bool) -> None:
    made, agreement = Made(), Agreement()
    results = multi_turn([made.arm("off"), made.arm("host", host=True)], CHATS, 2, together, agreement)
    off, host = results
    assert len(off.turns) == 2 * 4
    assert len(host.turns) == 3 * 4
    assert len(host.warm) == 2 * 4
    assert agreement.compared == 2 * 4
    # Prompts of 60 and 72 tokens; the whole blocks before the last question are stored.
    assert host.sources == {"computed": 4 * (16 + 16), "device": 0, "host": 4 * (44 + 56), "pool": 0, "disk": 0,
                            "remote": 0}
    assert host.hit_rate == pytest.approx(100 / 132)
    prompts = [request.prompt_token_ids for call in made.targets["host"][0].calls[1:] for request in call]
    for prompt in prompts:
        if len(prompt) > 48:
            assert prompt[:len(prompt) - 12] in prompts  # without a question of 8 and the previous answer of 4
    # The same chat and turn: 60 tokens computed, compared with 16 computed and 44 restored.
    assert host.speedup is not None
    assert host.speedup.value == pytest.approx(0.6 / (0.16 + 0.044))
    assert host.speedup.count == 4
    text = shown(multi_turn_table(results, "title"))
    assert "2.94 (2.94 .. 2.94, n=4)" in text
    assert "75.8%" in text
    assert "remote" not in text  # an unused column
    json.dumps([result.as_dict() for result in results])


def test_nobody_speaks_twice_in_a_row() -> None:
    chats = Conversations(Vocabulary(1000), count=3, rounds=40)
    visits = [chat for turn in range(40) for chat in chats.order(turn)]
    assert all(a != b for a, b in itertools.pairwise(visits))
    assert all(sorted(chats.order(turn)) == [0, 1, 2] for turn in range(40))


def test_an_arm_that_answers_otherwise_is_named() -> None:
    made, agreement = Made(), Agreement()
    no_reuse([made.arm("off"), made.arm("host", host=True, wrong=True)], RANDOM, 1, True, agreement)
    assert len(agreement.different) == 3
    assert "DIFFER" in agreement_line(agreement)
    assert "host differs from off" in agreement_line(agreement)


def test_an_arm_that_cannot_run_says_what_it_needs() -> None:
    made = Made()
    arms = [made.arm("off"), Arm("host+remote", None, "install a server")]
    assert "host+remote: install a server" in shown(no_reuse_table(no_reuse(arms, RANDOM, 2, True, Agreement()), "a"))
    chats = multi_turn(arms, CHATS, 2, True, Agreement())
    assert "host+remote: install a server" in shown(multi_turn_table(chats, "b"))
    assert chats[1].as_dict() == {"workload": "multi-turn", "arm": "host+remote", "note": "install a server"}


def test_targets_are_closed_when_one_does_not_open() -> None:
    made = Made()

    def fails() -> FakeTierTarget:
        raise MemoryError

    with pytest.raises(MemoryError):
        no_reuse([made.arm("off"), Arm("host", fails)], RANDOM, 1, True, Agreement())
    assert made.targets["off"][0].closed


def test_traffic_is_shown_by_way_beside_its_link() -> None:
    before = TierTraffic("disk", 1, 1000, 0, 1.0, 0.0, 1)
    now = TierTraffic("disk", 5, 4_001_000, 3_000_000, 3.0, 1.0, 2, link_in=4e6, link_out=None)
    moved = now.since(before)
    assert moved.directions() == [("in", 4_000_000, 2e6, 4e6), ("out", 3_000_000, 3e6, None)]
    assert moved.plus(moved).bytes_in == 8_000_000
    assert moved.as_dict()["in"]["percent_of_link"] == pytest.approx(50)
    text = shown(traffic_table({"host+disk": [moved]}))
    to, back = [line for line in text.splitlines() if "disk" in line]
    assert ("to disk" in to, "50%" in to, "2.0 MB/s" in to) == (True, True, True)
    assert ("from disk" in back, "3.0 MB/s" in back) == (True, True)


def test_stages_of_a_restart_are_rows_against_the_cold_one() -> None:
    target = FakeTierTarget(host=True)
    requests = [BenchRequest(tuple(range(start, start + 41)), 3) for start in (0, 100)]
    cold, warm = run_stage("cold", target, requests, ready=1.5), run_stage("warm", target, requests)
    assert cold.sources["computed"] == 82
    assert warm.sources == {"computed": 2, "device": 0, "host": 80, "pool": 0, "disk": 0, "remote": 0}
    assert cold.elapsed == pytest.approx(2 * (0.41 + 0.2))
    assert cold.token_rate == pytest.approx((82 + 6) / cold.elapsed)
    result = RestartResult(64, (cold, warm), blocks=20, disk_bytes=20 << 10)
    assert result.bytes_per_block == 1024
    text = shown(restart_table([result], "title"))
    rows = [line for line in text.splitlines() if line.startswith("│ 64")]
    assert ("410.0 (n=2)" in rows[0], "1.50 s" in rows[0]) == (True, True)
    assert f"{warm.token_rate / cold.token_rate:.2f}" in rows[1]
    assert "1.0 KiB" in rows[1]
    assert json.loads(json.dumps(result.as_dict()))["stages"][1]["stage"] == "warm"


def test_a_sparse_file_counts_what_it_really_takes(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(64 << 20)
        file.write(b"x" * 4096)
    assert 4096 <= folder_bytes(tmp_path) < 1 << 20
