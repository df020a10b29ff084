"""The error of a folder or checkpoint that cannot be converted."""


class ConvertError(ValueError):
    """What cannot be converted: the value, the rule and the way out."""
