"""`python -m megatron_bp.tools.bench SUBCOMMAND`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bp.tools.bench import attention, exchange, sft, step
from megatron_bp.tools.bench.two_hosts import command as hosts

SUBCOMMANDS = {
    "attention": attention,
    "exchange": exchange,
    "hosts": hosts,
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
    options = parser.parse_args(argv)
    module = SUBCOMMANDS[options.command]
    try:
        result = module.run(options)
    except ValueError as error:
        sys.exit(f"bench {options.command}: error: {error}")
    print("\n".join(module.lines(result)))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
