"""Chat templates as in model directories, and as an attacker might write them."""

import datetime
import json

import pytest

pytest.importorskip("jinja2", reason="needs the extra `serve`")

from jax_attn.serve._chat import chat

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def directory(tmp_path):
    def write(template=None, jinja=None, **config):
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        return tmp_path

    return write


def render(directory, *messages, **variables):
    return chat.load(directory).render(list(messages) or [USER], variables)


CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def test_chatml(directory):
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(directory(CHATML)) == expected
    thinking = render(directory(CHATML), enable_thinking=False)
    assert thinking == expected + "<think>\n\n</think>\n\n"


def test_special_tokens_and_older_forms(directory):
    template = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]{{ eos_token }}"
    where = directory(template, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    assert render(where) == "<s>[INST] hi [/INST]</s>"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    assert render(directory(named)) == "hi"


def test_templates_by_name(directory):
    """The choice of transformers: a tools template for requests with tools if there is one, else
    default.
    """
    tools = [{"type": "function", "function": {"name": "f"}}]
    default = {"name": "default", "template": "plain"}
    tagged = '<tool_call>{"arguments": {{ tools | length }}'
    tool_use = {"name": "tool_use", "template": tagged}
    loaded = chat.load(directory([tool_use, default]))
    assert loaded.render([USER]) == "plain"
    assert loaded.render([USER], tools=tools) == '<tool_call>{"arguments": 1'
    assert loaded.tool_format is not None and chat.load(directory([default])).tool_format is None
    assert chat.load(directory([default])).render([USER], tools=tools) == "plain"
    # A single template serves all requests, whatever its name.
    only = chat.load(directory([{"name": "rag", "template": "only"}]))
    assert only.render([USER]) == only.render([USER], tools=tools) == "only"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "a", "template": ""}, {"name": "b", "template": ""}], "'default', got a, b"),
        ([{"name": "default"}], "name and template"),
        ([{"name": "default", "template": 5}], "name and template"),
        (["default"], "name and template"),
        (5, "expected a text"),
    ],
)
def test_templates_that_are_none(directory, template, message):
    with pytest.raises(chat.ChatTemplateError, match=message):
        chat.load(directory(template))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected an object, got list"),
        ("\xff", "not JSON"),
    ],
)
def test_a_tokenizer_config_that_is_none_is_named(tmp_path, text, message):
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(chat.ChatTemplateError) as error:
        chat.load(tmp_path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_what_a_template_writes_is_bounded(directory, monkeypatch):
    """A conversation whose messages each contain all others, and a template that takes too long."""
    where = directory(
        "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a" * 2000}] * 2048
    with pytest.raises(chat.ChatTemplateError, match="over 16777216 characters"):
        chat.load(where).render(messages)
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.0)
    with pytest.raises(chat.ChatTemplateError, match="took over 0 s"):
        chat.load(where).render(messages)


def test_a_file_of_its_own_comes_first(directory):
    assert render(directory("config", jinja="file")) == "file"


def test_what_transformers_adds_to_jinja(directory):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    message = {"role": "user", "content": "<é'>"}
    year = str(datetime.datetime.now().year)
    assert (
        render(directory(template), message, USER) == json.dumps(message, ensure_ascii=False) + year
    )


def test_lines_of_blocks_leave_no_space(directory):
    assert render(directory("  {% if true %}\n  a\n  {% endif %}\n")) == "  a\n"


def test_a_template_may_refuse(directory):
    template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(chat.ChatTemplateError, match="Roles must alternate"):
        render(directory(template))


def test_no_template(directory, tmp_path):
    with pytest.raises(chat.ChatTemplateError, match="no chat template"):
        render(directory())
    with pytest.raises(chat.ChatTemplateError, match="no chat template"):
        chat.load(tmp_path / "nothing here").render([USER])


def test_does_not_compile(directory):
    with pytest.raises(chat.ChatTemplateError, match="does not compile"):
        chat.load(directory("{% if %}"))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ messages[0].__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ undefined_name.attribute }}",
        "{{ 1 // 0 }}",
    ],
)
def test_the_sandbox(directory, attack):
    before = dict(USER)
    with pytest.raises(chat.ChatTemplateError):
        render(directory(attack))
    assert before == USER


def test_variables_of_a_request_do_not_replace_its_messages(directory):
    template = "{{ messages | length }}{{ documents }}"
    assert render(directory(template), documents="d", messages=[], self=1) == "1d"
