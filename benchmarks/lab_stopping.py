"""How often is the lab wrong, if it checks after every block and stops at the first one that decides?

    python benchmarks/lab_stopping.py                      # writes benchmarks/results/lab-stopping.json
    python benchmarks/lab_stopping.py --experiments 100    # half a minute

Each simulated experiment compares one arm with the baseline under the default rule (99% confidence, "same within 2%",
at most 80 blocks), by the code that decides real experiments. `ratio` is the true ratio, `spread` the standard
deviation of the logarithm of a block's ratio. The default limits are made for 2.5%; real blocks of short runs on two
shared cores had 5% to 27% (benchmarks/results/lab-engines.json).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from spillover.lab.experiment import CONFIDENCE, EQUIVALENCE, MAX_BLOCKS, MINIMUM_BLOCKS
from spillover.lab.verdict import FASTER, SAME, SLOWER, Comparison, Rule, decide

RULE = Rule(CONFIDENCE, MINIMUM_BLOCKS, EQUIVALENCE)


@dataclass(frozen=True)
class Kind:
    ratio: float
    spread: float
    noise: str = "normal"


KINDS = (
    *(Kind(1.0, spread) for spread in (0.01, 0.025, 0.05, 0.2)),
    *(Kind(1.0, 0.025, noise) for noise in ("heavy tails", "outliers", "skewed", "machine drifts", "arms drift")),
    *(Kind(ratio, spread) for ratio in (1.02, 1 / 1.02) for spread in (0.01, 0.025)),
    Kind(1.02, 0.025, "heavy tails"), Kind(1.02, 0.025, "outliers"),
    *(Kind(ratio, spread) for ratio in (1.05, 1 / 1.05) for spread in (0.025, 0.05)),
    Kind(1.05, 0.025, "heavy tails"), Kind(1.05, 0.025, "outliers"), Kind(5.8, 0.75),
)


@dataclass(frozen=True)
class Outcome:
    ratio: float
    spread: float
    noise: str
    experiments: int
    faster: float
    slower: float
    same: float
    undecided: float
    blocks_mean: float
    blocks_p95: float


def logs_of(kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Return the logarithms of the block ratios of one experiment."""
    size, at = MAX_BLOCKS, np.arange(MAX_BLOCKS)
    noise = rng.normal(0, kind.spread, size=size)
    if kind.noise == "heavy tails":  # t with 3 degrees of freedom
        noise = kind.spread / np.sqrt(3) * rng.standard_t(3, size=size)
    elif kind.noise == "outliers":  # one run of 20 is 20% slower, in either arm
        noise = noise + 0.2 * rng.choice([-1, 0, 1], p=[0.05, 0.9, 0.05], size=size)
    elif kind.noise == "skewed":
        noise = kind.spread * (rng.exponential(1, size=size) - 1)
    elif kind.noise == "machine drifts":  # order alternate: the second arm is slower, which is each in turn
        noise = noise + 0.01 * np.where(at % 2, 1, -1)
    elif kind.noise == "arms drift":  # drift apart by 2% over all blocks, around a true ratio of 1
        noise = noise + rng.choice([-1, 1]) * 0.02 * (at / (size - 1) - 0.5)
    return np.log(kind.ratio) + noise


def one(kind: Kind, rng: np.random.Generator) -> tuple[str, int]:
    ratios = tuple(np.exp(logs_of(kind, rng)).tolist())
    for blocks in range(RULE.minimum_blocks, MAX_BLOCKS + 1):
        verdict = decide([Comparison("w", "arm", "base", "output_throughput", True, ratios[:blocks], (1.0,) * blocks)],
                         RULE)[0]
        if verdict.final:
            break
    return verdict.verdict, verdict.blocks


def simulate(kind: Kind, experiments: int, seed: int) -> Outcome:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    ends = [one(kind, rng) for _ in range(experiments)]
    words = Counter(word for word, _ in ends)
    blocks = [count for _, count in ends]
    share = {word: words[word] / experiments for word in (FASTER, SLOWER, SAME)}
    return Outcome(kind.ratio, kind.spread, kind.noise, experiments, share[FASTER], share[SLOWER], share[SAME],
                   1 - sum(share.values()), float(np.mean(blocks)), float(np.percentile(blocks, 95)))


@click.command()
@click.option("--experiments", default=2_000, show_default=True, help="Number of experiments of each kind.")
@click.option("--processes", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), show_default=True,
              default=Path(__file__).parent / "results" / "lab-stopping.json")
def main(experiments: int, processes: int, seed: int, out: Path) -> None:
    begun = time.time()
    with ProcessPoolExecutor(processes) as pool:
        outcomes = list(pool.map(simulate, KINDS, [experiments] * len(KINDS), [seed] * len(KINDS)))
    click.echo("true ratio  spread  noise            faster  slower    same  undecided  blocks (p95)")
    for each in outcomes:
        click.echo(f"{each.ratio:10.3f} {each.spread:7.1%}  {each.noise:15} {each.faster:7.2%} {each.slower:7.2%} "
                   f"{each.same:7.2%}  {each.undecided:9.2%}  {each.blocks_mean:6.1f} ({each.blocks_p95:.0f})")
    out.write_text(json.dumps({
        "command": f"python benchmarks/lab_stopping.py --experiments {experiments} --seed {seed}",
        "rule": {**asdict(RULE), "max_blocks": MAX_BLOCKS}, "seconds": round(time.time() - begun),
        "outcomes": [asdict(each) for each in outcomes]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
