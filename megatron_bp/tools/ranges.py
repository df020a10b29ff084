"""Numbers of layers, experts or ranks in words. Integers only."""

from collections.abc import Sequence


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
