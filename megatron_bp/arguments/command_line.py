"""The config file and the command line as one list of flags, and as the values they give."""

import argparse
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_bp.arguments.config_file import ConfigError, read_config, to_flags
from megatron_bp.arguments.flags import USAGE


def join(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The config file's flags, then the command line's, which win."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    if len(argv) > 1 and not argv[1].startswith("-"):
        raise ConfigError(f"two files given, {argv[0]} and {argv[1]}; usage: {USAGE}")
    values = read_config(Path(argv[0]))
    return to_flags(values, parser, argv[0]) + argv[1:]


def given_values(argv: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What a command line gives, file and flags together, as a config file would say it."""
    flags = join(argv, parser)
    values = vars(parser.parse_args(flags))
    by_option = {o: a for a in parser._actions for o in a.option_strings}
    given: dict[str, Any] = {}
    for place, token in enumerate(flags):
        option, equals, text = token.partition("=")
        action = by_option.get(option)
        if action is None or not token.startswith("--"):
            continue
        key = option[2:].replace("-", "_")
        if key == "print_config" or key.startswith(("dry_run", "preflight")):
            continue  # of this look at the run, not of the run
        value = True if action.nargs == 0 else values[action.dest]
        plain = isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
        if action.nargs is None and not plain:  # a signal is a number and an Enum
            value = text if equals else flags[place + 1]  # as it was written
        given[key] = value
    return given
