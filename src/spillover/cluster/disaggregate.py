"""Prefill/decode disaggregation: decides whether another replica than the decoding one computes a prompt.

Replicas are not paired: the first replica computes the prompt and returns one token, its blocks go to a store that both
share (a pool on one machine, a remote store between machines), and the second finds them there like any prefix. Missing
blocks are computed, so a replica that dies only costs time. The decision minimises waiting time: until this answer's
first token, and for the next token of every answer that the computation delays. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from spillover.cluster.fleet import Decision, Fleet, Prompt
from spillover.cluster.predict import alike
from spillover.cluster.replica import Replica

Mode = Literal["never", "auto", "always"]
MODES: tuple[Mode, ...] = ("never", "auto", "always")
ASK_SECONDS = 0.005  # cost of a second request in seconds: transmission, admission and one step
LEAST_BLOCKS = 4  # minimum number of blocks to compute; fewer are not worth two requests
PATIENCE = 4.0  # timeout of the first replica as a multiple of its predicted seconds, but no more than ...
LATE_SECONDS = 3.0  # ... this many seconds beyond them; then the second computes the prompt itself
LEAST_PATIENCE = 2.0  # minimum of this timeout in seconds


class Split(NamedTuple):
    """A prompt that is computed by another replica first."""

    prefill: Decision
    decode: Decision  # the decision with its prediction once the blocks are in the store
    seconds: float  # timeout of the first replica


def split(fleet: Fleet, prompt: Prompt, decision: Decision, now: float, mode: Mode,
          exclude: Collection[Replica] = ()) -> Split | None:
    """Return which replica computes the prompt of an answer that `decision` decodes; None if the decoding one does."""
    decoder, keys = decision.replica, decision.keys
    stores, size = decoder.report.stores, keys.block_size
    new = len(keys.keys) - decision.first  # number of whole blocks to compute
    if mode == "never" or not stores or new < LEAST_BLOCKS:
        return None
    others = [replica for replica in fleet.replicas
              if replica is not decoder and replica.usable(now) and not stores.keys().isdisjoint(replica.report.stores)
              and fleet.spaces[replica.place] == fleet.spaces[decoder.place] and replica not in exclude]
    if not others:
        return None
    rates = alike([replica.rates for replica in (decoder, *others)])
    token = rates[0].token_seconds
    load = decoder.load(now)
    rest = (prompt.tokens - len(keys.keys) * size) * token  # time for the tokens after the last whole block
    together = decision.prediction.first_token + load.running * decision.prediction.work
    best: Split | None = None
    least = together if mode == "auto" else float("inf")
    matches = fleet.index.match(keys.keys, [replica.place for replica in others])
    for replica, rate in zip(others, rates[1:], strict=True):
        there, busy = matches[replica.place].blocks, replica.load(now)
        bring = new * next(seconds for name, seconds in stores.items() if name in replica.report.stores)
        compute = max(prompt.tokens - there * size, 1) * rate.token_seconds
        first = decision.prediction._replace(queue=busy.backlog_seconds, restore=0.0, compute=compute,
                                             cached_tokens=there * size, least=rate.least_seconds)
        second = decision.prediction._replace(restore=decision.prediction.restore + bring, compute=rest,
                                              cached_tokens=len(keys.keys) * size)
        apart = (first.first_token + ASK_SECONDS + second.first_token + busy.running * compute
                 + load.running * second.work)
        if apart < least:
            least = apart
            best = Split(Decision(replica, first, keys, there), decision._replace(prediction=second, apart=True),
                         max(LEAST_PATIENCE, min(PATIENCE * first.first_token, first.first_token + LATE_SECONDS)))
    return best
