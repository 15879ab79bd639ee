"""Every engine flag with its name, default and help, from which both the command line and `LLM(...)` are made."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from spillover.engine.events.config import KVEventsConfig
from spillover.engine.speculation.config import METHODS, SpeculativeConfig
from spillover.engine.step_cost import StepCost
from spillover.engine.vllm_flags import is_redundant
from spillover.errors import SpilloverError, did_you_mean
from spillover.memory.budgets import parse_disk
from spillover.memory.shared_pool.wire import socket_path
from spillover.plan.placement import MANAGED
from spillover.units import UNITS_HELP, parse_budget, parse_bytes


def _flag(default: Any, text: str, choices: tuple[str, ...] = (), aliases: Mapping[str, str] | None = None) -> Any:
    """Make a field with its help. `aliases`: alternative names of choices, which are accepted but not listed."""
    return field(default=default, metadata={"help": text, "choices": choices, "aliases": aliases or {}})


@dataclass(frozen=True)
class EngineConfig:
    """All flags of an engine. None: the planner chooses a value for model and machine, printed with the plan."""

    model: str | None = _flag(None, "Model: a name from `spill pull`, a Hugging Face folder, a GGUF file or a hub id.")
    tokenizer: str | None = _flag(None, "Tokenizer folder or GGUF file, if not the model's own.")
    chat_template: str | None = _flag(None, "Chat template, if not the model's own: a file, or a Jinja text.")
    skip_tokenizer_init: bool = _flag(False, "Accept and return token ids only, and load no tokenizer.")
    load_format: str = _flag("auto", "Where weights come from: auto reads the checkpoint; dummy makes random weights "
                                     "of the true shape; null has no model and answers at once with meaningless "
                                     "words, to measure everything else.",
                             ("auto", "dummy", "null"))
    dtype: str = _flag("auto", "Compute type; auto is float32 on a CPU and the stored type on a GPU (bfloat16 with "
                               "codes of a GGUF file).",
                       ("auto", "float32", "bfloat16", "float16"))
    weight_codes: str = _flag("keep", "How to hold weights that a GGUF file stores in codes: keep computes with the "
                                      "codes where the device can; widen dequantises them to the compute type.",
                              ("keep", "widen"))
    quantization: str | None = _flag(None, "Quantise the linears of unquantised layers while they load: fp8 (e4m3, a "
                                           "scale per row), int8 or int4 (a scale per 128 columns, or per 64 or 32 "
                                           "where 128 does not divide a row). `spill quantize` writes the same to a "
                                           "folder. Quantised files are recognised without it.",
                                     ("fp8", "int8", "int4"))
    calibrate: str | None = _flag(None, "Text to calibrate --quantization int4 or int8 on, which lowers its error: a "
                                        "file as for `spill quantize`. The first start quantises the model, which "
                                        "takes minutes or more; the result stays in the model cache.")
    device: str = _flag("auto", "Device to compute on.", ("auto", "cpu", "cuda"))
    tensor_parallel_size: int = _flag(1, "Ranks: processes that each hold a part of every layer and compute each step "
                                         "together: on CUDA one per device, else on the CPU. --gpu-memory is each "
                                         "rank's.")
    ranks_share_device: bool = _flag(False, "Let several ranks share a CUDA device, which is slower than one rank; for "
                                            "tests.")
    enable_expert_parallel: bool = _flag(False, "With several ranks: give each of them whole experts instead of a "
                                                "part of every expert.")
    gpu_memory: str | None = _flag(None, "Memory budget of the device tier for weights, KV cache and workspace: a size "
                                         f"such as 8GB ({UNITS_HELP}), or a share of the tier such as 90%.")
    weights: str = _flag("auto", "How to hold weights that do not fit on the device: auto keeps all of them there if "
                                 "they fit, otherwise chooses what measured rates predict to be fastest; resident "
                                 "refuses such a model; demand copies weights when they are used; sequential streams "
                                 "layers ahead of use; experts pages experts through slots; host-experts[:N] computes "
                                 "the experts of the first N layers on the host; pinned keeps a fixed set of experts "
                                 "on the device; uvm computes with weights in CUDA managed memory, whose pages are "
                                 "moved when touched, uvm-prefetch moves them before the layer runs, uvm-advise "
                                 "marks them as read-mostly (all three emulated on a CPU).")
    uvm_oversubscribe: bool = _flag(False, "With --weights uvm: allocate managed memory also if it is more than the "
                                           "card has free. Dangerous: a driver in that state can hang the machine.")
    cpu_offload_gb: float | None = _flag(None, "Keep at least this many GiB of weights off the device, whole layers "
                                               "from the first, copied when they are used; as in vLLM.")
    policy: str = _flag("lru", "Which expert to evict from its slot, and which to prefetch: static, lru, lfru, "
                               "next-layer, or module:Class of your own.")
    paged_tokens: int | None = _flag(None, "Maximum tokens of a step for which the GPU fetches missing experts into "
                                           "slots by itself; larger steps stream experts past.")
    host_memory: str | None = _flag(None, "Memory budget of the host tier, e.g. 64GB or 50%, for weights and KV off "
                                          "the device; pinned on CUDA. Weights come first.")
    host_pool: str | None = _flag(None, "Keep KV, and weights off the device, in the memory that `spill pool serve` "
                                        "owns, shared by all engines of this machine: auto, or the path of its socket.")
    disk: tuple[str, ...] = _flag((), "PATH:SIZE, a folder for KV on disk and its maximum size, e.g. /nvme/kv:200GB; "
                                      "may be given more than once.")
    remote: str | None = _flag(None, "Redis or Valkey server that keeps KV for several engines, e.g. "
                               "redis://user:password@host:6379/0; rediss:// is with TLS, unix:// a socket; ?size=20GB "
                               "and ?ttl=SECONDS bound it.")
    kv_offloading_size: float | None = _flag(None, "Size of the host tier in GiB: vLLM's name for --host-memory.")
    spill: str = _flag("evict", "When to write KV to the lower tiers: evict, shortly before its space is needed, or "
                                "eager, as soon as a block is full.",
                       ("evict", "eager"))
    restore: str = _flag("auto", "What to do with KV found in a lower tier: auto loads it, recomputes it, or does "
                                 "both at once, whichever measured rates say is faster.", ("auto", "always", "never"))
    kv_cache_dtype: str = _flag("auto", "Type of the KV cache on the device: auto is the compute type; fp8 (e4m3) and "
                                        "int8 have a scale per token and head.", ("auto", "fp8", "int8"),
                                {"fp8_e4m3": "fp8"})
    spill_dtype: str = _flag("auto", "Type of KV in the lower tiers; auto keeps the type that it has on the device. "
                                     "With another, tokens after a restored prefix may differ.",
                             ("auto", "fp8", "int8", "int4"), {"fp8_e4m3": "fp8"})
    spill_admission: str = _flag("always", "Which KV blocks a lower tier stores: always (all), second-use (those "
                                 "that leave the tier above for the second time), or module:Class of your own.")
    kv_store_key_file: str | None = _flag(None, "File with a key of 16 bytes or more for the KV on --disk and in "
                                          "--remote: blocks that were not written with it are rejected.")
    max_model_len: int | None = _flag(None, "Maximum length of prompt plus output, in tokens.")
    max_num_seqs: int | None = _flag(None, "Maximum requests per step.")
    max_num_batched_tokens: int | None = _flag(None, "Maximum tokens per step, prefill chunks and decodes together.")
    block_size: int = _flag(16, "Tokens per KV block; a multiple of 8.")
    num_gpu_blocks_override: int | None = _flag(None, "Use exactly this many KV blocks on the device.")
    enable_prefix_caching: bool = _flag(True, "Reuse the KV blocks of prompts that share a prefix.")
    enable_chunked_prefill: bool = _flag(True, "Split long prompts over steps so that decodes are not delayed.")
    batching: str = _flag("continuous", "When to admit requests: continuous admits them at every step; static waits "
                                        "for the batch to end.",
                          ("continuous", "static"))
    schedule_policy: str = _flag("fcfs", "Order of the waiting queue: first come, longest prefix match, prefix "
                                 "subtree weight, or the request's priority.",
                                 ("fcfs", "lpm", "dfs-weight", "priority"))
    async_scheduling: bool = _flag(True, "Prepare the next step while the current one runs.")
    enforce_eager: bool = _flag(False, "Launch every kernel individually; do not capture CUDA graphs.")
    graph_capture: str = _flag("lazy", "When to capture CUDA graphs: lazy, each when a step of its size first runs, "
                                       "or all at the start.", ("lazy", "start"))
    fast: bool = _flag(False, "On a GPU: use faster kernels whose sums depend on the batch, and let the host's cores "
                              "compute experts that are not on the device. A request's tokens may then depend on the "
                              "other requests.")
    speculative_config: str | None = _flag(None, "Guess tokens ahead and verify them, as JSON like vLLM's: "
                                           '{"method": "ngram", "num_speculative_tokens": 4}; with prompt_lookup_min, '
                                           "prompt_lookup_max, substitute_dtype, max_branches, model and adaptive. The "
                                           "text stays the same.")
    speculative_method: str | None = _flag(None, "Method, as a plain flag: ngram drafts what followed the last tokens "
                                           "earlier in the request; suffix also looks in finished requests; substitute "
                                           "drafts with int4 copies of streamed layers; draft_model uses "
                                           "--speculative-model; eagle3 uses that as an EAGLE-3 head.", METHODS)
    speculative_model: str | None = _flag(None, "Draft with this smaller model: a name from `spill pull`, a folder, a "
                                          "GGUF file, or what `spill draft train` wrote. Its weights and KV are part "
                                          "of the budget.")
    num_speculative_tokens: int | None = _flag(None, "Maximum number of tokens per draft.")
    speculative_adaptive: bool = _flag(True, "Draft only when measured costs and acceptance predict a gain, and "
                                             "only as many tokens as pay off; if off, always draft.")
    speculative_simulate: str | None = _flag(None, "For random weights: count drafts as accepted up to each "
                                             "position in this share of cases, e.g. 0.8,0.65,0.5. The text is "
                                             "meaningless.")
    simulate_step: str | None = _flag(None, "With --load-format null: milliseconds that a step takes, and that each of "
                                            "its tokens adds, e.g. 4,0.05; for routers and fleets without a model.")
    kv_events_config: str | None = _flag(None, "Publish which KV blocks each tier holds, for routers, as JSON like "
                                         'vLLM\'s: {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": '
                                         '"tcp://*:5557"}; with replay_endpoint, topic, buffer_steps and hwm. Default '
                                         "endpoint: tcp://127.0.0.1:5557.")
    watermark: float = _flag(0.01, "Fraction of KV blocks to keep free when a request is admitted, against thrashing.")
    generation_config: str = _flag("auto", "Defaults of sampling parameters: auto uses the model's "
                                   "generation_config.json, none vLLM's neutral defaults, a folder the file in it.",
                                   aliases={"vllm": "none"})
    grammar_timeout: float = _flag(3.0, "CPU seconds that compiling the grammar of one request's structured output may "
                                   "take; one that takes longer is refused.")
    grammar_memory: str = _flag("256MB", "Memory that compiling one grammar may take, and that all compiled grammars "
                                "kept for reuse take together.")
    seed: int = _flag(0, "Seed of requests that have none, and of dummy weights.")

    @classmethod
    def from_flags(cls, **flags: Any) -> EngineConfig:
        """Construct from keywords. The error for an unknown name suggests similar ones, and the error for a value of
        the wrong type states the right type."""
        hints, kept = get_type_hints(cls), {}
        for name, value in flags.items():
            if name in hints:
                if name in _JSON_FLAGS and isinstance(value, Mapping):  # vLLM's LLM accepts a dict
                    value = json.dumps(dict(value), default=str)
                kept[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
                _check_type(name, kept[name], hints[name])
            elif not is_redundant(name, value):
                near = difflib.get_close_matches(name, hints, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}?" if near else "`spill serve --help` lists all flags"
                raise SpilloverError(f"There is no engine flag '{name}'; {hint}")
        return cls(**kept)

    def __post_init__(self) -> None:
        self._normalize()
        for item in dataclasses.fields(self):
            choices, value = item.metadata["choices"], getattr(self, item.name)
            if choices and value is not None and value not in choices:
                raise SpilloverError(f"{_option(item.name)} takes one of {', '.join(choices)}; got {value!r}"
                                     + did_you_mean(str(value), choices))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override",
                     "paged_tokens", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpilloverError(f"{_option(name)} must be at least 1; got {value}")
        if self.block_size < 8 or self.block_size % 8:
            raise SpilloverError(f"--block-size must be a multiple of 8; got {self.block_size}")
        if not 0 <= self.watermark < 1:
            raise SpilloverError(f"--watermark is a share from 0 up to 1; got {self.watermark}")
        if not 0.01 <= self.grammar_timeout <= 600:
            raise SpilloverError(f"--grammar-timeout is from 0.01 to 600 seconds; got {self.grammar_timeout:g}")
        if parse_bytes(self.grammar_memory, "--grammar-memory") < 16 * 2**20:
            raise SpilloverError(f"--grammar-memory must be at least 16MiB; got '{self.grammar_memory}'")
        if self.gpu_memory is not None and self.num_gpu_blocks_override is not None:
            raise SpilloverError("--gpu-memory and --num-gpu-blocks-override contradict each other: give one of them")
        if self.enforce_eager and self.graph_capture == "start":
            raise SpilloverError("--enforce-eager and --graph-capture start contradict each other: give one of them")
        if self.calibrate is not None and (self.quantization not in ("int4", "int8") or self.load_format != "auto"):
            raise SpilloverError("--calibrate needs the weights of a model and --quantization int4 or int8")
        self._check_ranks()
        self._check_weights()
        self._check_tiers()
        self._check_speculation()
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise SpilloverError("--kv-events-config reports the KV of prefixes, so it needs --enable-prefix-caching")
        if (not self.enable_chunked_prefill and self.max_num_batched_tokens is not None
                and self.max_model_len is not None and self.max_num_batched_tokens < self.max_model_len):
            raise SpilloverError(f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least "
                                 f"--max-model-len ({self.max_model_len}); got {self.max_num_batched_tokens}")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Return the configuration of speculation; None if it is off."""
        return SpeculativeConfig.of(self.speculative_config, self.speculative_method, self.num_speculative_tokens,
                                    self.speculative_adaptive, self.speculative_simulate, self.speculative_model)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Return the configuration of KV events; None if they are off."""
        return KVEventsConfig.of(self.kv_events_config)

    def shown(self) -> dict[str, Any]:
        """Return every flag by name, for files and web pages, with the secrets removed from --remote."""
        flags = dataclasses.asdict(self)
        if self.remote is not None:
            from spillover.memory.tiers.remote_address import RemoteAddress

            flags["remote"] = RemoteAddress.parse(self.remote).shown
        return flags

    def _normalize(self) -> None:
        """Replace alternative flags and values by those that the rest of the program reads."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str) and value in item.metadata["aliases"]:
                object.__setattr__(self, item.name, item.metadata["aliases"][value])
        object.__setattr__(self, "disk", (self.disk,) if isinstance(self.disk, str) else tuple(self.disk))
        if self.cpu_offload_gb is not None:
            if not self.cpu_offload_gb >= 0:
                raise SpilloverError(f"--cpu-offload-gb must be 0 GiB or more; got {self.cpu_offload_gb}")
            object.__setattr__(self, "cpu_offload_gb", self.cpu_offload_gb or None)  # 0 is vLLM's value for none
        if self.kv_offloading_size is not None:
            if self.host_memory is not None:
                raise SpilloverError("--kv-offloading-size and --host-memory are the same budget: give one of them")
            if not self.kv_offloading_size > 0:
                raise SpilloverError(f"--kv-offloading-size must be above 0 GiB; got {self.kv_offloading_size}")
            object.__setattr__(self, "host_memory", f"{self.kv_offloading_size:f}GiB")
            object.__setattr__(self, "kv_offloading_size", None)

    def _check_ranks(self) -> None:
        if self.tensor_parallel_size == 1:
            return
        flag = f"--tensor-parallel-size {self.tensor_parallel_size}"
        if self.load_format == "null":
            raise SpilloverError(f"--load-format null has no model to split: leave {flag} out")
        if self.speculation is not None and self.speculation.method in ("substitute", "eagle3"):
            raise SpilloverError(f"--speculative-method {self.speculation.method} works with one rank only: leave "
                                 f"{flag} out, or draft with ngram, suffix or a draft model")

    def _check_weights(self) -> None:
        strategy, _, count = self.weights.partition(":")
        if strategy not in WEIGHTS or (count and (strategy != "host-experts" or not count.isdigit() or int(count) < 1)):
            raise SpilloverError(f"--weights takes one of {', '.join(WEIGHTS)} or host-experts:N; got '{self.weights}'"
                                 + did_you_mean(strategy, WEIGHTS))
        if self.policy not in POLICIES and not _CLASS_NAME.fullmatch(self.policy):
            raise SpilloverError(f"--policy takes {', '.join(POLICIES)} or module:Class; got '{self.policy}'"
                                 + did_you_mean(self.policy, POLICIES))
        if self.cpu_offload_gb is not None and self.weights not in ("auto", "demand"):
            raise SpilloverError(f"--cpu-offload-gb and --weights {self.weights} contradict each other: give one of "
                                 "them")
        if self.policy != "lru" and (self.cpu_offload_gb is not None or strategy not in ("auto", "experts")):
            flag = "--cpu-offload-gb" if self.cpu_offload_gb is not None else f"--weights {self.weights}"
            raise SpilloverError(f"--policy {self.policy} chooses which experts stay in slots on the device, and "
                                 f"{flag} has no such slots; use --weights experts")
        if self.paged_tokens is not None and (self.cpu_offload_gb is not None or strategy in (
                "resident", "sequential", *MANAGED)):
            flag = "--cpu-offload-gb" if self.cpu_offload_gb is not None else f"--weights {self.weights}"
            raise SpilloverError(f"--paged-tokens is for experts in slots on the device, and {flag} has no such "
                                 "slots; use --weights experts")
        if self.uvm_oversubscribe and strategy not in MANAGED:
            raise SpilloverError("--uvm-oversubscribe is for weights in managed memory: give --weights uvm too, or "
                                 "leave it out")
        if strategy in MANAGED and self.tensor_parallel_size > 1:
            raise SpilloverError(f"--weights {strategy} works with one rank only: leave --tensor-parallel-size "
                                 f"{self.tensor_parallel_size} out, or use --weights sequential")
        if self.simulate_step is not None and self.load_format != "null":
            raise SpilloverError("--simulate-step is for servers without a model: give --load-format null too")
        StepCost.of(self.simulate_step)
        if self.load_format == "null" and (self.weights != "auto" or self.cpu_offload_gb is not None):
            raise SpilloverError("--load-format null has no weights: leave --weights and --cpu-offload-gb out")

    def _check_speculation(self) -> None:
        speculation = self.speculation
        if speculation is None:
            if not self.speculative_adaptive:
                raise SpilloverError("--no-speculative-adaptive needs something to speculate with: give "
                                     f"--speculative-method, one of {', '.join(METHODS)}")
            return
        if speculation.model is not None and self.load_format == "null":
            raise SpilloverError("--load-format null has no model for which a draft model or a head could draft: leave "
                                 f"{speculation.model} out")
        if speculation.simulated and self.load_format == "auto":
            raise SpilloverError("--speculative-simulate makes the text meaningless, so it is for random weights: give "
                                 "--load-format dummy too, or --speculative-method for a real model")
        for name in ("max_num_batched_tokens", "max_model_len"):
            limit = getattr(self, name)
            if limit is not None and speculation.num_tokens >= limit:
                raise SpilloverError(f"{speculation.num_tokens} speculative tokens and the one before them do not fit "
                                     f"into {_option(name)} {limit}; lower num_speculative_tokens or raise it")

    def _check_tiers(self) -> None:
        for name in ("gpu_memory", "host_memory"):
            if getattr(self, name) is not None:
                parse_budget(str(getattr(self, name)), _option(name))
        folders = [parse_disk(text).path for text in self.disk]
        for folder in folders:
            if folders.count(folder) > 1:
                raise SpilloverError(f"--disk names {folder} twice; give each folder once")
        if self.remote is not None:
            from spillover.memory.tiers.remote_address import RemoteAddress  # its client library is slow to import

            RemoteAddress.parse(self.remote)
        if self.kv_cache_dtype != "auto" and self.spill_dtype not in ("auto", "int4", self.kv_cache_dtype):
            raise SpilloverError(f"--spill-dtype {self.spill_dtype} and --kv-cache-dtype {self.kv_cache_dtype} "
                                 "contradict each other: KV in eight bits stays as it is, or becomes int4 below the "
                                 "device, so give one of them")
        if self.spill_admission not in ADMISSIONS and not _CLASS_NAME.fullmatch(self.spill_admission):
            raise SpilloverError("--spill-admission takes always, second-use or module:Class; got "
                                 f"'{self.spill_admission}'" + did_you_mean(self.spill_admission, ADMISSIONS))
        if self.kv_store_key_file is not None and not self.disk and self.remote is None:
            raise SpilloverError("--kv-store-key-file is for KV on a disk or in a remote store: give --disk or "
                                 "--remote")
        if self.host_pool is not None:
            socket_path(self.host_pool)
        given = next((_option(name) for name in TIER_FLAGS if getattr(self, name)), None)
        if given is None:
            for item in dataclasses.fields(self):
                value = getattr(self, item.name)
                if item.name in ("spill", "restore", "spill_dtype", "spill_admission") and value != item.default:
                    raise SpilloverError(f"{_option(item.name)} {value} needs a lower tier; give --host-memory, "
                                         "--host-pool, --disk or --remote")
        elif not self.enable_prefix_caching:
            raise SpilloverError(f"{given} keeps the KV of prefixes, so it needs --enable-prefix-caching")
        elif self.load_format == "null":
            raise SpilloverError(f"{given} has nothing to keep: --load-format null has no KV")


TIER_FLAGS = ("host_memory", "host_pool", "disk", "remote")  # nearest first
WEIGHTS = ("auto", "resident", "demand", "sequential", "experts", "host-experts", "pinned", *MANAGED)
POLICIES = ("static", "lru", "lfru", "next-layer")
ADMISSIONS = ("always", "second-use")
_JSON_FLAGS = ("speculative_config", "kv_events_config")
_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check_type(name: str, value: Any, hint: Any) -> None:
    allowed = get_args(hint) or (hint,)
    if name == "disk":
        allowed = (str, Sequence)
    fine = isinstance(value, tuple(get_origin(kind) or kind for kind in allowed))
    fine = fine or (float in allowed and isinstance(value, int))
    if not fine or (isinstance(value, bool) and bool not in allowed):
        wanted = ("a size such as '8GB'" if name in ("gpu_memory", "host_memory")
                  else next(words for kind, words in _KINDS.items() if kind in allowed))
        raise SpilloverError(f"{name} is {wanted}; got {value!r} ({type(value).__name__})")


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
