"""`python -m megatron_bp.tools.bench SUBCOMMAND`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bp.tools.bench import attention, exchange, memory, sft, step
from megatron_bp.tools.bench.page import put
from megatron_bp.tools.bench.two_hosts import command as hosts

SUBCOMMANDS = {
    "attention": attention,
    "exchange": exchange,
    "hosts": hosts,
    "memory": memory,
    "sft": sft,
    "step": step,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one benchmark; print its lines, and write its JSON where that is asked for."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        doc = (module.__doc__ or "").split("\n\n")[0]
        command = commands.add_parser(name, help=doc, description=module.__doc__)
        module.add_flags(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
        command.add_argument(
            "--page", nargs=2, metavar=("FILE", "NAME"), help="put what is printed on a page"
        )
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    module = SUBCOMMANDS[options.command]
    try:
        result = module.run(options)
    except ValueError as error:
        sys.exit(f"bench {options.command}: error: {error}")
    lines = module.lines(result)
    print("\n".join(lines))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        try:
            put(Path(options.page[0]), options.page[1], without_files(words), lines)
        except ValueError as error:
            sys.exit(f"bench {options.command}: error: {error}")


def without_files(words: Sequence[str]) -> list[str]:
    """A command line without the flags that say where results go."""
    left = list(words)
    for flag, values in (("--json", 1), ("--page", 2)):
        if flag in left:
            at = left.index(flag)
            del left[at : at + 1 + values]
    return left


if __name__ == "__main__":
    main()
