# ruff: noqa: E501, PT017  (templates are written on one line)
"""Whatever a template does, rendering ends soon, with text or one error sentence; good templates are unaffected."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spillover.errors import RequestError
from spillover.models import chat_template
from spillover.models.chat_template import ChatTemplates, TemplateLimit

MESSAGES = [{"role": "user", "content": "Hello <there>"}, {"role": "assistant", "content": "naïve 😀\n"}]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.15)
    monkeypatch.setattr(chat_template, "MAX_VALUE", 1 << 20)
    monkeypatch.setattr(chat_template, "MAX_MADE", 4 << 20)


def render(source: str) -> str:
    return ChatTemplates().render(source, {"messages": MESSAGES})


HOSTILE = [
    "{{ 10**(10**8) }}", "{{ (10**1000)**1000 }}", "{% set x = 9**999 %}{{ x * x * x * x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ range(10**9) | list }}", "{{ 'x' * 10**10 }}", "{{ ('x' * 1000000) ~ ('x' * 1000000) ~ ('x' * 1000000) }}",
    "{{ ['x'] * 10**10 }}", "{{ 'x' | center(10**10) }}", "{{ 'x'.ljust(10**10) }}", "{{ 'x'.zfill(10**10) }}",
    "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}", "{{ '{:{}}'.format(1, '1000000000') }}",
    "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s | replace('x', 'xxxxxxxxx') %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('x', 'xxxxxxxxx') %}{% endfor %}",
    "{% set ns = namespace(l=['x']) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=('x',)) %}{% for i in range(64) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l | tojson }}",
    "{% set ns = namespace(l={}) %}{% for i in range(64) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'y' * 100000 }}{% endfor %}{% endset %}{{ x | length }}",
    "{{ ('a\n' * 400000) | indent(90000) }}", "{{ ('a\n' * 400000) | indent('x' * 900000) }}",
    "{{ [[1] * 1000, [2] * 1000] | tojson(indent=10**9) }}", "{{ (['x'] * 500000) | join('y' * 500000) }}",
    "{{ ('y' * 500000).join(['x'] * 500000) }}", "{{ (range(99999) | map('string') | join('z' * 99999)) }}",
    "{{ ('\t' * 500000).expandtabs(99999) }}", "{{ ('a' * 500000).translate({97: 'b' * 500000}) }}",
    "{{ [[1] * 50000] * 20 | sum(start=[]) }}", "{{ ([[1] * 1000] * 900) | sum(start=[]) }}", "{{ lipsum(n=10**9) }}",
    "(" * 5000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "-" * 100000 + "1 }}",
    "{% for i in range(3) %}" * 30 + "{% endfor %}" * 30, "x" * (1 << 21), "{{ 1.0e308 ** 9 }}", "{{ 'a' }",
    "{% for i in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
]


def test_hostile_templates_end_with_one_sentence() -> None:
    for source in HOSTILE:
        started = time.thread_time()
        try:
            render(source)
        except RequestError as error:
            assert len(str(error)) < 1000, source[:80]
        # Ten times the limit of CPU time, because the longest single operation is added to it.
        assert time.thread_time() - started < 1.5, source[:80]


def test_each_limit_is_told() -> None:
    for source, said in [("{{ 10**(10**8) }}", "bits"), ("{{ 'x' * 10**10 }}", "characters"), (HOSTILE[3], "longer than"),
                         ("{{ 'x' | center(10**10) }}", "pads"), ("{{ '%1000000000d' % 1 }}", "width")]:
        with pytest.raises(TemplateLimit, match=said):
            render(source)
    with pytest.raises(TemplateLimit, match="RecursionError"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


atoms = st.sampled_from(["1", "9**99", "'xy'", "'x' * 1000", "[1, 'a']", "messages", "range(1000)", "ns.v", "{'k': ns.v}",
                         "'%9999d'", "('a', 'b')", "10**6"])
expressions = st.recursive(atoms, lambda inner: st.one_of(
    st.builds("({} {} {})".format, inner, st.sampled_from(["+", "*", "**", "%", "~", "//", "==", "in", "and"]), inner),
    st.builds("({} | {})".format, inner, st.sampled_from([
        "list", "string", "tojson", "length", "join('-' * 999)", "replace('x', 'x' * 99)", "center(99999)", "upper", "sort",
        "sum", "map('string') | join", "tojson(indent=9)", "indent(999)", "batch(9) | list", "first", "reverse | list"])),
    st.builds("[{}, {}]".format, inner, inner), st.builds("({}).replace('x', {})".format, inner, inner),
), max_leaves=6)
statements = st.recursive(
    st.one_of(st.builds("{{{{ {} }}}}".format, expressions), st.builds("{{% set ns.v = {} %}}".format, expressions)),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for i in {} %}}{}{{% endfor %}}".format, st.sampled_from(["range(99999)", "ns.v", "messages"]), inner),
        st.builds("{{% set ns.v %}}{}{{% endset %}}".format, inner),
        st.builds("{{% macro m(a) %}}{}{{{{ m(a) }}}}{{% endmacro %}}{{{{ m(1) }}}}".format, inner),
    ), max_leaves=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=statements)
def test_random_templates_end_within_the_limits(body: str) -> None:
    started = time.thread_time()
    try:
        text = render("{% set ns = namespace(v='x') %}" + body)
        assert len(text) <= chat_template.MAX_VALUE
    except RequestError as error:
        assert len(str(error)) < 1000
    assert time.thread_time() - started < 2.0, body


GOOD = """{%- set ns = namespace(found=false, text='') -%}
{%- for message in messages %}
  {%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\n' + 'Be kind' + '<|im_end|>\\n' }}{% endif %}
  {%- set ns.text = ns.text ~ message.content | trim ~ loop.index -%}
{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message.content.strip().replace('<', '(') ~ [1, 'é', {'a': (1, 2)}] }}
{% endfor %}
{%- macro item(a, b=123456789) %}{{ a }}-{{ b * 2 }}{{ caller() if caller }}{% endmacro -%}
{{ item('x') }}{% call item(3) %}!{% endcall %}{% set block %}{{ ns.text }}{% endset %}{{ block | upper }}
{% for a, b in {'k': 1, 'j': 2}.items() %}{{ a ~ b }}{{ loop.cycle('x', 'y') }}{{ ', ' if not loop.last }}{% else %}no{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }} {{ '%05.1f' % 2.25 }}
{{ 'a,b'.split(',') | length }} {{ none | default('d') }} {{ (1, 2)[0] }} {{ '{}-{}'.format(1, 'b') }} {{ 7 // 2 ** 2 }}"""


def test_a_good_template_renders_as_plain_jinja_does() -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render(GOOD) == plain.from_string(GOOD).render(messages=MESSAGES)


def test_renderings_in_several_threads_have_limits_of_their_own() -> None:
    templates, texts = ChatTemplates(), list[str]()

    def work() -> None:
        for _ in range(5):
            texts.append(templates.render("{% for i in range(2000) %}{{ i }}{% endfor %}", {}))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["".join(map(str, range(2000)))] * 30
