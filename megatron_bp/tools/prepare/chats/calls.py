"""Whether a template renders all of a turn with tool calls: names, arguments, and a content.

The turn is rendered with marks in place of what is in it. What a template leaves out (a second
call, the content beside calls) has its mark nowhere. Names, arguments and content are marked one
after the other, so that a template which looks at one of them sees the others as they are.
"""

import json
from collections.abc import Callable
from typing import Any

from megatron_bp.tools.prepare.chats.parse import Message
from megatron_bp.tools.prepare.outcome import RejectedError


def check_calls(
    i: int, turn: Message, text: str, render: Callable[[Message], str], sentinel: str
) -> None:
    """Reject a turn of which a part is not rendered.

    Args:
        i: which message it is.
        turn: an assistant's, with tool calls.
        text: what is supervised of it.
        render: the chat up to this turn, with a turn in its place.
        sentinel: a text that is in no message.

    Raises:
        RejectedError: bad_type or template_changes_text.
    """
    calls = turn["tool_calls"]
    names = [_name(i, call) for call in calls]
    marks = [f"{sentinel}{n}Qz" for n in range(len(calls))]  # none is part of another
    named = [_with(c, {"name": mark}) for c, mark in zip(calls, marks, strict=True)]
    shown = render(turn | {"tool_calls": named})
    for name, mark in zip(names, marks, strict=True):
        if mark not in shown:
            _lost(f"the tool call {name!r} of message {i} is not rendered")
    content = turn.get("content") or ""
    if content.strip():
        shown = render(turn | {"content": sentinel})
        if sentinel not in shown or content.strip() not in text:
            _lost(f"the content of message {i}, beside its tool calls, is not rendered as it is")
    _check_arguments(i, turn, names, render, sentinel)


def _check_arguments(
    i: int, turn: Message, names: list[str], render: Callable[[Message], str], sentinel: str
) -> None:
    marks: dict[str, str] = {}  # to the name of the call
    calls = []
    for call, name in zip(turn["tool_calls"], names, strict=True):
        function, n = call.get("function", call), len(marks)
        if "arguments" in function:
            changed, count = _marked_arguments(function["arguments"], sentinel, n)
            call = _with(call, {"arguments": changed})
            marks |= {f"{sentinel}{k}Qz": name for k in range(n, n + count)}
        calls.append(call)
    if not marks:
        return
    shown = render(turn | {"tool_calls": calls})
    for mark, name in marks.items():
        if mark not in shown:
            _lost(f"an argument of the tool call {name!r} of message {i} is not rendered")


def _name(i: int, call: Message) -> str:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise RejectedError("bad_type", f"message {i}: a tool call without a name")
    return name


def _with(call: Message, change: Message) -> Message:
    if "function" in call:
        return call | {"function": call["function"] | change}
    return call | change


def _marked_arguments(value: Any, sentinel: str, first: int) -> tuple[Any, int]:
    """Return arguments with marks in them, and how many; a text of JSON becomes one again."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
            if isinstance(inner, dict | list):
                changed, count = _marked(inner, sentinel, first)
                return json.dumps(changed, ensure_ascii=False), count
        except (ValueError, RecursionError):
            pass  # a text of another kind
        if not value.strip():
            return value, 0
    return _marked(value, sentinel, first)


def _marked(value: Any, sentinel: str, first: int) -> tuple[Any, int]:
    """Return a copy of a value of JSON with a mark for each text, number and so on in it."""
    box, count = [value], 0
    waiting: list[tuple[Any, Any]] = [(box, 0)]  # no recursion: see parse.strings
    while waiting:
        where, key = waiting.pop()
        one = where[key]
        if isinstance(one, dict):
            where[key] = one = dict(one)
            waiting += [(one, k) for k in one]
        elif isinstance(one, list):
            where[key] = one = list(one)
            waiting += [(one, k) for k in range(len(one))]
        elif one is not None:  # templates leave out null
            where[key] = f"{sentinel}{first + count}Qz"
            count += 1
    return box[0], count


def _lost(words: str) -> None:
    raise RejectedError("template_changes_text", words)
