"""A line of JSON to a chat: what a chat is, and which flaws it can have.

A line is an object with `messages`, or with `prompt` and `completion`, each a text or a list of
messages, and maybe `tools`. A message is an object with `role` and `content`; an assistant's may
have `tool_calls` instead of content, and `weight` 0 says that a turn is not to be supervised. Other
keys are handed to the template as they are. Knows nothing of templates and tokenizers.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_bp.tools.prepare.objects import decoded, object_in
from megatron_bp.tools.prepare.outcome import RejectedError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAY_BE_EMPTY = ("tool", "function")  # a call can return nothing


@dataclass(frozen=True)
class Chat:
    """A sound chat.

    Attributes:
        messages: at least one.
        tools: descriptions of tools, for the template.
        first: messages before this one are a prompt's, and never supervised.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    first: int = 0


@dataclass(frozen=True)
class Limits:
    """What a sound chat must keep to.

    Attributes:
        roles: that a message may have.
        longest: UTF-8 bytes of all texts of a message, at most.
        special: fits the text of any special token of the tokenizer.
    """

    roles: Collection[str]
    longest: int
    special: re.Pattern[str]


def chat_in(data: bytes, limits: Limits) -> Chat:
    """Return the chat of a line.

    Raises:
        RejectedError: it holds none, or one with a flaw.
    """
    value = object_in(decoded(data))
    prompt: list[Message] = []
    if "messages" in value:
        if "prompt" in value or "completion" in value:
            raise RejectedError("not_a_chat", "messages beside prompt or completion: give one")
        messages = _messages(value["messages"], "messages", limits)
    elif "prompt" in value and "completion" in value:
        prompt = _messages(value["prompt"], "prompt", limits, "user")
        messages = _messages(value["completion"], "completion", limits, "assistant")
    else:
        raise RejectedError("not_a_chat", "neither messages nor prompt and completion")
    tools = value.get("tools")
    if tools is not None and not _objects(tools):
        raise RejectedError("bad_type", "tools is no list of objects")
    if tools:
        _check_texts(tools, "tools", limits)
    return Chat([*prompt, *messages], tools or None, len(prompt))


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _messages(value: object, name: str, limits: Limits, role: str = "") -> list[Message]:
    """Return the messages of a list, or, where a `role` is given, of a text of that role."""
    if role and isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        words = f"{name} is a {type(value).__name__}, not a list{' or a text' if role else ''}"
        raise RejectedError("bad_type", words)
    if not value:
        raise RejectedError("no_messages", f"{name} is empty")
    return [_message(one, f"{name}[{i}]", limits) for i, one in enumerate(value)]


def _message(value: object, name: str, limits: Limits) -> Message:
    if not isinstance(value, dict):
        raise RejectedError("bad_type", f"{name} is a {type(value).__name__}, not an object")
    # As transformers does; an empty list of calls is none.
    message = {k: v for k, v in value.items() if v is not None and (k != "tool_calls" or v != [])}
    if "role" not in message:
        raise RejectedError("missing_role", name)
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if not isinstance(role, str):
        raise RejectedError("bad_type", f"{name}: role is a {type(role).__name__}, not a text")
    if role not in limits.roles:
        raise RejectedError("unknown_role", f"{name}: {role!r}, not {', '.join(limits.roles)}")
    if calls is not None and (role != "assistant" or not _objects(calls)):
        raise RejectedError("bad_type", f"{name}: tool_calls is no list of objects of an assistant")
    if content is None and not calls:
        raise RejectedError("missing_content", name)
    if content is not None and not isinstance(content, str):
        words = f"{name}: content is a {type(content).__name__}, not a text"
        raise RejectedError("bad_type", words)
    if "weight" in message and (type(message["weight"]) is bool or message["weight"] not in (0, 1)):
        raise RejectedError("bad_type", f"{name}: weight is {message['weight']!r:.40}, not 0 or 1")
    if not calls and not str(content).strip() and role not in MAY_BE_EMPTY:
        raise RejectedError("empty_turn", f"{name}: {role}")
    _check_texts(message, name, limits, limits.longest)
    return message


def _check_texts(value: object, name: str, limits: Limits, longest: int | None = None) -> None:
    """Reject what no text of a chat may hold."""
    text = "\n".join(strings(value))
    if "\0" in text:
        raise RejectedError("nul_byte", name)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise RejectedError("not_utf8", f"{name}: half a surrogate pair") from None
    if longest is not None and size > longest:
        raise RejectedError("turn_too_long", f"{name}: {size} bytes, --max-turn-bytes {longest}")
    found = limits.special.search(text)
    if found:
        raise RejectedError("special_token_in_text", f"{name}: {found[0]!r}")


def strings(value: object) -> Iterator[str]:
    """Yield every text in a value of JSON, keys too."""
    waiting = [value]  # no recursion: JSON may be nested deeper than Python calls
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one
