"""The load of an experiment: a workload's YAML turned into requests, sent to the running arm, and measured.

Every arm of a pass gets the same requests at the same times; every pass gets different ones, so that no cache helps a
later run. Sampling is greedy unless the workload sets it: arms then do the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spillover.bench.records import Run
from spillover.bench.serving.openai_api import BACKENDS, SAMPLING, Dialect, Kind
from spillover.bench.workloads.workload_options import WorkloadOptions, truth
from spillover.bench.workloads.workloads import WARMUP
from spillover.errors import SpilloverError, did_you_mean
from spillover.lab.experiment import LOAD_OPTIONS, Experiment, WorkloadSpec
from spillover.lab.run_metrics import run_metrics

if TYPE_CHECKING:
    from spillover.bench.serving.load import Live, LoadOptions
    from spillover.bench.serving.serve_request import ServeRequest, ServeWorkload
    from spillover.lab.engines import Running

Truth = TypeVar("Truth", bool, None)
WARMUP_SECONDS = 600.0


@dataclass(frozen=True)
class Measured:
    """One run, with the metrics derived from it."""

    run: Run
    metrics: Mapping[str, float | None]
    window_metrics: Mapping[str, float | None]  # metrics of the steady state
    stats: Mapping[str, Any]  # statistics of the workload
    sharing: float | None
    working_set: int | None


Progress = Callable[["Live"], None]


class Load(Protocol):
    """The interface of a load generator; tests have their own."""

    def check(self, workload: WorkloadSpec) -> None:
        """Refuse options that no run could use, before anything is started."""

    def warm_up(self, workload: WorkloadSpec, running: Running, count: int) -> int:
        """Send prompts that no measured run has; return how many were answered."""

    def measure(self, workload: WorkloadSpec, running: Running, repeat: int,
                progress: Progress | None = None) -> Measured: ...


class ServedLoad:
    """Load over HTTP, by the load generator of `spill bench serve`."""

    def __init__(self, experiment: Experiment) -> None:
        self._slo = experiment.slo
        self._made: dict[str, ServeWorkload] = {}

    def check(self, workload: WorkloadSpec) -> None:
        try:
            if WorkloadOptions.from_mapping(workload_part(workload.options)).tokenizer is not None:
                raise SpilloverError("an experiment takes no tokenizer: prompts are made with that of the first server")
            self._options(workload, "http://127.0.0.1:1", None, seed=0)
        except SpilloverError as error:
            raise SpilloverError(f"workload '{workload.group or workload.name}': {error}") from error

    def warm_up(self, workload: WorkloadSpec, running: Running, count: int) -> int:
        """Send `count` requests, at least four at once, so that batches of several requests have run too, and as many
        at once as in the measurement, if there are enough."""
        from spillover.bench.serving.batch_load import run_batch
        from spillover.bench.serving.load_processes import run_load
        from spillover.bench.workloads.arrivals import Arrivals

        requests = _whole_sessions(self._workload(workload, running).requests(WARMUP), count)
        if not requests:
            return 0
        most = min(len(requests), _count(workload.options, "max-concurrency") or len(requests))
        options = replace(self._options(workload, running.url, running.model_name, seed=0), timeout=WARMUP_SECONDS)
        if running.batches:  # with the measured batch size, as graphs are captured by size
            return len(run_batch(requests, options).completed)
        arrivals = Arrivals(max_concurrency=max(4, most), self_timed=False)
        return len(run_load(requests, replace(options, arrivals=arrivals, read_counters=False, processes=1)).completed)

    def measure(self, workload: WorkloadSpec, running: Running, repeat: int,
                progress: Progress | None = None) -> Measured:
        from spillover.bench.serving.batch_load import run_batch
        from spillover.bench.serving.load_processes import run_load

        made = self._workload(workload, running)
        stats = made.stats()
        options = self._options(workload, running.url, running.model_name, seed=repeat)
        requests = made.requests(repeat)
        run = run_batch(requests, options) if running.batches else run_load(requests, options, progress)
        return Measured(run, run_metrics(run, self._slo), run_metrics(run, self._slo, run.window), stats.as_dict(),
                        None if stats.estimated else stats.sharing,
                        None if stats.estimated else stats.working_set_tokens)

    def _workload(self, spec: WorkloadSpec, running: Running) -> ServeWorkload:
        """Make the workload once, with the first server's tokenizer: every arm gets the same tokens."""
        from spillover.bench.serving.served_model import ServedModel
        from spillover.bench.workloads.make_workload import make_workload
        from spillover.bench.workloads.workload_text import as_text

        chat = _backend(spec.options) == "chat"
        served = None
        if spec.name not in self._made or chat:
            served = ServedModel.connect(running.url, running.model_name or None)
        if spec.name not in self._made:
            self._made[spec.name] = make_workload(WorkloadOptions.from_mapping(workload_part(spec.options)), served)
        made = self._made[spec.name]
        return as_text(made, served) if served is not None and chat else made  # text by the current server's tokenizer

    def _options(self, workload: WorkloadSpec, url: str, model: str | None, seed: int) -> LoadOptions:
        from spillover.bench.serving.load import LoadOptions
        from spillover.bench.workloads.arrivals import Arrivals

        given = workload.options
        ramp_up = given.get("ramp-up-strategy")
        if ramp_up not in (None, "linear", "exponential"):
            raise SpilloverError(f"ramp-up-strategy is linear or exponential; got '{ramp_up}'")
        arrivals = Arrivals(
            rate=_number(given, "request-rate", math.inf), burstiness=_number(given, "burstiness", 1.0),
            max_concurrency=_count(given, "max-concurrency"),
            static_batch_size=_count(given, "static-batch-size"), ramp_up=ramp_up,
            ramp_up_start=_number(given, "ramp-up-start-rps", 0.0),
            ramp_up_end=_number(given, "ramp-up-end-rps", 0.0), self_timed=_truth(given, "self-timed", True), seed=seed)
        ignore_eos = _truth(given, "ignore-eos", None)
        body = {"temperature": 0, **{name: given[key] for name in SAMPLING if (key := name.replace("_", "-")) in given},
                **_extra_body(given)}
        dialect = Dialect(kind=_backend(given), model=model or None,
                          extra_body={key: value for key, value in body.items() if value is not None},
                          return_token_ids=_truth(given, "return-token-ids", False), ignore_eos=ignore_eos)
        seconds = _number(given, "max-seconds", math.inf)
        return LoadOptions(base_url=url, arrivals=arrivals, dialect=dialect, endpoint=_text(given, "endpoint"),
                           processes=_count(given, "client-processes"),
                           timeout=_number(given, "request-timeout", LoadOptions.timeout),
                           seconds=None if math.isinf(seconds) else seconds,
                           details={"workload": workload.name, "ignore_eos": ignore_eos is not False})


def workload_part(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in LOAD_OPTIONS}


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name)
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SpilloverError(f"{name} is a number, or inf; got '{value}'") from None


def _truth(options: Mapping[str, Any], name: str, default: Truth) -> bool | Truth:
    value = options.get(name)
    return default if value is None else truth(name, value)


def _text(options: Mapping[str, Any], name: str) -> str | None:
    value = options.get(name)
    if value is not None and not isinstance(value, str):
        raise SpilloverError(f"{name} is a text; got {value!r}")
    return value


def _extra_body(options: Mapping[str, Any]) -> Mapping[str, Any]:
    value = options.get("extra-body") or {}
    if not isinstance(value, Mapping):
        raise SpilloverError(f"extra-body holds names and values that every request carries; got {value!r}")
    return value


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise SpilloverError(f"{name} must be a whole number of at least 1; got '{value}'")
    return value


def _backend(options: Mapping[str, Any]) -> Kind:
    name = str(options.get("backend", "openai"))
    if name not in BACKENDS:
        raise SpilloverError(f"there is no backend '{name}'{did_you_mean(name, BACKENDS, listed=True)}")
    return BACKENDS[name]


def _whole_sessions(requests: list[ServeRequest], count: int) -> list[ServeRequest]:
    """Return the first `count`; turns of a chat stay in order, and none is kept without the previous one."""
    kept: list[ServeRequest] = []
    turns: dict[int, int] = {}
    for request in requests:
        if len(kept) == count:
            break
        if request.session is not None:
            if turns.get(request.session, 0) != request.turn:
                continue
            turns[request.session] = request.turn + 1
        kept.append(request)
    return kept
