"""The error of everything that is refused."""

from typing import NoReturn


class RefusedError(ValueError):
    """A value or combination of flags that cannot be trained with."""


def no(message: str) -> NoReturn:
    """Refuse.

    Args:
        message: the value, the rule and the way out.
    """
    raise RefusedError(message)
