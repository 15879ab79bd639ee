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
from spillover.cluster.predict import equalised_rates
from spillover.cluster.replica import Replica

Mode = Literal["never", "auto", "always"]
MODES: tuple[Mode, ...] = ("never", "auto", "always")
REQUEST_SECONDS = 0.005  # cost of a second request in seconds: transmission, admission and one step
MIN_BLOCKS = 4  # minimum number of blocks to compute; fewer are not worth two requests
TIMEOUT_FACTOR = 4.0  # timeout of the first replica as a multiple of its predicted seconds, but no more than ...
TIMEOUT_MARGIN_SECONDS = 3.0  # ... this many seconds beyond them; then the second computes the prompt itself
MIN_TIMEOUT_SECONDS = 2.0  # minimum of this timeout in seconds


class Split(NamedTuple):
    """A prompt that is computed by another replica first."""

    prefill: Decision
    decode: Decision  # the decision with its prediction once the blocks are in the store
    timeout: float  # timeout of the first replica in seconds


def split(fleet: Fleet, prompt: Prompt, decision: Decision, now: float, mode: Mode,
          exclude: Collection[Replica] = ()) -> Split | None:
    """Return which replica computes the prompt of an answer that `decision` decodes; None if the decoding one does."""
    decoder, keys = decision.replica, decision.keys
    stores, size = decoder.report.stores, keys.block_size
    new = len(keys.keys) - decision.first  # number of whole blocks to compute
    if mode == "never" or not stores or new < MIN_BLOCKS:
        return None
    others = [replica for replica in fleet.replicas
              if replica is not decoder and replica.usable(now) and not stores.keys().isdisjoint(replica.report.stores)
              and fleet.spaces[replica.index] == fleet.spaces[decoder.index] and replica not in exclude]
    if not others:
        return None
    rates = equalised_rates([replica.rates for replica in (decoder, *others)])
    token = rates[0].token_seconds
    load = decoder.load(now)
    rest = (prompt.tokens - len(keys.keys) * size) * token  # time for the tokens after the last whole block
    local_seconds = decision.prediction.first_token + load.running * decision.prediction.work
    best: Split | None = None
    least = local_seconds if mode == "auto" else float("inf")
    matches = fleet.prefix_index.match(keys.keys, [replica.index for replica in others])
    for replica, rate in zip(others, rates[1:], strict=True):
        cached, prefill_load = matches[replica.index].blocks, replica.load(now)
        transfer = new * next(each for name, each in stores.items() if name in replica.report.stores)
        compute = max(prompt.tokens - cached * size, 1) * rate.token_seconds
        first = decision.prediction._replace(queue=prefill_load.backlog_seconds, restore=0.0, compute=compute,
                                             cached_tokens=cached * size, least=rate.least_seconds)
        second = decision.prediction._replace(restore=decision.prediction.restore + transfer, compute=rest,
                                              cached_tokens=len(keys.keys) * size)
        seconds = (first.first_token + REQUEST_SECONDS + second.first_token + prefill_load.running * compute
                   + load.running * second.work)
        if seconds < least:
            least = seconds
            timeout = min(TIMEOUT_FACTOR * first.first_token, first.first_token + TIMEOUT_MARGIN_SECONDS)
            best = Split(Decision(replica, first, keys, cached),
                         decision._replace(prediction=second, remote_prefill=True), max(timeout, MIN_TIMEOUT_SECONDS))
    return best
