"""Conversion of requests and their updates to and from the messages between the processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

from spillover.engine.output.outputs import TokenSources
from spillover.engine.requests.request import Request, Status
from spillover.engine.requests.sampling_params import SamplingParams
from spillover.engine.requests.token_ids import from_bytes, to_bytes
from spillover.errors import RequestError
from spillover.server.engine.protocol import Add, FromEngine, ToEngine, Update, WireRequest

_SEED_MASK = 2**64 - 1  # the sampler reads only these bits of a seed

encode = msgspec.msgpack.Encoder(enc_hook=to_bytes).encode  # encodes messages of both directions
decode_to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine, dec_hook=from_bytes).decode
decode_from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode


def encode_add(requests: Mapping[int, Request]) -> bytes:
    """Encode a request's sequences by their ids, the parent first. Raise RequestError if a value cannot be encoded.

    The message is decoded once here, so that only decodable messages are sent: one that the engine cannot decode would
    end the requests of all clients.
    """
    parent = next(iter(requests))
    try:
        message = encode(Add([_to_wire(id, request, parent) for id, request in requests.items()]))
        decode_to_engine(message)
    except (msgspec.ValidationError, OverflowError, TypeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"a parameter of the request has the wrong type or is out of range: {error}") from error
    return message


def _to_wire(id: int, request: Request, parent: int) -> WireRequest:
    return WireRequest(
        id=id,
        prompt=request.token_ids[:request.num_prompt],
        params=_without_seed(request.params),
        stop_ids=sorted(request.stop_ids),
        seed=request.seed & _SEED_MASK,
        priority=request.priority,
        cache_salt=request.cache_salt,
        arrived=request.arrived,
        parent=None if id == parent else parent,
    )


def _without_seed(params: SamplingParams) -> SamplingParams:
    """Remove a client's seed, which may be too large to encode; the request has its own seed derived from it."""
    return params if params.seed is None else dataclasses.replace(params, seed=None)


class Sequence:
    """A request in the engine process, and how much of it was sent to the front."""

    def __init__(self, wire: WireRequest, parent: Request | None) -> None:
        self.id = wire.id
        self.request = Request(
            request_id=str(wire.id),
            prompt=wire.prompt,
            params=wire.params,
            stop_ids=frozenset(wire.stop_ids),
            seed=wire.seed,
            priority=wire.priority,
            cache_salt=wire.cache_salt,
            parent=parent,
            arrived=wire.arrived,
        )
        self._num_sent = len(wire.prompt)  # tokens sent to the front so far, including the prompt's

    def update(self) -> Update:
        """Return the changes since the last call."""
        request = self.request
        new = request.token_ids[self._num_sent:].tolist()
        first = self._num_sent == request.num_prompt
        self._num_sent += len(new)
        update = Update(self.id, new, request.num_preemptions)
        if request.params.logprobs is not None:
            update.logprobs = request.logprobs[len(request.logprobs) - len(new):]
        if first and request.params.prompt_logprobs is not None:
            update.prompt_logprobs = request.prompt_logprobs
        if first or request.finish_reason is not None:
            update.sources = request.sources
            update.times = (request.scheduled, request.first_token, request.finished, request.restore_started,
                            request.restore_ended)
            update.finish_reason, update.stop_reason = request.finish_reason, request.stop_reason
            update.drafts = request.drafts if request.drafts.drafts else None
            update.error = request.error
        return update


def mirror(request: Request, update: Update) -> None:
    """Apply an engine's update to the front's copy of a request."""
    request.token_ids.extend(update.token_ids)
    request.num_preemptions = update.num_preemptions
    if update.logprobs is not None:
        request.logprobs += update.logprobs
    if update.prompt_logprobs is not None:
        request.prompt_logprobs = update.prompt_logprobs
    if update.sources is not None:
        request.sources = update.sources
    if update.times is not None:
        (request.scheduled, request.first_token, request.finished, request.restore_started,
         request.restore_ended) = update.times
    if update.drafts is not None:
        request.drafts = update.drafts
    if update.finish_reason is not None:
        request.finish_reason, request.stop_reason = update.finish_reason, update.stop_reason
        request.status = Status.FINISHED


def added(left: TokenSources, right: TokenSources) -> TokenSources:
    return TokenSources(left.computed + right.computed, left.device + right.device, left.host + right.host,
                        left.pool + right.pool, left.disk + right.disk, left.remote + right.remote)
