"""GET /kv/info: the state of a server from which a router predicts its latency."""

from __future__ import annotations

from spillover.server.schemas.schemas_common import AnswerModel


class KvTier(AnswerModel):
    """A tier below the device that KV events cover."""

    medium: str  # CPU or STORAGE, as in KV events
    block_seconds: float | None  # seconds to copy one block to the device; None if none was copied yet


class KvStore(AnswerModel):
    """A store that computed blocks are written to at once, and that other servers may share."""

    name: str  # the socket of a shared pool, or the address of a remote store
    block_seconds: float | None  # seconds to copy one block from the store; None if none was copied yet


class KvEvents(AnswerModel):
    endpoint: str
    replay_endpoint: str | None
    topic: str


class KvInfo(AnswerModel):
    instance: str  # changes with every start of the engine
    model_identity: str  # root of the block digests, in hex: model, type and layout
    block_size: int  # tokens per block
    windows: list[int | None]  # sliding window per layer group; None for full attention
    prefix_caching: bool
    device_blocks: int
    device_blocks_used: int  # blocks held by requests or kept for reuse
    tiers: list[KvTier]
    stores: list[KvStore]  # nearest first; empty without --spill eager
    events: KvEvents | None  # None if no KV events are published
    tokenizer: str | None  # folder or file on the server's machine; None if there is no tokenizer
    tokenizer_digest: str | None  # digest of the tokenizer's behaviour and the chat template
    chat_template: str | None  # file or text given in place of the model's own template
    special_tokens_in_user_text: bool
    prefill_token_seconds: float | None  # recently measured, or predicted by the plan; None if unknown
    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int  # of requests without a first token: an upper bound of tokens left to compute
    backlog_seconds: float | None  # upper bound of the time to compute these tokens; None if unknown
    max_num_seqs: int
    max_num_batched_tokens: int
