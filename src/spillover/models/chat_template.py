"""Rendering of chat templates within limits, as a checkpoint's template is untrusted code.

Jinja's sandbox prevents a template from accessing anything but its variables. Here its time, memory and output are
bounded too: each loop iteration and each call checks the clock, the size of each value is checked before or directly
after it is made, and exceeding a limit raises TemplateLimit.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from spillover.errors import RequestError

MAX_SOURCE = 1 << 20  # characters of a template's source
MAX_SECONDS = 3.0  # CPU time for one rendering
MAX_VALUE = 32 << 20  # characters of a text, or elements of a list including nested ones
MAX_MADE = 128 << 20  # characters and elements made by one rendering in total
MAX_WIDTH = 100_000  # characters that a text may be padded to
MAX_INDENT = 256  # indentation of JSON, and width of wrapped lines
MAX_BITS = 4096  # bits of a whole number

_WIDTHS = {"center", "ljust", "rjust", "zfill"}  # string methods with a width parameter
_SIZED_FILTERS = {"center", "truncate", "batch", "slice", "round"}
_REFUSED_METHODS = {"encode", "expandtabs", "format_map", "maketrans", "translate"}
_WIDE = re.compile(r"\d{6,}|%[^a-zA-Z%]*\*|\{[^}]*\{")  # width of six digits or more, or a computed one, in a format


class TemplateLimit(RequestError):  # noqa: N818
    """Rendering would exceed a limit."""

    code = "chat_template_limit"


class ChatTemplates:
    """A thread-safe compiler and renderer of chat templates."""

    def __init__(self) -> None:
        self._environment = _Environment()
        self._compiled: dict[str, Template] = {}

    def compile(self, source: str) -> Template:
        """Compile a template, cached by its source. Raises TemplateError if it is invalid."""
        template = self._compiled.get(source)
        if template is None:
            if len(source) > MAX_SOURCE:
                raise TemplateLimit(f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are "
                                    "allowed")
            try:
                template = self._compiled[source] = self._environment.from_string(source)
            except (SyntaxError, MemoryError, RecursionError, OverflowError) as error:
                raise TemplateError(f"it cannot be compiled ({type(error).__name__})") from error
        return template

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render a template. Raises RequestError with the reason if that fails."""
        try:
            template = self.compile(source)
            with self._environment.metered():
                return template.render(variables)
        except TemplateError as error:
            raise RequestError(f"the chat template refused these messages: {error}") from error
        except (MemoryError, OverflowError, RecursionError) as error:
            raise TemplateLimit(f"the chat template takes more memory or depth than it may ({type(error).__name__}: "
                                f"{str(error)[:160] or 'no details'})") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
            raise RequestError(f"the chat template cannot render these messages ({error}); each needs a 'role' and a "
                               "'content'") from error


class _Meter:
    """The resources used by one rendering."""

    def __init__(self) -> None:
        self._until = time.thread_time() + MAX_SECONDS
        self._left = MAX_MADE
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if not self._ticks % 16 and time.thread_time() > self._until:
            raise TemplateLimit(f"the chat template takes longer than {MAX_SECONDS:g} s to render these messages")

    def make(self, count: int) -> None:
        """Count a value of `count` characters or elements; raises TemplateLimit if that exceeds a limit."""
        if count > MAX_VALUE:
            raise TemplateLimit(f"the chat template makes a value of more than {MAX_VALUE:,} characters or elements")
        self._left -= count
        if self._left < 0:
            raise TemplateLimit(f"the chat template makes more than {MAX_MADE:,} characters and elements in all")


class _CodeGenerator(CodeGenerator):
    """A code generator that passes lists, dictionaries and joined texts through the environment, which counts them."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.counted(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load":  # the target of an assignment
            super().visit_Tuple(node, frame)
            return
        self.write("environment.counted(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.counted(")
        super().visit_Dict(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """A Jinja environment configured as in transformers, so that templates render to the same bytes, with limits."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        # Not optimised, as that would compute constants while compiling, outside the limits.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._count_output,
                         extensions=[_GenerationBlock, loopcontrols])
        self._thread_local = threading.local()
        self.concat = self._concat  # type: ignore[method-assign]
        del self.globals["lipsum"], self.filters["urlize"]
        self.filters["tojson"] = _to_json
        self.filters = {name: self._limited(name, work) for name, work in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def metered(self) -> _Metered:
        return _Metered(self._thread_local)

    @property
    def _meter(self) -> _Meter:
        meter: _Meter | None = getattr(self._thread_local, "meter", None)
        return meter if meter is not None else _Meter()  # None while compiling a template

        # Functions that compiled templates call

    def tick(self) -> str:
        self._meter.tick()
        return ""

    def counted(self, value: Any) -> Any:
        """Count a new value and return it; raises TemplateLimit if it, or its text, would be too large."""
        meter = self._meter
        if isinstance(value, str):
            meter.make(len(value))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, list | tuple | dict | set | Namespace):
            if not isinstance(value, Namespace):
                meter.make(len(value))
            _weigh(value, meter)
        return value

    def joined(self, parts: Iterable[Any]) -> str:
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        self._meter.make(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self._meter
        meter.tick()
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    meter.make(max(0, other) * _weigh(one, meter))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            meter.make(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return self.counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self._meter.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = __self._check_method(method.__name__, owner, args)
        return __self.counted(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    # Limits

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, inserting a clock check at the beginning of every loop's body."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            check = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))
            check.set_lineno(loop.lineno)
            loop.body.insert(0, check)
        return tree

    def _count_output(self, value: Any) -> Any:
        """Count a value that is written to the output, and return it."""
        if isinstance(value, str):
            self._meter.make(len(value))
        elif isinstance(value, list | tuple | dict | set | Namespace):
            self._meter.make(_weigh(value, self._meter))
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self._meter.make(sum(map(len, parts)))
        return "".join(parts)

    def _check_method(self, name: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in _WIDTHS:
            _check_width(args)
        elif name == "format":
            _check_format(text)
        elif name == "replace" and len(args) >= 2:
            self._check_replace(text, args[0], args[1])
        elif name == "join" and args:
            parts = list(args[0])
            self._meter.make(len(text) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
            return (parts, *args[1:])
        return args

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self._meter.make(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def _limited(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter to count its result, and to refuse a result that would be too large before it is made."""
        skipped = 1 if hasattr(work, "jinja_pass_arg") else 0

        @functools.wraps(work)
        def limited(*args: Any, **kwargs: Any) -> Any:
            meter = self._meter
            meter.tick()
            value, *rest = args[skipped:]
            options = [*rest, *kwargs.values()]
            if name == "indent":
                if not isinstance(value, str):
                    raise TypeError("the filter indent is for text")
                meter.make((value.count("\n") + 1) * max(map(_width, options), default=0))
            elif name in ("tojson", "wordwrap") and max(map(_width, options), default=0) > MAX_INDENT:
                raise TemplateLimit(f"the chat template's filter {name} takes at most {MAX_INDENT} here")
            elif name in _SIZED_FILTERS:
                _check_width(options)
            elif name == "replace" and len(options) >= 2:
                self._check_replace(value, options[0], options[1])
            elif name == "format" and isinstance(value, str):
                _check_format(value)
            elif name == "join":
                value = list(value)
                separator = next((option for option in options if isinstance(option, str)), "")
                meter.make(len(value) * len(separator) + _weigh(value, meter))
                args = (*args[:skipped], value, *rest)
            elif name == "sum" and any(isinstance(option, list | tuple) for option in options):
                raise TemplateLimit("the chat template adds lists with the filter sum, which is for numbers here")
            if isinstance(value, list | tuple | dict | set):
                _weigh(value, meter)
            return self.counted(work(*args, **kwargs))

        return limited


class _Metered:
    """A context in which this thread counts one rendering."""

    def __init__(self, thread_local: threading.local) -> None:
        self._thread_local = thread_local

    def __enter__(self) -> None:
        self._before = getattr(self._thread_local, "meter", None)
        self._thread_local.meter = _Meter()

    def __exit__(self, *_: object) -> None:
        self._thread_local.meter = self._before


class _GenerationBlock(Extension):
    """{% generation %} blocks, which mark the assistant's text for training; here they render as their content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _weigh(value: Any, meter: _Meter) -> int:
    """Return the number of characters and elements of a value; an object contained twice counts twice."""
    if isinstance(value, str):
        return len(value)
    weight, stack = 0, [value]
    while stack:
        item = stack.pop()
        weight += max(1, len(item)) if isinstance(item, str) else 1
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            stack += item
        elif isinstance(item, Namespace):
            stack += item._Namespace__attrs.values()
        if weight > MAX_VALUE or len(stack) > MAX_VALUE:
            meter.make(MAX_VALUE + 1)
        meter.tick()
    return weight


def _width(option: Any) -> int:
    """Return the number of characters that an option of a filter adds wherever it is inserted."""
    if isinstance(option, list | tuple):
        return max(map(_width, option), default=0)
    return len(option) if isinstance(option, str) else option if isinstance(option, int) else 0


def _check_width(options: Iterable[Any]) -> None:
    if any(isinstance(option, int | float) and option > MAX_WIDTH for option in options):
        raise TemplateLimit(f"the chat template pads or cuts to more than {MAX_WIDTH:,}")


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise TemplateLimit("the chat template formats with a width of six digits or one that is not written out")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimit(f"the chat template computes a number of more than {MAX_BITS:,} bits")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Serialise to JSON, without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
