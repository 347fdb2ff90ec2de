# ruff: noqa: E501
"""A chat template comes with a model: whatever it tries, it ends soon, takes little memory, and reaches nothing."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")

from minivllm.errors import RequestError
from minivllm.runtime.text.template import MOST_SOURCE, ChatTemplate

CHAT = {"messages": [{"role": "user", "content": "hello"}], "tools": None, "documents": None}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(t=START) %}{% for i in range(60) %}{% set n.t = STEP %}{% endfor %}{{ n.t | length }}"
ENDLESS = {
    "nested loops": LOOPS.replace("BODY", ""),
    "nested loops that test": LOOPS.replace("BODY", "{% if i == j %}{% endif %}"),
    "a loop over pairs": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    ),
    "maps of a list in a loop": LOOPS.replace("BODY", "{{ range(9999) | map('string') | list | length }}"),
    "a number of many digits": "{{ 7 ** (7 ** 10) > 1 }}",
    "a number that squares itself": "{% set n = namespace(v=7) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "a call block": "{% macro f() %}{{ caller() }}{% endmacro %}"
    + LOOPS.replace("BODY", "{% call f() %}{% endcall %}"),
    "words that mean nothing": "{{ lipsum(n=10 ** 6) }}",
    "a sort in a loop": LOOPS.replace("BODY", "{% set x = range(9999) | sort(reverse=true) %}"),
}
LARGE = {
    "a text times a number": "{{ ('x' * 10 ** 10) | length }}",
    "a number times a text": "{{ (10 ** 10 * 'x') | length }}",
    "a list times a number": "{{ ([1] * 10 ** 9) | length }}",
    "a text that doubles": DOUBLED.replace("START", "'xx'").replace("STEP", "n.t + n.t"),
    "a text joined to itself": DOUBLED.replace("START", "'xx'").replace("STEP", "n.t ~ n.t"),
    "a list that doubles": DOUBLED.replace("START", "[1]").replace("STEP", "n.t + n.t"),
    "a list of itself as JSON": DOUBLED.replace("START", "[1]")
    .replace("STEP", "[n.t, n.t]")
    .replace("length", "tojson"),
    "a list of itself as text": DOUBLED.replace("START", "[1]")
    .replace("STEP", "[n.t, n.t]")
    .replace("length", "string"),
    "a list of itself that is printed": DOUBLED.replace("START", "[1]")
    .replace("STEP", "[n.t, n.t]")
    .replace(" | length", ""),
    "a mapping of itself": DOUBLED.replace("START", "[1]")
    .replace("STEP", "{'a': n.t, 'b': n.t}")
    .replace("length", "pprint"),
    "blocks in blocks": "{% set n = namespace(t='xxxx') %}"
    + "{% for i in range(60) %}{% set t %}{{ n.t }}{{ n.t }}{% endset %}{% set n.t = t %}{% endfor %}",
    "a macro that repeats": "{% macro f(t) %}{{ t }}{{ t }}{{ t }}{% endmacro %}{% set n = namespace(t='xxxx') %}"
    + "{% for i in range(60) %}{% set n.t = f(n.t) %}{% endfor %}",
    "much that is printed": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a replacement": "{% set t = 'a' * 9999 %}{{ t.replace('a', t).replace('a', t) | length }}",
    "a replacement of nothing": "{% set t = 'a' * 99999 %}{{ t.replace('', t) | length }}",
    "a filter that replaces": "{% set t = 'a' * 99999 %}{{ t | replace('a', t) | length }}",
    "a join": "{% set t = 'a' * 99999 %}{{ t.join(t) | length }}",
    "a filter that joins": "{% set t = 'a' * 99999 %}{{ t | list | join(t) | length }}",
    "a format of great width": "{{ '%4000000000d' | format(1) | length }}",
    "a width of a format's argument": "{{ ('%*d' % (4000000000, 1)) | length }}",
    "a format of braces": "{{ '{:>4000000000}'.format(1) | length }}",
    "a format of braces in braces": "{{ '{:>{}}'.format(1, 4000000000) | length }}",
    "a format of a long text": "{% set t = 'a' * 99999 %}{{ ('%s' * 9999 % ((t,) * 9999)) | length }}",
    "centred text": "{{ 'x'.center(10 ** 10) | length }}",
    "a filter that centres": "{{ 'x' | center(10 ** 10) | length }}",
    "a filled text": "{{ 'x'.ljust(10 ** 10) | length }}{{ 'x'.zfill(10 ** 10) | length }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) | length }}",
    "an indent": "{{ ('\\n' * 99999) | indent(99999) | length }}",
    "JSON with an indent": "{{ ([1] * 99999) | tojson(indent=99999) | length }}",
    "wrapped words": "{{ ('a ' * 99999) | wordwrap(1, true, 'x' * 99999) | length }}",
    "a translation": "{{ ('a' * 99999).translate({97: 'b' * 99999}) | length }}",
    "a sum of lists": "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
    "batches with a filling": "{{ [1] | batch(10 ** 10, 1) | list | length }}",
    "slices": "{{ [1] | slice(10 ** 10) | list | length }}",
    "a refusal of gigabytes": "{{ raise_exception('x' * 10 ** 10) }}",
}
ESCAPES = [
    "{{ ''.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__ }}",
    "{{ messages[0].__init__.__globals__ }}", "{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}",
    "{{ self.__init__ }}", "{{ self._TemplateReference__context }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}", "{{ namespace.__init__.__globals__ }}", "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__globals__ }}", "{{ dict.__base__ }}", "{{ range.__self__ }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}", "{{ ('%s'.__mod__)(1) }}",
    "{{ ''.format.__func__ }}", "{% set f = ''.format %}{{ f.__self__.__class__ }}", "{{ (messages | map(attribute='__class__') | list) }}",
    "{{ messages | map('attr', '__class__') | list }}", "{{ messages | groupby('__class__') | list }}", "{{ messages | sum('__class__') }}",
    "{{ messages.append({'role': 'system'}) }}", "{{ messages.clear() }}", "{{ messages[0].update({'a': 1}) }}", "{{ messages[0].pop('role') }}",
    "{% set ns = namespace(__class__=1) %}", "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% import 'os' as os %}", "{% include '/etc/passwd' %}", "{% from 'x' import y %}", "{% extends 'base' %}",
    "{{ (messages[0].get | string).__class__ }}", "{{ caller.__globals__ }}", "{{ loop.__class__ }}", "{{ config.items() }}",
    "{{ ''.join.__call__ }}", "{{ messages.sort.__self__ }}", "{% for x in ().__class__.__bases__ %}{{ x }}{% endfor %}",
    "{{ tick.__globals__ }}", "{{ environment.tick }}", "{{ self._environment.filters }}", "{{ gi_frame.f_back }}",
    "{% set g = (x for x in messages) %}", "{{ messages | select('__class__') | list }}", "{{ strftime_now(messages) }}",
]  # fmt: skip
DEEP = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for x in messages %}" * 400 + "{% endfor %}" * 400,
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "negations": "{{ " + "not " * 9000 + "1 }}",
    "a long text": "x" * (MOST_SOURCE + 1),
}
RUN = """
import json, re, resource, sys, time
from minivllm.errors import RequestError
from minivllm.runtime.text import template, template_limits
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
template_limits.SECONDS = 1.0
template_limits.time_limit.__wrapped__.__defaults__ = (1.0,)
for name, source in json.load(sys.stdin).items():
    begin, said = time.perf_counter(), ""
    try:
        template.ChatTemplate(source).render(json.loads(sys.argv[1]))
    except RequestError as e:
        said = str(e)
    # not ru_maxrss, which begins with the memory of the process that started this one
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    print(json.dumps([name, said, time.perf_counter() - begin, peak]))
    sys.stdout.flush()
"""


def tried(sources):
    """Return (result, seconds, KiB of the process) of each template, in a process with at most 3 GiB."""
    command = [sys.executable, "-c", RUN, json.dumps(CHAT)]
    made = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, timeout=120)
    found = {name: rest for name, *rest in map(json.loads, made.stdout.splitlines())}
    assert found.keys() == sources.keys(), (list(sources)[len(found)], made.stderr[-400:])
    return found


def check(sources, what):
    for name, (reported, seconds, kib) in tried(sources).items():
        assert what in reported or "more time" in reported, (
            name,
            reported,
        )  # on a busy machine the time may be over first
        assert seconds < 15 and kib < 1 << 20, (name, reported, seconds, kib)


@pytest.mark.slow
@pytest.mark.parametrize(("sources", "what"), [(ENDLESS, "more time"), (LARGE, "more memory")], ids=["time", "memory"])
def test_a_template_is_ended_within_its_time_and_memory(sources, what):
    check(sources, what)


def test_templates_that_loop_and_that_double_are_ended():
    check({name: ENDLESS[name] for name in ("nested loops", "a macro that calls itself twice")}, "more time")
    names = ("a text times a number", "a text that doubles", "a list of itself as JSON", "a replacement")
    check({name: LARGE[name] for name in names}, "more memory")


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_of_python(source):
    """The template is refused or finds nothing, and the messages do not change."""
    scope = json.loads(json.dumps(CHAT))
    try:
        text = ChatTemplate("{% if true %}" + source + "{% endif %}").render({**scope, "bos_token": "<s>"})
    except RequestError as e:
        assert "broken" in str(e) or "refuses" in str(e)
        text = ""
    assert scope == CHAT
    for word in ("class", "module", "function", "root:", "uid=", "object at", "<built-in"):
        assert word not in text, text


@pytest.mark.parametrize("name", DEEP)
def test_a_template_that_is_too_deep_or_too_long_is_refused(name):
    with pytest.raises(RequestError, match=r"broken|refuses|more"):
        ChatTemplate(DEEP[name]).render(CHAT)


def test_the_time_of_one_template_is_not_that_of_the_next():
    from minivllm.runtime.text.template_limits import TemplateLimitError, time_limit

    with pytest.raises(TemplateLimitError, match=r"more time .*0\.05 s"), time_limit(0.05):
        ChatTemplate(ENDLESS["nested loops"])._template.render(CHAT)
    assert ChatTemplate("{{ messages[0].content ~ 1 ~ [2] }}").render(CHAT) == "hello1[2]"
