"""OpenAI's chats: lists of parts, empty contents, tool calls and tools reach the text, or the chat is left out."""

import json

import pytest
from chat_templates import CHATML_UNMARKED, make_tokenizer

from lit_fused.data import ChatEncoding
from lit_fused.data.chat_template import CHATML

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
    (one,) = ChatEncoding().encoder(tokenizer, 10_000)([{"messages": messages, **record}])
    if not len(one.tokens):
        return "", one.notes[0]
    assert one.loss_mask is not None
    return str(tokenizer.decode(one.tokens)), str(tokenizer.decode(one.tokens[one.loss_mask]))


@pytest.mark.parametrize("content", [None, "", "missing"])
@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (HERMES, '\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call><|im_end|>'),
        (CHATML, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>'),
        (LLAMA31, '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}<|eot_id|>'),
    ],
)
def test_a_call_is_learned_as_the_template_writes_it_whatever_stands_for_no_content(template, learned, content):
    messages = conversation(content)
    if content == "missing":
        del messages[1]["content"]
    text, loss_mask = encoded(template, messages)
    end = "<|eot_id|>" if template is LLAMA31 else "<|im_end|>"
    assert loss_mask == learned + "dry" + end
    assert "None" not in text


def test_the_older_function_call_is_a_tool_call():
    asked = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    result = {"role": "function", "name": "weather", "content": RESULT["content"]}
    functions = [tool["function"] for tool in TOOLS]
    older = encoded(HERMES, [USER, asked, result, ANSWER], functions=functions)
    assert older == encoded(HERMES, conversation(), tools=TOOLS)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_message_with_a_part_that_is_no_text_is_left_out(kind):
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}, ANSWER]
    assert encoded(CHATML, messages) == ("", f"left out: a message has a part of type {kind}, and only text is learned")


def test_what_a_template_drops_is_not_learned():
    of_calls = "left out: the chat template leaves out a tool call; set data.chat_template to chatml"
    assert encoded(CHATML_UNMARKED, conversation())[1].startswith(of_calls)
    beside_a_call = encoded(LLAMA31, conversation("Let me look"))[1]
    assert beside_a_call.startswith("left out: the chat template leaves out a message;")
    without_results = HERMES.replace("+ message.content + '</tool", "+ '</tool")
    assert encoded(without_results, conversation())[1].startswith("left out: the chat template leaves out a message;")
    for template in (CHATML_UNMARKED, LLAMA31):
        of_tools = encoded(template, [{**USER, "content": "12"}, ANSWER], tools=TOOLS)[1]
        assert of_tools.startswith("left out: the chat template leaves out the tools;")


def test_tools_calls_and_answers_of_tools_are_written_by_chatml_behind_the_systems_message():
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
    system = {"role": "system", "content": "Be brief."}
    text, learned = encoded(CHATML, [system, *conversation("Let me look.")], tools=TOOLS)
    assert learned == f"Let me look.\n{call}<|im_end|>dry<|im_end|>"
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>\n\nFor each function call" in text
    assert text.endswith('<|im_start|>tool\n{"rain": "no"}<|im_end|>\n<|im_start|>assistant\ndry<|im_end|>\n')
    assert text.count("Be brief.") == text.count("<|im_start|>system") == 1
    two = [CALL, {**CALL, "id": "c2", "function": {"name": "news", "arguments": "{}"}}]
    _, learned = encoded(CHATML, conversation(tool_calls=two), tools=TOOLS)
    news = '<tool_call>\n{"name": "news", "arguments": {}}\n</tool_call>'
    assert learned == f"{call}\n{news}<|im_end|>dry<|im_end|>"
