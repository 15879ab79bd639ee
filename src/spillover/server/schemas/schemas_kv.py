"""GET /kv/info: what a router must know of a server to predict when it answers."""

from __future__ import annotations

from spillover.server.schemas.schemas_common import AnswerModel


class KvTier(AnswerModel):
    """A tier below the device, of which KV events tell."""

    medium: str  # CPU or STORAGE, as in KV events
    block_seconds: float | None  # to bring one block to the device; None: nothing was moved yet


class KvStore(AnswerModel):
    """A place that computed blocks go to at once, and that other servers may share."""

    name: str  # the socket of a shared pool, or the address of a remote store
    block_seconds: float | None  # to bring one block from there; None: nothing was moved yet


class KvEvents(AnswerModel):
    endpoint: str
    replay_endpoint: str | None
    topic: str


class KvInfo(AnswerModel):
    instance: str  # another one after every start of the engine
    model_identity: str  # root of the block digests, in hex: model, type and layout
    block_size: int  # tokens
    windows: list[int | None]  # by layer group; None: full attention
    prefix_caching: bool
    device_blocks: int
    device_blocks_used: int  # held by requests or kept for reuse
    tiers: list[KvTier]
    stores: list[KvStore]  # nearest first; none without --spill eager
    events: KvEvents | None  # None: none are published
    tokenizer: str | None  # folder or file on the server's machine; None: there is no tokenizer
    tokenizer_digest: str | None  # of what it makes of a text, and of the chat template
    chat_template: str | None  # given in place of the model's own: a file, or its text
    special_tokens_in_user_text: bool
    prefill_token_seconds: float | None  # as lately measured, or as the plan predicts; None: not known
    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int  # of requests without a first token: an upper bound of what is to be computed
    backlog_seconds: float | None  # time that computing these takes at most; None: not known
    max_num_seqs: int
    max_num_batched_tokens: int
