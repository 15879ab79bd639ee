"""A process's memory stays within its plan, also if the model is tiny and the process itself takes nearly all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import psutil
import fuzz_models
from spillover import LLM, SamplingParams
folder = Path(sys.argv[1])
fuzz_models.write_seeds(folder)
with LLM(str(folder / "folder-llama"), device="cpu", num_gpu_blocks_override=64, max_num_batched_tokens=256,
         max_num_seqs=8) as llm:
    for temperature in (0.0, 0.8):
        prompts = [[2 + (7 * index) % 28 for index in range(60)]] * 8
        llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature), use_tqdm=False)
    print(psutil.Process().memory_info().rss, llm.plan.total_bytes)
"""


def test_a_tiny_model_stays_within_its_plan(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "models"), *sys.path], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    held, planned = map(int, done.stdout.split())
    assert held <= planned
    assert held > 0.8 * planned
