"""Chat templates are rendered as in Hugging Face, in a sandbox that can't be escaped, stalled or flooded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Reference

from ovspec.base.errors import OvspecError, UnavailableError
from ovspec.text.chat_format import ChatFormat
from ovspec.text.chat_template import MAX_RENDER_SECONDS, MAX_RENDERER_BYTES, RENDERER, ChatTemplate, load_chat_template
from ovspec.text.custom_template import find_answer_end

MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "  Say <hi> & 'bye'.\n"},
]
# The features that published templates use.
FEATURES = """{%- set ns = namespace(first=true, text='') -%}
{%- macro turn(role, content) -%}<|{{ role ~ '|>' ~ content | trim }}{%- endmacro -%}
{%- for message in messages -%}
{%- if loop.first and message.role == 'system' -%}{{ '[' + message['content'].split(' ')[0] * 2 + ']' }}
{%- set ns.first = false -%}{%- continue -%}{%- endif -%}
{{ turn(message.role, message.content) }}{{ '%s/%d' % (message.role, loop.index0) }}
{{- '{:>4}'.format(loop.length) }}{{ message | tojson(indent=2, sort_keys=true) }}
{% generation %}{{ loop.index }}{% endgeneration %}
{{ message.content | replace('i', 'I') | upper }}
{%- if tools %}tools{% endif %}{{ [1, 2] + [3] }}{{ 'abc'[::-1] }}{{ 7 // 2 ** 1 % 3 }}
{{ message.keys() | join(',') }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ bos_token }}<|assistant|>{% endif -%}"""


def test_templates_render_like_hugging_face(pair: Path, reference: Reference) -> None:
    def expected(template: str | None) -> str:
        return reference.tokenizer.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True, chat_template=template
        )

    ours = load_chat_template(pair)
    assert ours.render(MESSAGES) == expected(None)
    assert ChatTemplate(FEATURES, ours.special_tokens).render(MESSAGES) == expected(FEATURES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self._TemplateReference__context }}{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('only user turns') }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ [][3].x.y }}",
        "{% for a in [1] %}" * 30 + "x" + "{% endfor %}" * 30,
    ],
)
def test_refused_in_a_sentence(source: str) -> None:
    with pytest.raises(OvspecError, match="chat template"):
        ChatTemplate(source, {}).render(MESSAGES)


# These run until they are stopped; the others are refused, or become too large, before.
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ (3 ** 99999999) % (3 ** 9999999) }}",
    "{% set ns = namespace(t={}) %}{% for i in range(60) %}"
    "{% set ns.t = {'a': ns.t.values(), 'b': ns.t.values()} %}{% endfor %}{{ ns.t }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = [1, 2] | map('upper') | first %}{% endfor %}"
    "{% endfor %}",
    "{{ lipsum(n=99999999) }}",
    "{% set ns = namespace(t=['ab']) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.t }}",
    "{% set ns = namespace(t=['ab']) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
    "{{ ns.t | tojson }}",
]
LARGE = [
    "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "{% for i in range(99999) %}{{ messages }}{{ 'x' * 1000 }}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 999999999 }}",
    "{% if false %}" + "{{ " + " ~ ".join(["('a' | center(99999999))"] * 40) + " }}{% endif %}",
    "{{ ('{1:{0}}' * 9999).format(9999999, 1) }}",
    "{{ strftime_now('%200d' * 99999999) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] | join %}{% endfor %}",
    "{{ 'ab' | replace('', 'x' * 49999999) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ range(99999) | map('center', 99999) | join }}",
]


def refused(source: str, seconds: float) -> None:
    began = time.monotonic()
    with pytest.raises(OvspecError, match="chat template"):
        ChatTemplate(source, {}).render(MESSAGES)
    assert time.monotonic() - began < seconds
    assert ChatTemplate("{{ messages[0].role }}", {}).render(MESSAGES) == "system", "the next rendering still works"


def test_a_process_that_was_killed_says_nothing_about_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a chat would be written in another way, or a template be taken for one that ends no answers."""
    template = ChatTemplate("{% for each in messages %}{{ each.role }}: {{ each.content }};{% endfor %}", {})
    killed = UnavailableError("The process that renders chat templates was killed, 6 times.")
    ask, turns = RENDERER.ask, list[str]()

    def killed_once(request: str) -> dict[str, Any]:
        turns.append(request)
        if len(turns) == 1:
            raise killed
        return ask(request)

    monkeypatch.setattr(RENDERER, "ask", killed_once)
    begun = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Beca"}]
    for render in (lambda: ChatFormat(template).render_prompt(begun), lambda: find_answer_end(template)):
        turns.clear()
        with pytest.raises(UnavailableError):
            render()
    assert ChatFormat(template).render_prompt(begun) == "user: Why?;assistant: Beca"
    assert find_answer_end(template) == ";"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow a rendering less than usual, so that the tests of the limits end sooner."""
    assert (RENDERER.max_seconds, RENDERER.max_bytes) == (MAX_RENDER_SECONDS, MAX_RENDERER_BYTES) == (2, 1e9)
    RENDERER.end_idle_processes()
    monkeypatch.setattr(RENDERER, "max_seconds", 0.3)
    monkeypatch.setattr(RENDERER, "max_bytes", 250_000_000)
    yield
    RENDERER.end_idle_processes()  # these processes allow only this much themselves


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(  # all are stopped in the same way; quick runs have a loop, a single call and a long text
    "source",
    [pytest.param(each, marks=[pytest.mark.slow] * (at not in (0, 1, 7))) for at, each in enumerate(ENDLESS)],
)
def test_bounded_in_time(source: str) -> None:
    refused(source, 4)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("sources", [LARGE[::3], pytest.param(LARGE, marks=pytest.mark.slow)], ids=len)
def test_bounded_in_size(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one test, so that a process that refuses one goes on with the next."""
    monkeypatch.setattr(RENDERER, "max_seconds", MAX_RENDER_SECONDS)
    for source in sources:
        refused(source, 6)


@pytest.mark.slow  # "hurried" makes sure that these limits are the usual ones
@pytest.mark.parametrize("source", [ENDLESS[0], "{{ 'ab' | replace('', 'x' * 49999999) }}"])
def test_bounded_by_the_usual_limits(source: str) -> None:
    refused(source, 6)


def test_rendering_is_quick(pair: Path) -> None:
    template = load_chat_template(pair)
    template.render(MESSAGES)
    long = [{"role": "user", "content": "word " * 200_000}]
    many = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(500)]
    for chosen, messages, limit in ((template, MESSAGES, 0.05), (template, long, 1.0), (template, many, 1.0)):
        began = time.perf_counter()
        chosen.render(messages)
        assert time.perf_counter() - began < limit


def test_a_renderer_that_died_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}", {})
    assert template.render(MESSAGES) == "2"
    assert RENDERER.idle_processes
    for process in RENDERER.idle_processes:
        process.kill()
    assert template.render(MESSAGES) == "2"


def test_renderings_from_several_threads() -> None:
    template, found = ChatTemplate("{{ messages[0] }}", {}), {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: template.render([str(i)])}))  # type: ignore[list-item]
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(OvspecError, match="no chat template"):
        load_chat_template(tmp_path)
