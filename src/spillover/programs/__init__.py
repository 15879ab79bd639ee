"""Programs: prompts with structure, in Python. Gens, selects, forks and roles, on an LLM or any OpenAI-compatible URL.

    from spillover.programs import assistant, gen, program, user

    @program
    def answer(s, question):
        s += user(question)
        s += assistant(gen("answer", max_tokens=64))

    print(answer.run("What is the capital of France?", backend="http://127.0.0.1:8000")["answer"])
"""

from __future__ import annotations

from spillover.programs.backend import TokenCounts
from spillover.programs.backends import backend_of, set_default_backend
from spillover.programs.expressions import assistant, gen, image, select, system, user, video
from spillover.programs.lifetime import ProgramCancelled, ProgramError
from spillover.programs.program import Program, Stream, program
from spillover.programs.run import Chunk
from spillover.programs.state import Forks, State

__all__ = ["Chunk", "Forks", "Program", "ProgramCancelled", "ProgramError", "State", "Stream", "TokenCounts",
           "assistant", "backend_of", "gen", "image", "program", "select", "set_default_backend", "system", "user",
           "video"]
