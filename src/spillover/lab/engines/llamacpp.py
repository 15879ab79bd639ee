"""llama.cpp: a `llama-server` on PATH, or the same server from the xllamacpp wheel (see llamacpp_server.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from spillover.errors import SpilloverError
from spillover.lab.engines.base import CacheReset, EngineSpec, Missing
from spillover.lab.engines.flags import FlagStyle, to_flags
from spillover.lab.engines.owned import OwnedEngine, has_module, interpreter, module_version, not_found, run_python
from spillover.lab.engines.process import HOST
from spillover.lab.engines.spillover import spill

STYLE = FlagStyle(short=("a", "b", "c", "cb", "cmoe", "ctk", "ctv", "dev", "fa", "hf", "kvu", "m", "mg", "n", "ncmoe",
                         "ngl", "nkvo", "np", "ot", "sm", "t", "tb", "ts", "ub"))
SERVER = Path(__file__).with_name("llamacpp_server.py")
_SLOTS = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(\w+)'")


class LlamaCppEngine(OwnedEngine):
    kind = "llamacpp"
    COUNTERS: ClassVar[dict[str, tuple[str, ...]]] = {  # it counts computed and cached prompt tokens separately
        "prompt_tokens": ("llamacpp:prompt_tokens", "llamacpp:prompt_tokens_cached"),
        "generation_tokens": ("llamacpp:tokens_predicted",),
        "prefix_queries": ("llamacpp:prompt_tokens", "llamacpp:prompt_tokens_cached"),
        "prefix_hits": ("llamacpp:prompt_tokens_cached",),
    }

    @classmethod
    def installed(cls, spec: EngineSpec) -> Missing | None:
        if server_program(spec) is not None or has_module(interpreter(spec), "xllamacpp"):
            return None
        return not_found(spec, "no llama-server is on PATH and xllamacpp", "pip install xllamacpp")

    def command(self, port: int) -> list[str]:
        program = server_program(self.spec)
        # -P: the adapters' own folder must not be searched for modules.
        start = [program] if program is not None else [interpreter(self.spec), "-P", str(SERVER)]
        slots = str(Path(tempfile.gettempdir()) / "spillover-lab-slots")  # required for erasing slots
        reporting: dict[str, Any] = {"metrics": True, "slots": True, "slot-save-path": slots}
        return [*start, *self._model(), "--host", HOST, "--port", str(port),
                *to_flags(reporting | dict(self.spec.args), STYLE)]

    def version(self) -> str:
        props = self.get_json("/props")
        reply = str(props.get("build_info", "")) if isinstance(props, dict) else ""
        if server_program(self.spec) is not None:
            return reply or "unknown"
        return f"xllamacpp {module_version(interpreter(self.spec), 'xllamacpp')}" + (
            f" ({reply})" if reply and "unknown" not in reply else "")

    def reset_cache(self) -> CacheReset:
        """Erase the slots; prompts that were moved to the prompt cache in host memory stay."""
        if str(self.spec.args.get("cache-ram", self.spec.args.get("cache_ram", ""))) != "0":
            return CacheReset(False, "llama.cpp keeps prompts in host memory that it cannot drop (start it with "
                                     "'cache-ram: 0' to do without): use prompts that it has not seen")
        slots = self.get_json("/slots") or []
        statuses = [self.post(f"/slots/{slot['id']}?action=erase") for slot in slots]
        if slots and all(status == 200 for status in statuses):
            return CacheReset(True, f"erased {len(slots)} slots")
        return CacheReset(False, "llama.cpp did not erase its slots: use prompts that it has not seen")

    def device_pool_tokens(self) -> int | None:
        if self.running.log_path is not None and (found := _SLOTS.search(_head(self.running.log_path))):
            return int(found[2]) * (1 if found[3] == "true" else int(found[1]))
        slots = self.get_json("/slots")
        return sum(int(slot["n_ctx"]) for slot in slots) if slots else None

    def _model(self) -> list[str]:
        model = self.spec.model
        if model is None:
            model = default_gguf()
        if not model.endswith(".gguf") and not os.path.exists(model):
            return ["-hf", model, "-a", model.rpartition("/")[2]]
        if os.path.isdir(model):
            raise SpilloverError(f"llama.cpp reads GGUF files and {model} is a folder; give the .gguf file in 'model:'")
        return ["-m", model, "-a", Path(model).stem]


def server_program(spec: EngineSpec) -> str | None:
    """Return the binary; None to use the wheel, because no binary is on PATH or `python:` names an environment."""
    return shutil.which("llama-server") if spec.python is None else None


def devices(spec: EngineSpec) -> str:
    """Return the devices that llama.cpp can compute on, as it lists them."""
    program = server_program(spec)
    if program is None:
        code = "import xllamacpp as x; print([d['name'] for d in x.get_device_info()])"
        return run_python(interpreter(spec), code) or ""
    try:
        return subprocess.run([program, "--list-devices"], capture_output=True, text=True, timeout=60,
                              check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


@lru_cache(maxsize=1)
def default_gguf() -> str:
    """Return the file of the default model, downloaded if necessary, by the same command that a user would run."""
    done = subprocess.run([*spill(sys.executable), "pull"], capture_output=True, text=True, check=False)
    found = re.search(r", gguf, in (.+)$", done.stdout.strip())
    if done.returncode or found is None:
        raise SpilloverError(f"the default model is not here: spill pull said '{(done.stderr or done.stdout).strip()}'")
    path = Path(found[1])
    return str(next(iter(sorted(path.glob("*.gguf"))), path)) if path.is_dir() else str(path)


def _head(log: Path, nbytes: int = 256 * 1024) -> str:
    """Return the beginning of a log, where a server logs its configuration."""
    try:
        with log.open("rb") as file:
            return file.read(nbytes).decode(errors="replace")
    except OSError:
        return ""
