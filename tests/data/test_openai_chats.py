"""OpenAI's chats: lists of parts, empty contents, tool calls and tools reach the text, or the chat is refused."""

import json
from typing import Any

import pytest
from chat_templates import CHATML_UNMARKED, PARTS, make_tokenizer

from lit_fused.data import ChatEncoding
from lit_fused.data.chat_encoding import ChatEncoder
from lit_fused.data.chat_template import CHATML
from lit_fused.errors import UserError

# As Qwen 2.5's and Hermes's: tools and calls as JSON, arguments as a mapping, no content where there is none.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    '{{ \'\n<tool_call>{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}'
    "{{ '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek V3's: calls where the content is none, arguments as a string, a content beside them is left out.
DEEPSEEK = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{{ '<|im_start|>assistant\n' }}{% for call in message['tool_calls'] %}"
    "{{ call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3.1's: one call, whose content is left out, and what the tool says is JSON.
LLAMA31 = (
    "{% for message in messages %}{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{% if message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ message.content | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# It prints whatever the content is, also None, and knows no tools.
PRINTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PRINTS_CALLS = PRINTS.replace("{{ '<|im_end|>", "{{ message.tool_calls | tojson if message.tool_calls }}{{ '<|im_end|>")

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}
USER = {"role": "user", "content": "weather in Oslo, 2 days"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"rain": "no"}'}
ANSWER = {"role": "assistant", "content": "dry"}


def conversation(content=None, **changes):
    asked = {"role": "assistant", "content": content, "tool_calls": [CALL], **changes}
    return [USER, asked, RESULT, ANSWER]


def encoded(template, messages, **record):
    """The text of a conversation, and what is learned of it."""
    tokenizer = make_tokenizer(template)
    (one,) = ChatEncoder(tokenizer, 10_000, ChatEncoding())([{"messages": messages, **record}])
    assert one.wanted is not None
    return str(tokenizer.decode(one.tokens)), str(tokenizer.decode(one.tokens[one.wanted]))


@pytest.mark.parametrize("content", [None, "", "missing"])
@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (HERMES, '\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call><|im_end|>'),
        (DEEPSEEK, 'weather\n```json\n{"city": "Oslo", "days": 2}\n```<|im_end|>'),
        (LLAMA31, '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}<|eot_id|>'),
    ],
)
def test_a_call_is_learned_as_the_template_writes_it_whatever_stands_for_no_content(template, learned, content):
    messages = conversation(content)
    if content == "missing":
        del messages[1]["content"]
    text, wanted = encoded(template, messages)
    end = "<|eot_id|>" if template is LLAMA31 else "<|im_end|>"
    assert wanted == learned + "dry" + end
    assert "None" not in text


@pytest.mark.parametrize("arguments", ['{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}])
def test_arguments_as_json_and_as_a_mapping_are_one_call(arguments):
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    for template in (HERMES, DEEPSEEK, LLAMA31):
        assert encoded(template, conversation(tool_calls=[call])) == encoded(template, conversation())


def test_the_older_function_call_is_a_tool_call():
    asked = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    result = {"role": "function", "name": "weather", "content": RESULT["content"]}
    functions = [tool["function"] for tool in TOOLS]
    older = encoded(HERMES, [USER, asked, result, ANSWER], functions=functions)
    assert older == encoded(HERMES, conversation(), tools=TOOLS)


def test_parts_of_text_are_the_text():
    parts = [{"type": "text", "text": "weather in "}, {"type": "text", "text": "Oslo, 2 days"}]
    in_parts = [{**USER, "content": parts}, {**ANSWER, "content": [{"type": "text", "text": "dry"}]}]
    for template in (CHATML, CHATML_UNMARKED, HERMES, PRINTS):
        assert encoded(template, in_parts) == encoded(template, [USER, ANSWER])


@pytest.mark.parametrize("content", ["12 fox", [{"type": "text", "text": "12 fox"}]])
def test_a_template_that_takes_parts_only_is_given_parts(content):
    text, wanted = encoded(PARTS, [{"role": "user", "content": content}, {"role": "assistant", "content": "dog"}])
    assert (text, wanted) == ("User:12 fox<|end|>Assistant:dog<|end|>", "dog<|end|>")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_refused_by_its_kind(kind):
    with pytest.raises(UserError, match=f"message 1 has a part of type {kind}; only parts of text"):
        encoded(CHATML, [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}, ANSWER])


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("template", [CHATML, CHATML_UNMARKED, PRINTS])
def test_a_template_that_drops_calls_is_refused(template, content):
    with pytest.raises(UserError, match=r"leaves out the tool call weather of message 2 \(assistant\); set data"):
        encoded(template, conversation(content))


def test_a_template_that_drops_what_stands_beside_a_call_or_what_a_tool_says_is_refused():
    with pytest.raises(UserError, match=r"leaves out the content of message 2 \(assistant\)"):
        encoded(LLAMA31, conversation("Let me look"))
    without_results = HERMES.replace("+ message.content + '</tool", "+ '</tool")
    with pytest.raises(UserError, match=r"leaves out the content of message 3 \(tool\)"):
        encoded(without_results, conversation())


def test_tools_are_written_or_refused():
    text, _ = encoded(HERMES, conversation(), tools=TOOLS)
    assert text.startswith("<|im_start|>system\n" + json.dumps(TOOLS[0]) + "<|im_end|>")
    for template in (CHATML, LLAMA31, DEEPSEEK):
        with pytest.raises(UserError, match="leaves out the tools that the record offers"):
            encoded(template, [USER, ANSWER], tools=TOOLS)


def test_nothing_of_python_is_written_where_a_template_prints_what_it_is_given():
    text, _ = encoded(PRINTS_CALLS, conversation())
    assert "None" not in text
    assert "{'" not in text


def test_two_calls_at_once_are_refused_in_the_templates_words_or_learned():
    calls = [CALL, {**CALL, "id": "c2", "function": {"name": "news", "arguments": "{}"}}]
    with pytest.raises(UserError, match="only supports single tool-calls"):
        encoded(LLAMA31, conversation(tool_calls=calls))
    assert '{"name": "news", "arguments": {}}' in encoded(HERMES, conversation(tool_calls=calls))[1]


@pytest.mark.parametrize("calls", ["weather", [3], [{"function": {"arguments": "{}"}}]])
def test_calls_of_another_shape_are_refused(calls):
    with pytest.raises(UserError, match="tool_calls of message 2 must be a list of"):
        encoded(HERMES, conversation(tool_calls=calls))


def test_what_transformers_makes_of_the_conversation_is_learned():
    tokenizer = make_tokenizer(HERMES)
    mapped = {**CALL, "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
    options: Any = {"tools": TOOLS, "return_dict": True}
    theirs: Any = tokenizer.apply_chat_template(conversation(tool_calls=[mapped]), **options)
    (ours,) = ChatEncoder(tokenizer, 1000, ChatEncoding())([{"messages": conversation(), "tools": TOOLS}])
    assert ours.tokens.tolist() == theirs["input_ids"]
