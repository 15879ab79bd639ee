"""GET /kv/info: block identity, measured rates and the queue, for a router that predicts this server's latency."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from spillover.engine.config import EngineConfig
from spillover.memory.kv.event_wire import CPU, STORAGE
from spillover.memory.shared_pool.wire import socket_path
from spillover.memory.spill.report import TierReport
from spillover.memory.tiers.remote_address import RemoteAddress
from spillover.server.api.documents import refusals
from spillover.server.front import Front, front_of
from spillover.server.schemas.schemas_kv import KvEvents, KvInfo, KvStore, KvTier

MEDIA = {"host": CPU, "disk": STORAGE}  # names in KV events of the tiers that they cover

router = APIRouter()


@router.get("/kv/info", response_model=KvInfo, responses=refusals(statuses=(401, 500, 503)))
async def kv_info(http: HttpRequest) -> Response:
    front = front_of(http)
    front.require_engine()
    return Response(info_of(front).model_dump_json(), media_type="application/json")


def info_of(front: Front) -> KvInfo:
    client, now = front.client, front.client.latest_stats()
    info = client.info
    events, plan = info.config.kv_events, info.plan
    token_seconds = now.prefill_token_seconds or None
    predicted = plan.placement.predicted if plan.placement is not None else None
    if token_seconds is None and predicted is not None and predicted.prefill_tokens_per_second > 0:
        token_seconds = 1 / predicted.prefill_tokens_per_second
    waiting = client.waiting_prompt_tokens
    return KvInfo(
        instance=f"{info.pid}-{info.restarts}-{info.started:.3f}",
        model_identity=info.identity.hex(),
        block_size=plan.block_size,
        windows=list(plan.windows),
        prefix_caching=info.config.enable_prefix_caching,
        device_blocks=now.blocks_total or plan.num_blocks,
        device_blocks_used=now.blocks_total - now.blocks_free,
        tiers=[KvTier(medium=MEDIA[tier.name], block_seconds=_block_seconds(tier, plan.slot_bytes))
               for tier in now.kv_tiers if tier.name in MEDIA],
        stores=_stores(info.config, now.kv_tiers, plan.slot_bytes),
        events=None if events is None else KvEvents(endpoint=events.endpoint, replay_endpoint=events.replay_endpoint,
                                                    topic=events.topic),
        tokenizer=None if client.tokenizer is None else str(info.config.tokenizer or info.model_path),
        tokenizer_digest=None if client.tokenizer is None else client.tokenizer.fingerprint,
        chat_template=info.config.chat_template,
        special_tokens_in_user_text=front.settings.special_tokens_in_user_text,
        prefill_token_seconds=token_seconds,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        waiting_prompt_tokens=waiting,
        backlog_seconds=None if token_seconds is None else waiting * token_seconds,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )


def _stores(config: EngineConfig, tiers: Sequence[TierReport], nbytes: int) -> list[KvStore]:
    """Return the stores in which other servers can find this server's blocks as soon as they are computed."""
    names = {}
    if config.host_pool is not None:
        names["pool"] = str(socket_path(config.host_pool))
    if config.remote is not None:
        names["remote"] = RemoteAddress.parse(config.remote).shown
    seconds = {tier.name: _block_seconds(tier, nbytes) for tier in tiers}
    return [KvStore(name=name, block_seconds=seconds.get(tier)) for tier, name in names.items()
            if config.spill == "eager"]


def _block_seconds(tier: TierReport, nbytes: int) -> float | None:
    rate = tier.rate_out or tier.link_out
    return nbytes / rate if rate else None
