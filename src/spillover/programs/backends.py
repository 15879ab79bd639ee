"""Returns the backend for what a caller may pass as one: always the same object, as it remembers which prefixes are
computed."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from spillover.programs.backend import Backend
from spillover.programs.lifetime import ProgramError

if TYPE_CHECKING:
    from spillover.programs.http_backend import HttpBackend

_lock = threading.Lock()
_default: Any = None
_of_engines: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()
_of_urls: dict[str, HttpBackend] = {}


def set_default_backend(backend: Any) -> None:
    """Set the LLM, AsyncLLM or URL on which programs run if `run` is given none; None removes it."""
    global _default
    _default = None if backend is None else backend_of(backend)


def backend_of(given: Any) -> Backend:
    """Return the backend for an LLM, an AsyncLLM, a URL or a backend."""
    if given is None:
        if _default is None:
            raise ProgramError("nothing to run on: give backend=LLM(...) or backend='http://127.0.0.1:8000', or call "
                               "set_default_backend once")
        found: Backend = _default
        return found
    if isinstance(given, str):
        from spillover.programs.http_backend import HttpBackend

        with _lock:
            known = _of_urls.get(given)
        if known is None or not known.same_server():
            known = HttpBackend(given)
            with _lock:
                _of_urls[given] = known
        return known
    if hasattr(given, "gate") and hasattr(given, "score"):
        made: Backend = given
        return made
    if hasattr(given, "get_default_sampling_params"):
        with _lock:
            if given not in _of_engines:
                from spillover.programs.engine_backend import engine_backend

                _of_engines[given] = engine_backend(given)
            return _of_engines[given]
    raise ProgramError(f"a program runs on an LLM, an AsyncLLM or a URL such as http://127.0.0.1:8000; got {given!r}")
