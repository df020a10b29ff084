r"""Where in a rendered chat the supervised turns are.

For a supervised turn i, the template renders four texts (ask: with the generation prompt):

    whole   all of the chat                        what is tokenized
    asked   messages before i, ask                 what the model is given when it generates turn i
    probe   messages before i, i with a sentinel   prefix + sentinel + tail
            in place of its content
    upto    messages up to i                       prefix + answer + tail

So the answer is what `upto` has where `probe` has the sentinel, exactly, and must be the content
or the content stripped at one or both ends. For an assistant's turn `prefix` must be `asked`: what
is in one and not in the other is text that nobody would generate, or that nobody would give.
(--answer-header: what `prefix` has more is unsupervised, or the start of what is generated.)
`whole` must start with prefix + answer: a template that renders earlier turns otherwise once more
turns follow (drops their thoughts, say) has no one place where they can be supervised.

End of turn: the first special token in `tail` that `whole` has too, and those after it with blanks
at most between them. "turn" supervises all from the answer to the last one's end (a line break
before it is as much to be generated as the token; other text before it is an error); "eos" and
"none" the answer alone. A turn with tool calls has no content to replace: its prefix is taken of
the same turn with the sentinel and no calls, and all that the template renders after it is the
answer, up to the last special token that `whole` has too.

Example, with | round what is supervised and the texts of turn 1 of two:

    whole    <s>user\nHi<e>\n<s>assistant\n|Hello!<e>|\n<s>user\nBye<e>\n ...
    asked    <s>user\nHi<e>\n<s>assistant\n
    probe    <s>user\nHi<e>\n<s>assistant\nSENTINEL<e>\n
    upto     <s>user\nHi<e>\n<s>assistant\nHello!<e>\n
"""

import bisect
import itertools
import re
from dataclasses import dataclass

from megatron_bp.tools.prepare.chats.calls import check_calls
from megatron_bp.tools.prepare.chats.ends import check_ends, ends_in
from megatron_bp.tools.prepare.chats.parse import MAY_BE_EMPTY, Chat, Message
from megatron_bp.tools.prepare.chats.template import Template
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.outcome import MisfitError, RejectedError

SENTINEL = "ZqTheContentStandsHereQz"  # survives stripping, and means nothing to a template
SHOWN = 60  # characters of a text in an error


@dataclass(frozen=True)
class Span:
    """Characters start to stop of a text are supervised; an end marker starts at `end`."""

    start: int
    end: int
    stop: int


@dataclass(frozen=True)
class Marked:
    """A rendered chat.

    Attributes:
        text: what is tokenized.
        spans: of the supervised turns, in order, apart from each other.
        eos: the tokenizer's EOS id follows the text, and is supervised.
        roles: bit k says that a turn of the k-th of options.supervise_roles is supervised.
    """

    text: str
    spans: tuple[Span, ...]
    eos: bool
    roles: int

    @property
    def supervised_bytes(self) -> int:
        """UTF-8 bytes of the supervised text without its end markers."""
        return sum(len(self.text[x.start : x.end].encode()) for x in self.spans)


def mark(chat: Chat, template: Template, special: re.Pattern[str], options: Options) -> Marked:
    """Return the chat's text with its supervised spans.

    Args:
        chat: a sound one.
        template: that renders it.
        special: fits the text of any special token of the tokenizer.
        options: which turns, and what of them.

    Raises:
        RejectedError: this chat cannot be supervised exactly.
        MisfitError: the template's turns cannot be.
    """
    turns = supervised_turns(chat, options)
    whole = template.render(chat.messages, chat.tools)
    finder = _Finder(chat, template, special, options, whole)
    try:
        spans = tuple(finder.span(i) for i in turns)
    except (RejectedError, MisfitError) as error:
        if template.render(chat.messages, chat.tools) == whole:
            raise
        raise MisfitError(
            "the template renders the same chat otherwise each time (does it tell the time, or "
            "draw by chance?), so no text in it has a place; mend it to render one text."
        ) from error
    if any(one.stop > two.start for one, two in itertools.pairwise(spans)):
        raise RejectedError("template_changes_text", "supervised turns overlap")
    eos = options.answer_end == "eos" and turns[-1] == len(chat.messages) - 1
    found = {chat.messages[i]["role"] for i in turns}
    bits = sum((role in found) << k for k, role in enumerate(options.supervise_roles))
    return Marked(whole[: spans[-1].stop] if eos else whole, spans, eos, bits)


def supervised_turns(chat: Chat, options: Options) -> list[int]:
    """Return which messages are supervised, at least one.

    Raises:
        RejectedError: none is.
    """
    roles = options.supervise_roles
    turns = [i for i in range(chat.first, len(chat.messages)) if chat.messages[i]["role"] in roles]
    weighed = [i for i in turns if chat.messages[i].get("weight", 1)]
    if not weighed:
        words = " but with weight 0" if turns else ""
        raise RejectedError("no_supervised_turn", f"none of {', '.join(roles)}{words}")
    return weighed[-1:] if options.supervise == "last" else weighed


@dataclass(frozen=True)
class _Finder:
    """Finds the spans of one chat; `whole` is all of it rendered."""

    chat: Chat
    template: Template
    special: re.Pattern[str]
    options: Options
    whole: str

    def span(self, i: int) -> Span:
        turn = self.chat.messages[i]
        prefix, tail = self._probe(i)
        start = self._start(i, prefix)
        last = i == len(self.chat.messages) - 1
        upto = self.whole if last else self._render(i + 1)
        calls = turn.get("tool_calls")
        stop = len(prefix) if calls else self._end_of_content(i, upto, prefix, tail)
        if not upto.startswith(prefix):
            raise RejectedError("template_changes_text", f"what is before message {i}'s answer")
        shared = self._shared(i, upto, stop)
        ends = ends_in(self.special, upto, stop, shared, bool(calls))
        if self.options.answer_end == "turn":
            check_ends(f"the {turn['role']}'s turn (message {i})", ends, upto, stop, bool(calls))
        if calls:
            stop = ends[0].start() if ends else len(upto[:shared].rstrip())
            check_calls(i, turn, upto[start:stop], lambda x: self._render(i, x), self._sentinel())
        if self.options.answer_end != "turn":
            return Span(start, stop, stop)
        return Span(start, stop, ends[-1].end())

    def _render(self, stop: int, *more: Message, ask: bool = False) -> str:
        return self.template.render([*self.chat.messages[:stop], *more], self.chat.tools, ask)

    def _sentinel(self) -> str:
        sentinel = SENTINEL
        while sentinel in self.whole:
            sentinel += "Qz"
        return sentinel

    def _probe(self, i: int) -> tuple[str, str]:
        """Return what the template renders before and after the content of message i."""
        sentinel = self._sentinel()
        turn = {k: v for k, v in self.chat.messages[i].items() if k != "tool_calls"}
        parts = self._render(i, turn | {"content": sentinel}).split(sentinel)
        if len(parts) != 2:
            words = f"renders the content of message {i} {len(parts) - 1} times, or changes it"
            raise RejectedError("template_changes_text", words)
        return parts[0], parts[1]

    def _start(self, i: int, prefix: str) -> int:
        """Return where supervised text starts: after the generation prompt, or what is like one.

        Raises:
            MisfitError: the generation prompt is not what is before an assistant's answer.
        """
        header = self.options.answer_header
        if self.chat.messages[i]["role"] != "assistant" or header == "skip":
            return len(prefix)
        asked = self._render(i, ask=True)
        same = _shared_length(asked, prefix)
        if same == len(asked) and (asked == prefix or header == "supervise"):
            return len(asked)
        skip = "leave it unsupervised with --answer-header skip"
        if same == len(asked):
            wrong = (
                f"the template puts {_shown(prefix[same:])} between its generation prompt and the "
                f"answer (message {i}), so that it would have to be generated"
            )
            ways = f"{skip}, or have it generated as the answer's start: --answer-header supervise"
        else:
            wrong = (
                f"the template's generation prompt goes on with {_shown(asked[same:])} where "
                f"the answer (message {i}) comes after {_shown(prefix[same:])}"
            )
            ways = f"or {skip}"
        raise MisfitError(
            f"{wrong}; let the template render the same with add_generation_prompt, {ways}."
        )

    def _end_of_content(self, i: int, upto: str, prefix: str, tail: str) -> int:
        content = self.chat.messages[i]["content"]
        stop = len(upto) - len(tail)
        forms = (content, content.strip(), content.lstrip(), content.rstrip())
        # Some roles' contents may be nothing; of others nothing is left of none.
        least = len(prefix) + (self.chat.messages[i]["role"] not in MAY_BE_EMPTY)
        fits = upto.startswith(prefix) and upto.endswith(tail) and stop >= least
        if not fits or upto[len(prefix) : stop] not in forms:
            words = f"the content of message {i} is not rendered as it is, nor stripped"
            raise RejectedError("template_changes_text", words)
        return stop

    def _shared(self, i: int, upto: str, stop: int) -> int:
        """Return how much of `upto` the whole chat starts with.

        The rest may be blank or special tokens, which a template puts after the last turn only.
        """
        shared = _shared_length(upto, self.whole)
        for one in self.special.finditer(upto, stop):
            if one.start() < shared < one.end():
                shared = one.start()
        if shared < stop or self.special.sub("", upto[shared:]).strip():
            raise RejectedError(
                "template_rewrites_history",
                f"message {i} is rendered otherwise once others follow it: "
                f"{_shown(upto[shared:])} becomes {_shown(self.whole[shared:])}",
            )
        return shared


def _shared_length(one: str, two: str) -> int:
    """Return how many characters two texts start with alike."""
    lengths = range(1, min(len(one), len(two)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda n: not two.startswith(one[:n]))


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
