"""Whether a tokenizer's normalizer joins what is on both sides of a cut through a text.

A normalizer changes text before it becomes tokens: it composes letters, makes one blank of several.
Where it does so across a cut, the tokens' places tell nothing: of a letter composed of two a token
is told to stand for one of them. Let N be the normalizer, left and right the text round the cut as
far as N sees it (up to the tokens that are found before N), and q a letter that joins nothing. With

    N(left + q) = L q        N(q + right) = N(q) R

nothing is joined if N(left + right) = L R: each side becomes what it becomes beside any text. Then
a token on both sides has its first character before the cut and its last one after it. The same is
asked of the two characters at the cut alone: where pairs become one, three can become as many as
one and two do apart, of other pairs.
"""

import re
from collections.abc import Callable

LETTERS = "q7_"  # no mark composes with them; one of them is no part of a replaced text


class Normalizer:
    """What a tokenizer does to text before it looks for tokens in it."""

    def __init__(self, normalize: Callable[[str], str], found_before: list[str]) -> None:
        """Find a letter that stays as it is.

        Args:
            normalize: a text.
            found_before: tokens whose text is taken out of a text before it is normalized.
        """
        self._normalize = normalize
        longest_first = sorted({*found_before} - {""}, key=len, reverse=True)
        self._apart = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def joins(self, text: str, cut: int) -> tuple[str, str] | None:
        """Return what is joined, before and after the cut; None if nothing is."""
        start, stop = 0, len(text)
        for found in self._apart.finditer(text):
            if found.end() <= cut:
                start = found.end()
            elif found.start() < cut:
                return None  # the cut is in a token that its place tells of
            else:
                stop = found.start()
                break
        left, right = text[start:cut], text[cut:stop]
        if not left or not right:
            return None
        for one, two in ((left, right), (left[-1], right[0])):
            if not any(self._is_apart(x, one, two) for x in LETTERS):
                return one, two
        return None

    def _is_apart(self, letter: str, left: str, right: str) -> bool:
        normalize = self._normalize
        alone = normalize(letter)
        before, after = normalize(left + letter), normalize(letter + right)
        if not (alone.endswith(letter) and before.endswith(letter) and after.startswith(alone)):
            return False
        return normalize(left + right) == before[: -len(letter)] + after[len(alone) :]
