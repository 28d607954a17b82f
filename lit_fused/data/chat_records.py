"""Read records of the shapes in which conversations are published, as messages with "role" and "content"."""

import json
from typing import Any

from lit_fused.data.chat_template import Message
from lit_fused.errors import UserError

MESSAGES_COLUMNS = ("messages", "conversations")

# ShareGPT-like files name the speakers so.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def read_conversation(record: dict[str, Any], messages_column: str | None = None) -> tuple[list[Message], list | None]:
    """Return the messages and the tools (or None) of a record.

    A message is {"role", "content"} and whatever else the template reads, or ShareGPT's {"from", "value"}; with
    "weight": 0, as OpenAI's files have it, an answer is not to be learned. Tools are a list, or JSON.

    Args:
        record: {"messages": [...]} or {"conversations": [...]}, perhaps with "tools". Null counts as absent, because
            Arrow fills with nulls whatever one message has and another lacks.
        messages_column: The column of the messages where it has another name.

    Raises:
        UserError: The record has another shape.
    """
    names = (messages_column,) if messages_column else MESSAGES_COLUMNS
    column = next((name for name in names if name in record), None)
    if column is None:
        raise UserError(
            f"a conversation needs a column {' or '.join(names)}, but this record has "
            f"{', '.join(map(str, record)) or 'none'}; set data.messages_column to the one that holds the messages"
        )
    record = without_none(record)
    messages = record.get(column)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{column} must be a list of messages, one at least; got {_shown(messages)}")
    return [_message(message, number) for number, message in enumerate(messages, start=1)], _tools(record.get("tools"))


def without_none(value: Any) -> Any:
    """Return ``value`` without the entries, at any depth, that are None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise UserError(f'message {number} must be {{"role": ..., "content": ...}}; got {_shown(message)}')
    if "role" not in message and "from" in message:
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        role = message["from"]
        message = {"role": _ROLES.get(role, role), "content": message.get("value"), **rest}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UserError(f"message {number} has no role; got {_shown(message)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise UserError(
            f"the content of message {number} ({role}) must be a string; got {_shown(content)}. Images and lists of "
            "parts are not supported"
        )
    if message.get("weight") not in (None, 0, 1):
        raise UserError(f"the weight of message {number} ({role}) must be 0 or 1; got {_shown(message['weight'])}")
    return message


def _tools(tools: Any) -> list | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"tools must be a list, or JSON of one; it cannot be read as JSON: {error}") from error
    if tools is not None and tools != "" and not isinstance(tools, list):
        raise UserError(f"tools must be a list, or JSON of one; got {_shown(tools)}")
    return tools or None


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."
