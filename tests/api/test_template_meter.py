"""Templates in the server itself: the same text as without limits, and an end for any template."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api_proc.text.chat_template import ChatTemplate, ChatTemplateError, _prepared
from api_proc.text.template_meter import MAX_STEPS, TooManySteps, limited
from protocol.config import ConfigError
from tests.api.conftest import CHAT_TEMPLATE
from tests.timing import within

USER = {"role": "user", "content": "x" * 15_000}
SIMPLE = {
    "chat": CHAT_TEMPLATE,
    "last query": (
        "{%- set ns = namespace(last=messages|length - 1, seen=false) %}"
        "{%- for m in messages[::-1] %}{%- set i = (messages|length - 1) - loop.index0 %}"
        "{%- if not ns.seen and m.role == 'user' and m.content is string %}"
        "{%- set ns.seen = true %}{%- set ns.last = i %}{%- endif %}{%- endfor %}"
        "{%- for m in messages if m.content %}{%- set content = m.content %}"
        "{%- if '</t>' in content %}"
        "{%- set content = content.split('</t>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<' ~ m['role'] ~ '>' + content + (' last' if loop.index0 == ns.last else '') }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != m.role %}|{% endif %}{%- endfor %}"
    ),
    "tools": (
        "{%- macro shape(schema) -%}{%- if schema.type == 'object' -%}["
        "{%- for name, part in (schema.properties or {}).items() -%}"
        "{{ name }}{{ '' if name in (schema.required or []) else '?' }}: {{ shape(part) }}"
        "{{ ', ' if not loop.last }}{%- endfor -%}]{%- elif schema.enum -%}"
        "{{ schema.enum | map('upper') | join(' | ') }}{%- else -%}{{ schema.type }}{%- endif -%}"
        "{%- endmacro -%}"
        "{%- for tool in tools or [] %}{{ shape(tool.function.parameters) }}\n"
        "{{ tool | tojson(indent=2, separators=(',', ': ')) }}{% endfor %}"
        "{%- set text %}{% for m in messages %}{{ m.content | trim }}{% endfor %}{% endset %}"
        "{{ text | replace('a', 'b') | upper }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ [1, 2, 3][:2] | join(',') }}{{ 7 % 4 * 2 }}{{ strftime_now('%d %b') | length > 1 }}"
    ),
    "alternation": (
        "{{ bos_token }}{% set messages = [{'role': 'system', 'content': 'Be.'}] + messages %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 1) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% generation %}[{{ m.content }}]"
        "{% endgeneration %}{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}"
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "object"}},
                "required": ["a"],
            },
        },
    }
]
CONTENTS = ["", " a ", "x</t>\ny", "日本 {{ a }}", "b" * 99]
CHARS = "messages[0].content"
ENDLESS = {
    "macro with the name of a global": "{% for x in [] %}{% macro lipsum() %}{% endmacro %}"
    "{% endfor %}{{ lipsum(n=100000000) }}",
    "namespaces within each other": "{% set a = namespace(x=1) %}"
    + "{% set a = namespace(x=a, y=a) %}" * 40
    + "{{ a }}",
    "namespaces that are set": "{% set a = namespace(x=1) %}"
    + "{% set b = namespace(x=1, y=1) %}{% set b.x = a %}{% set b.y = a %}{% set a = b %}" * 40
    + "{{ a }}",
    "nested loops": f"{{% for a in {CHARS} %}}{{% for b in {CHARS} %}}{{% for c in {CHARS} %}}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loop with a condition": f"{{% for a in {CHARS} %}}{{% for b in {CHARS} if b == 'y' %}}"
    "{% endfor %}{% endfor %}",
    "text in a loop": f"{{% for a in {CHARS} %}}{'y' * 5000}{{% endfor %}}",
    "output in a loop": f"{{% for a in {CHARS} %}}{{{{ messages }}}}{{% endfor %}}",
    "output in a block": f"{{% set x %}}{{% for a in {CHARS} %}}{{{{ {CHARS} }}}}{{% endfor %}}"
    "{% endset %}",
    "repetition": "{{ 'x' * 10**9 }}",
    "repetition of a value": f"{{{{ {CHARS} * 1000000000 }}}}",
    "long numbers": "{% set ns = namespace(x=9) %}"
    f"{{% for a in {CHARS} %}}{{% set ns.x = ns.x * ns.x %}}{{% endfor %}}",
    "doubled text": "{% set ns = namespace(x='ab') %}"
    f"{{% for a in {CHARS} %}}{{% set ns.x = ns.x ~ ns.x %}}{{% endfor %}}{{{{ ns.x | length }}}}",
    "doubled block": f"{{% set ns = namespace(x='ab') %}}{{% for a in {CHARS} %}}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=1) %}"
    f"{{% for a in {CHARS} %}}{{% set ns.x = [ns.x, ns.x] %}}{{% endfor %}}{{{{ ns.x | tojson }}}}",
    "doubled by hand": "{% set a = 'ab' %}" + "{% set a = a + a %}" * 60 + "{{ a | length }}",
    "doubled namespace": "{% set a = namespace(x=1) %}"
    + "{% set a = namespace(x=[a, a]) %}" * 60
    + "{{ a }}",
    "doubled argument": "{% macro f(n, s) %}{% if n %}{{ f(n - 1, s ~ s) }}{% endif %}"
    "{% endmacro %}{{ f(60, 'ab') }}",
    "doubled by nesting": "".join(
        f"{{% for v{i + 1} in [[v{i}, v{i}]] %}}" for i in range(18)
    ).replace("v0", CHARS)
    + "{{ v18 }}"
    + "{% endfor %}" * 18,
    "filters in a loop": f"{{% for a in {CHARS} %}}"
    f"{{% set x = {CHARS} | map('upper') | list %}}{{% endfor %}}",
    "methods in a loop": f"{{% for a in {CHARS} %}}{{% for b in {CHARS} %}}"
    f"{{% if {CHARS}.upper() == 'y' %}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "a method by another name": "{% set f = 'x'.ljust %}{{ f(10**9) }}",
    "a method by item": "{{ 'x'['ljust'](10**9) }}",
    "a function by another name": "{% macro f() %}{% endmacro %}{% set f = 'x'.ljust %}"
    "{{ f(9**9) }}",
    "a filter by name": "{{ ['x'] | map('center', 10**9) | list }}",
    "format": "{{ '%1000000000d' % 1 }}{{ '{:1000000000}'.format(1) }}",
    "a wide date": "{{ strftime_now('%1000000000Y') }}",
    "a wide indent": "{{ messages | tojson(indent=1000000000) }}",
    "a product": f"{{{{ {CHARS}.replace('', {CHARS}) }}}}{{{{ {CHARS} | replace('', {CHARS}) }}}}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "a sum without a name": f"{{% for a in {CHARS} %}}"
    f"{{% if ({' + '.join([CHARS] * 80)}) | length == 1 %}}{{% endif %}}{{% endfor %}}",
    "a concatenation without a name": f"{{% for a in {CHARS} %}}"
    f"{{% if ({' ~ '.join([CHARS] * 200)}) | length == 1 %}}{{% endif %}}{{% endfor %}}",
    "searches": f"{{% set s = {CHARS} | list %}}{{% for a in {CHARS} %}}{{% for b in {CHARS} %}}"
    f"{{% if {' or '.join(['a ~ b in s'] * 30)} %}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
    "searches by a test": f"{{% set s = {CHARS} | list %}}{{% for a in {CHARS} %}}"
    f"{{% if {' or '.join(['(a ~ a) is in s'] * 30)} %}}{{% endif %}}{{% endfor %}}",
    "searches by a filter": f"{{% set s = {CHARS} | list %}}"
    + "{{ s | reject('in', s) | list }}{{ s | select('in', s[1:]) | list }}" * 9,
}


@pytest.mark.parametrize("name", SIMPLE)
def test_a_simple_template_has_the_same_text_with_limits(name: str) -> None:
    template = ChatTemplate(SIMPLE[name], {"bos_token": "<s>"})
    assert template.is_simple
    reference = ChatTemplate(SIMPLE[name], {"bos_token": "<s>"})
    reference._template = _prepared(ImmutableSandboxedEnvironment).from_string(SIMPLE[name])

    @settings(max_examples=50)
    @given(st.lists(st.sampled_from(CONTENTS), max_size=4), st.booleans())
    def compare(contents: list[str], has_tools: bool) -> None:
        pairs = zip(("user", "assistant") * 2, contents, strict=False)
        messages = [{"role": role, "content": content} for role, content in pairs]
        tools = TOOLS if has_tools else None
        expected = reference.render(messages, tools=tools)
        assert template.render(messages, tools=tools) == expected
        assert template.render(messages, tools=tools, max_steps=MAX_STEPS) == expected

    compare()


@pytest.mark.parametrize("name", ENDLESS)
def test_no_template_holds_the_server(name: str) -> None:
    """It is not rendered here, or ends at its limit."""

    def measure() -> dict[str, float]:
        template = ChatTemplate(ENDLESS[name], {})
        began = time.process_time()
        if template.is_simple:
            with pytest.raises((TooManySteps, ChatTemplateError)):
                template.render([USER], max_steps=MAX_STEPS)
        return {"render_s": time.process_time() - began}

    within(3, measure, render_s=0.1)


def test_a_chat_of_16_kib_is_far_from_the_limit() -> None:
    messages: list[dict[str, Any]] = [
        {"role": role, "content": "y" * 150} for role in ("user", "assistant") * 50
    ]
    for source in SIMPLE.values():
        ChatTemplate(source, {}).render(messages, tools=TOOLS, max_steps=MAX_STEPS // 2)


def test_the_limit_ends_with_the_block() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    with pytest.raises(TooManySteps), limited(3):
        template._template.render(messages=[USER])
    assert template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_a_template_that_is_nested_deeply_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        ChatTemplate(source, {})
