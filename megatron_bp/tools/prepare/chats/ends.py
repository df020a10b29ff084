"""The special tokens that end a turn."""

import itertools
import re

from megatron_bp.tools.prepare.outcome import MisfitError

WAYS = (
    "--answer-end eos ends the last turn with the tokenizer's EOS token, --answer-end none leaves "
    "ends unsupervised."
)


def ends_in(
    special: re.Pattern[str], text: str, stop: int, shared: int, calls: bool
) -> list[re.Match[str]]:
    """Return the special tokens that end a turn.

    Args:
        special: fits the text of any special token.
        text: of a chat up to the turn.
        stop: where the turn's answer ends in it, or begins if it has tool calls.
        shared: as much of the text as stands there once other turns follow, too.
        calls: the turn has tool calls, in which a special token ends nothing.
    """
    ends = [x for x in special.finditer(text, stop) if x.end() <= shared]
    if calls:
        return [x for x in ends[-1:] if not text[x.end() : shared].strip()]
    # The first, and those that follow it with blanks at most between them.
    gaps = [text[x.end() : y.start()].strip() for x, y in itertools.pairwise(ends)]
    return ends[: next((n for n, gap in enumerate(gaps, 1) if gap), len(ends))]


def check_ends(what: str, ends: list[re.Match[str]], text: str, stop: int, calls: bool) -> None:
    """Raise a MisfitError if a turn has no end, or text that is none of its answer before it.

    Args:
        what: the turn, for the error.
        ends: of the turn, by `ends_in`.
        text: see there.
        stop: see there.
        calls: see there.
    """
    if not ends:
        raise MisfitError(
            f"the template ends {what} with no special token: {text[stop : stop + 60]!r} follows "
            f"it, so generation would not know where to stop; {WAYS}"
        )
    between = text[stop : ends[0].start()]
    if between.strip() and not calls:
        raise MisfitError(
            f"the template puts {between[:60]!r} between {what} and its end {ends[0][0]!r}, so "
            f"that it would have to be generated; mend the template, or leave it unsupervised: "
            f"{WAYS}"
        )
