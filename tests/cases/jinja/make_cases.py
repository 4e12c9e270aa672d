"""Makes cases.json: templates written for this project, and what Jinja makes of them in the environment that transformers
gives chat templates. Needs jinja2 3.1: python3 make_cases.py > cases.json"""
import json
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %}: its body."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment(options):
    env = ImmutableSandboxedEnvironment(
        trim_blocks=options.get("trim", True), lstrip_blocks=options.get("lstrip", True),
        keep_trailing_newline=options.get("keep", False), extensions=[loopcontrols, Generation])

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


templates, variables, cases = [], [], []


def place(values, value):
    if value not in values:
        values.append(value)
    return values.index(value)


def case(template, values, **options):
    """expected: null where Jinja raises."""
    try:
        expected = environment(options).from_string(template).render(**values)
    except Exception:
        expected = None
    row = {"template": place(templates, template), "variables": place(variables, values), "expected": expected}
    if options:
        row["options"] = options
    cases.append(row)


V=dict(s="Hello, World", e="", n=7, z=0, f=2.5, t=True, no=None, l=[3,1,2], w=["b","A","c"], d={"x":1,"y":"two","items":5}, u="żółć ß 日本", nested=[{"role":"user","content":"hi","n":2},{"role":"assistant","content":"yo","n":1}], blank="  a  b \n", q="it's \"q\" \\ \n\t")

EXPRESSIONS = r'''
1 + 2 * 3
-2 ** 2
7 // 2
-7 // 2
7 % 3
-7 % 3
7 % -3
7 / 2
6 / 2
2 ** 10
2 ** -1
1.5 + 1
1e20
1e16
123456789.125
0.1 + 0.2
1e-5
0.0001
3.0
5 - 3 - 1
'a' ~ 1 ~ none ~ true ~ 1.0
'a' * 3
[1] * 2
[1,2] + [3]
(1,2) + (3,)
(1,)
()
[]
{}
{'a': 1, 'b': [1, 'x', none]}
1 < 2 < 3
1 < 2 > 3
1 == 1.0
true == 1
'a' in 'cat'
2 in l
9 not in l
'x' in d
not t
not e and t
e or 'd'
t and 0
none or false
n if t else z
n if e
(n if e) is undefined
'a' if z else 'b' if t else 'c'
s[0]
s[-1]
s[1:3]
s[::-1]
s[:-2]
s[5:]
s[::2]
l[0]
l[-1]
l[1:]
l[::-1]
l[10:]
l[10] is undefined
d.x
d['x']
d['items']
d.zz
d.zz is defined
u
u[1]
u[:4]
s
l
d
undefinedname
undefinedname is defined
e
no is none
n is number
t is number
n is integer
t is integer
f is float
s is string
l is sequence
s is sequence
l is mapping
l is iterable
n is iterable
t is boolean
t is true
z is false
n is odd
n is even
n is divisibleby 7
n is divisibleby(2)
n is eq 7
n is sameas 7
1 is sameas true
s is lower
'abc' is lower
'ABC' is upper
n is in [7,8]
n is not in [7,8]
n is not none
s is not defined
range is callable
w
d.get('x')
d.get('zz')
d.get('zz', 4)
nested
[1,1,2,'a','A']
'42'
'x'
'0x1f'
' 12 '
3.9
-3.9
'3.7'
'3.5'
n
2.5
3.5
2.675
-2.5
blank
'xxaxx'
'[' ~ blank.strip() ~ ']'
'[' ~ blank.lstrip() ~ ']'
'[' ~ blank.rstrip() ~ ']'
'xyax'.strip('xy')
s.upper()
s.lower()
s.title()
'they\'re bill\'s'.title()
'they\'re bill\'s'
s.capitalize()
s.startswith('Hell')
s.startswith(('a','H'))
s.endswith('d')
s.find('o')
s.rfind('o')
s.find('zz')
s.count('o')
s.replace('o','0')
s.replace('o','0',1)
s.split(', ')
blank.split()
'a b  c d'.split(None, 1)
'a,b,c'.split(',', 1)
'a,b,c'.rsplit(',', 1)
' a b c '.rsplit(None, 1)
'a</think>b</think>c'.split('</think>')[-1]
'a\nb\r\nc'.splitlines()
', '.join(w)
'12'.isdigit()
'1a'.isdigit()
'ab'.isalpha()
'a1'.isalnum()
'  '.isspace()
'ab'.islower()
'prefix-x'.removeprefix('prefix-')
'x.txt'.removesuffix('.txt')
q
{'b':1,'a':2}
[1,2]
'😀'
none
1.0
[true,false]
[q]
['it\'s']
['\t\x01']
'a\x41\u0142\n'
"dq\"x"
'a' 'b'
'a\nb\n\nc'
'a\nb'
'a\n\nb'
'<a href="x">&\'</a>'
'<a>'
[[1,2],[3]]
l is ne 3
dict(a=1, b=2)
dict({'a':1}, b=3)
nested[0].content
nested[0]['content'][0]
nested.0.role
-l[0]
(-1)
-1
1 if 0 else none
[n, f, t, no]
'%s' is string
'é' in u
none == false
0 == false
'' == none
[1,2] == [1,2]
[1,2] == (1,2)
{'a':1} == {'a':1.0}
[1,2] < [1,3]
'a' < 'b'
[] is sequence
undefinedname is iterable
undefinedname ~ 'x'
undefinedname == undefinedname2
undefinedname == none
not undefinedname
undefinedname is none
1_000 + 1
s[:5] + '!' if s else ''
(1, 2)[0]
{'a': {'b': 2}}.a.b
{'a': 1}['a']
'abc'
u|length
u|upper
u|lower
u|title
u|capitalize
s|length
l|length
d|length
undefinedname|default('dd')
e|default('dd')
e|default('dd', true)
e|d('dd', boolean=true)
l|sort
l|sort(reverse=true)
w|sort
w|sort(case_sensitive=true)
w|join(', ')
l|join
l|first
l|last
([]|first) is undefined
l|sum
l|min
l|max
w|max
l|reverse|list
s|reverse
s|list
d|list
d|dictsort
d.items()|list
d.keys()|list
d.values()|list
nested|map(attribute='role')|list
nested|map(attribute='n')|sum
nested|selectattr('role','equalto','user')|map(attribute='content')|list
nested|rejectattr('role','equalto','user')|list
nested|selectattr('content')|list|length
l|select('odd')|list
l|reject('odd')|list
l|select('gt', 1)|list
w|map('upper')|join('-')
w|map('replace','b','q')|list
nested|sort(attribute='n')|map(attribute='content')|join(' ')
nested|join(',', attribute='role')
[1,1,2,'a','A']|unique|list
'42'|int
'x'|int
'x'|int(5)
'0x1f'|int(base=16)
' 12 '|int
3.9|int
-3.9|int
'3.7'|int
'3.5'|float
'x'|float(1.5)
n|float
2.5|round
3.5|round
2.675|round(2)
2.5|round(0,'ceil')
-2.5|abs
n|string ~ 'x'
blank|trim
'xxaxx'|trim('x')
s|replace('o','0')
s|replace('o','0',1)
''|replace('','x')
'ab'|replace('','x')
q|tojson
d|tojson
nested|tojson
d|tojson(indent=2)
nested|tojson(indent=4)
{'b':1,'a':2}|tojson(sort_keys=true)
[1,2]|tojson(separators=(',',':'))
u|tojson
u|tojson(ensure_ascii=true)
'😀'|tojson(ensure_ascii=true)
[]|tojson(indent=2)
{}|tojson(indent=2)
none|tojson
1.0|tojson
[true,false]|tojson
q|string
range(3)|list
range(2,5)|list
range(5,0,-2)|list
s|indent
'a\nb\n\nc'|indent(2)
'a\nb'|indent(2, true)
'a\n\nb'|indent(2, blank=true)
s|wordcount
'<a href="x">&\'</a>'|e
'<a>'|safe
d|items|list
[[1,2],[3]]|sum(start=[])
-1|abs
(-1)|abs
s|upper|lower
s|first
undefinedname|length
undefinedname|list
l|tojson|length
'abc'|select('in','ac')|list
s|title
'they\'re bill\'s (ab) c-d'|title
u|e
nested|map(attribute='zz', default='D')|list
'a b'|capitalize
d|length > 1
n|default(3)|string|length
nested|last
(nested|last).content
'x'|upper is upper
l|map('string')|join('+')
'a'|d
missing|d|length
nested[-1]['content']|trim|length
3|string
none|string
none|default('x')
none|default('x', true)
missing|d('a')|upper
'ß'|upper
'ß'|capitalize
'ǆ'|title
l|list|length
('a','b')|join
w|sort|first
missing|join
missing|upper
missing|trim|length
none|trim
7|trim
12|length
'a\qb'
'a b'.split(None, 1)
'a b '.split(None, 1)
' 1 2'.rsplit(None, 5)
'x'.split('x')
''.split()
''.split(',')
l[::0]
l[-2:]
s[-100:100:3]
u[::-1]
u.upper()
u.find('日')
[l, d]
[none, true, 1.5]
{'k': none}.k
d is mapping and d.x == 1
not (l and e)
n != 7 or f > 2
(l|sort)[0]
nested|map(attribute='content')|map('upper')|list
nested|selectattr('n', 'gt', 1)|map(attribute='role')|first
'%'
7 in 'a'
9223372036854775807
2.0 ** 3
-7 / 2
7.5 // 2
-7.5 % 2
1e300 * 10
5.0 == 5
namespace(a=1).a
namespace(a=1).b is defined
'''
for expression in EXPRESSIONS.strip().splitlines():
    case("{{ " + expression + " }}", V)
for t in ["{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ x }},{% endfor %}",
"{% for x in [] %}x{% else %}none{% endfor %}","{% for x in l if x > 1 %}{{ loop.index }}:{{ x }} {% else %}n{% endfor %}","{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}","{% for a, b in [(1,2),(3,4)] %}{{a+b}} {% endfor %}",
"{% for x in l %}{{ loop.previtem }}<{{ x }}<{{ loop.nextitem }} {% endfor %}","{% for x in l %}{{ loop.cycle('a','b') }}{% endfor %}","{% for x in [1,1,2] %}{{ loop.changed(x) }}{% endfor %}",
"{% set x = 1 %}{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }}","{% set ns = namespace(x=1, y='a') %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z is defined }}",
"{% if t %}{% set y = 3 %}{% endif %}{{ y }}","{% set a, b = 1, 2 %}{{ a }}{{ b }}","{% set x %}text {{ n }}{% endset %}[{{ x }}]","{% set x | upper %}text {{ n }}{% endset %}[{{ x }}]",
"{% macro m(a, b=2, c='z') %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c='q') }} {{ m(b=5, a=0) }} {{ m() }}","{% macro r(k) %}{% if k > 0 %}{{ k }}{{ r(k - 1) }}{% endif %}{% endmacro %}{{ r(3) }}","{% set g = 5 %}{% macro m() %}{{ g }}{% endmacro %}{% set g = 6 %}{{ m() }}",
"{% macro m(x) -%} {{ x }} {%- endmacro %}[{{ m('a') }}]{{ m('b') | upper }}","{% for i in range(6) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
"{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}","{% raw %}{{ x }}{% if %}{% endraw %}","a {#- c -#} b","a {# c #} b","{% if n == 7 and l|length == 3 %}y{% elif t %}e{% else %}n{% endif %}",
"{% for r in nested %}{% for c in r.content %}{{ loop.index }}{{ c }}{% endfor %}{{ loop.depth }}{% endfor %}","{% generation %}{{ s }}{% endgeneration %}","{{ raise_exception('no') }}","{{ s.nothing() }}","{{ undefinedname.x }}","{{ undefinedname() }}","{{ l.append(3) }}","{{ n + s }}","{{ n < s }}","{{ 1 / 0 }}","{{ nope | nofilter }}","{% nostatement %}","{{ s is notest }}","{{ 'a }}","{{ (1 }}","{% if %}x{% endif %}","{% for x in n %}{% endfor %}","{% if t %}","{% endif %}","{{ s | trim(1, 2, 3) }}","{% set a, b = [1] %}","{{ m(1) }}{% macro m(x) %}{% endmacro %}",
"{% for x in l %}\n  {{ x }}\n{% endfor %}\nend\n","{%- if t -%}\n  a  \n{%- else -%}\n b\n{%- endif +%}\n c","  {% if t %}  \n x {% endif %}  \n","a\n  {%+ if t %}\nb{% endif %}","{% if t -%}\n   x{% endif %}","x\n\t{# c #}\ny\n","  {{ n }}\n  {{- s -}}  \n z","{{ n -}}\n\n x","{% if t %}\n\nx{% endif %}","a  {% if t %}b{% endif %}","{% if t %}a{% endif %}\n{% if t %}b{% endif %}\n","{% set x = {'a': {'b': 1}} %}{{ x.a.b }}{{ {'a':1}}}","\r\n{% if t %}\r\na\r\n{% endif %}\r\n","{% raw -%}  a {%- endraw %}  b","{{ '}}' }}{{ \"{%\" }}","{{ { 'a' : [1,{'b':2}] }['a'][1]['b'] }}", "{% for m in nested %}{{ m.role ~ ': ' ~ m['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}","{% set ns = namespace(found=false) %}{% for m in nested[::-1] %}{% if not ns.found and m.role == 'user' %}{% set ns.found = true %}{{ loop.index0 }}{% endif %}{% endfor %}","{% if nested[0]['role'] == 'system' %}{{ 1 }}{% else %}{{ 2 }}{% endif %}", "{{ nested | length - 1 }}", "{% set loop_messages = nested[1:] %}{{ loop_messages }}","{% if x is not defined %}{% set x = false %}{% endif %}{{ x }}","{{ '' if x is not defined else 'y' }}", "a{% if t %}\n{% endif %}\nb", "{#\n multi\n#}\nx", "  {#- a #}\n x", "{% if t %} {% endif %}|", "{%if t%}x{%endif%}", "{{'x'}}{{-'y'-}} z"]:
    case(t,V)
for t in ["a\n{% if t %}\n  b\n{% endif %}\n","  {% if t %}x{% endif %}\n","{{ n }}\n"]:
    for o in [dict(trim=False,lstrip=False,keep=True),dict(trim=True,lstrip=False,keep=True),dict(trim=False,lstrip=True),dict(keep=True)]:
        case(t,V,**o)

# Chat templates in the shapes that published models use.
CHATML="""{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
VL="""{%- set image_count = namespace(value=0) %}
{%- macro render_content(content, do_count, is_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or item.type == 'image' %}
                {%- if is_system %}{{- raise_exception('System message cannot contain images.') }}{%- endif %}
                {%- if do_count %}
                    {%- set image_count.value = image_count.value + 1 %}
                {%- endif %}
                {%- if add_ids %}{{- 'Picture ' ~ image_count.value ~ ': ' }}{%- endif %}
                {{- '<|image|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Unexpected content type.') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = render_content(message.content, true, message.role == 'system')|trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking is not defined or enable_thinking else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}"""
NEMO="""{% set ns = namespace(enable_thinking=true) %}
{% for message in messages %}
{% set content = message['content'] %}
{% if message['role'] == 'user' or message['role'] == 'system' %}
{% if '/think' in content.replace('</think>', '') %}
{% set ns.enable_thinking = true %}
{% elif '/no_think' in content %}
{% set ns.enable_thinking = false %}
{% endif %}
{% endif %}
{% endfor %}
{{ bos_token }}{% if messages[0]['role'] != 'system' %}{{ '<SPECIAL_10>System\\n' }}{% else %}{{ '<SPECIAL_10>System\\n' + messages[0]['content'].replace('/think', '').replace('/no_think', '').strip() }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'user' %}{{ '\\n<SPECIAL_11>User\\n' + message['content'].replace('/no_think', '').strip() + '\\n' }}{% elif message['role'] == 'assistant' %}{{ '<SPECIAL_11>Assistant\\n' + message['content'].split('</think>')[-1].strip() + '\\n<SPECIAL_12>\\n' }}{% elif message['role'] not in ['system', 'tool'] %}{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\\n' }}{% if not ns.enable_thinking %}{{ '<think></think>' }}{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}
"""
LLAMA="""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|h|>system<|/h|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|h|>' + message['role'] + '<|/h|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n\\n' }}{%- endif %}
"""
MIST="""{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if (message == user_messages[-1]) %}{{- "[LAST]" }}{%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif (message.tool_calls is defined and message.tool_calls is not none) %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token}}
    {%- elif message["role"] != "system" %}{{- raise_exception("Only user, system and assistant roles are supported, got " ~ message["role"] ~ "!") }}
    {%- endif %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) and message['role'] != 'system' %}{{ '(odd)' }}{%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}"""
GRAN="""{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|start_of_role|>system<|end_of_role|>' + message['content'] + '<|end_of_text|>
' }}{% else %}
{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>
' }}{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
{% endfor %}"""
msgs=[[dict(role="user",content="What is 2+2?")],
 [dict(role="system",content="Be brief. /think"),dict(role="user",content="  hi\n")],
 [dict(role="system",content="Sys /no_think"),dict(role="user",content="one"),dict(role="assistant",content="<think>\nhm\n</think>\n\nok"),dict(role="user",content="two 'q' \"d\" <b> & ż")],
 [dict(role="user",content="a"),dict(role="assistant",content="b",reasoning_content="r"),dict(role="user",content="c"),dict(role="assistant",content="<think>x</think>d")],
 [dict(role="user",content="w?"),dict(role="assistant",content="",tool_calls=[dict(id="1",function=dict(name="get",arguments=dict(city="Łódź",n=[1,2.5,None,True]))),dict(id="2",function=dict(name="put",arguments="{}"))]),dict(role="tool",content="sun"),dict(role="tool",content="rain"),dict(role="user",content="thx")],
 [dict(role="system",content="s"),dict(role="user",content="u"),dict(role="system",content="late")],
 [dict(role="weird",content="x")], []]
msgs2=msgs+[[dict(role="user",content=[dict(type="text",text=" look "),dict(type="image"),dict(type="text",text="and")])],[dict(role="system",content=[dict(type="image")])]]
for t in [CHATML,VL,NEMO,LLAMA,MIST,GRAN]:
    for m in (msgs2 if t is VL else msgs):
        for extra in [dict(add_generation_prompt=True),dict(add_generation_prompt=False),dict(add_generation_prompt=True,enable_thinking=False,tools=[dict(type="function",function=dict(name="get",description="gets \"it\"",parameters=dict(type="object",properties=dict(x=dict(type="string")))))])]:
            case(t,dict(messages=m,bos_token="<s>",eos_token="</s>",**extra))

json.dump({"jinja2": jinja2.__version__, "templates": templates, "variables": variables, "cases": cases}, sys.stdout,
          indent=0)
print()
