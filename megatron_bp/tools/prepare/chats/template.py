"""A chat to text, by the tokenizer's own Jinja template or a given one.

Rendering is transformers' own, in its sandbox, so what is trained on is what its users will render
when they generate. Knows nothing of spans and ids.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from megatron_bp.tools.prepare.chats.parse import Message
from megatron_bp.tools.prepare.outcome import RejectedError
from megatron_bp.tools.prepare.tokenizing import first_line


class Template:
    """Renders chats."""

    def __init__(self, path: Path | None, variables: Mapping[str, Any], tokenizer: Any) -> None:
        """Read it.

        Args:
            path: of a Jinja file; None for the tokenizer's own template.
            variables: names that the template may use, such as eos_token.
            tokenizer: of transformers; None for bytes.

        Raises:
            ValueError: there is none, or it is no Jinja.
        """
        from transformers.utils import chat_template_utils  # takes seconds: not for texts

        self._render: Any = chat_template_utils.render_jinja_template
        self._variables, self._tokenizer = variables, tokenizer
        self.name = path.name if path else "the tokenizer's own"
        self._text = None
        if path is not None:
            try:
                self._text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"--chat-template {path}: cannot be read as UTF-8 ({first_line(error)})."
                ) from error
        elif tokenizer is None or not tokenizer.chat_template:
            raise ValueError(
                "--format chats: the tokenizer has no chat template; give one with "
                "--chat-template FILE.jinja (configs/templates has a plain one)."
            )
        self._check_syntax(path)

    def _check_syntax(self, path: Path | None) -> None:
        try:
            self.render([{"role": "user", "content": "x"}], None)
        except RejectedError as error:
            cause = error.__cause__
            if isinstance(cause, jinja2.TemplateSyntaxError):
                raise ValueError(
                    f"--chat-template {path or self.name}: line {cause.lineno}: "
                    f"{first_line(cause)}; mend the template."
                ) from error

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, ask: bool = False
    ) -> str:
        """Return the text of a chat.

        Args:
            messages: of the chat.
            tools: that the chat has.
            ask: add the generation prompt, after which an answer is generated.

        Raises:
            RejectedError: the template refuses the chat, or fails on it.
        """
        try:
            text = self._text
            if text is None:
                text = self._tokenizer.get_chat_template(None, tools)
            (rendered,), _ = self._render(
                [list(messages)],
                tools=tools,
                chat_template=text,
                add_generation_prompt=ask,
                **self._variables,
            )
        except Exception as error:  # a template can do anything with any chat
            words = f"{self.name} template: {first_line(error)}"
            raise RejectedError("template_refuses", words) from error
        return str(rendered)

    def describe(self) -> dict[str, str]:
        """Return what P.json says."""
        text = self._tokenizer.chat_template if self._text is None else self._text
        if not isinstance(text, str):  # several, by name
            text = json.dumps(text, sort_keys=True)
        return {"name": self.name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
