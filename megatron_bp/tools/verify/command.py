"""The command line of verify."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_bp import cpu
from megatron_bp.tools.verify import launch as launching
from megatron_bp.tools.verify.launch import LaunchError
from megatron_bp.tools.verify.topology import Topology, TopologyError, parse_topology

DESCRIPTION = """Certifies that a layout trains the same model.

A few real steps of CONFIG under each topology, from one set of weights, against a reference: loss,
gradient norm and the gradient of every parameter are compared. Flags after -- override the config.
docs/verify.md explains.

exit status: 0 all agree, 1 some layout does not, 2 bad input"""

GROUPS_HELP = "e.g. tp=2,bp=2,sp; names: tp pp vpp dp ep etp bp cp sp dist_opt accum recompute bf16"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what stands after `--` in `more`."""
    own, more = list(argv), []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(
        "python -m megatron_bp.tools.verify",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="as for pretrain_bdlm.py")
    add("--topology", action="append", required=True, metavar="T", help=GROUPS_HELP)
    add("--reference", default="dp=1", metavar="T", help="layout to compare with (default dp=1)")
    add("--tiny", action="store_true", help="shrink the config; make data if there is none")
    add("--steps", type=int, default=3, metavar="N", help="training steps (default 3)")
    add("--json", type=Path, metavar="FILE", help="write everything there too")
    add("--folder", type=Path, help="work folder, kept (default: a temporary one, removed)")
    add("--timeout", type=float, default=1800, metavar="S", help="seconds for one layout")
    add("--launch", metavar="COMMAND", help="starts the ranks; {ranks} {worker} are filled in")
    options = parser.parse_args(own)
    options.more = more
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")
    if options.timeout <= 0:
        parser.error(f"--timeout {options.timeout}: must be above 0")
    return options


def topologies(options: argparse.Namespace) -> tuple[Topology, ...]:
    """The layouts to certify.

    Raises:
        TopologyError: one is no layout, or is given twice.
    """
    layouts = tuple(parse_topology(text) for text in options.topology)
    for i, layout in enumerate(layouts):
        if layout in layouts[:i]:
            raise TopologyError(f"topology {layout.name} is given twice; keep one")
    return layouts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        layouts, reference = topologies(options), parse_topology(options.reference)
        if options.folder is not None:
            return _verify(options, layouts, reference, _fresh(options.folder))
        with tempfile.TemporaryDirectory(prefix="verify-") as folder:
            return _verify(options, layouts, reference, Path(folder))
    except LaunchError as error:
        print(f"verify: error: {error}", file=sys.stderr)
        return 2 if error.refused else 1
    except (ValueError, OSError) as error:
        print(f"verify: error: {error}", file=sys.stderr)
        return 2


def _fresh(folder: Path) -> Path:
    """The folder, made; what an earlier run left in it could pass for this one's.

    Raises:
        ValueError: there is something in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"--folder {folder}: is not empty; name a new one")
    return folder.resolve()


def _verify(
    options: argparse.Namespace, layouts: tuple[Topology, ...], reference: Topology, folder: Path
) -> int:
    launch: launching.Launch = launching.local
    if options.launch is not None:
        launch = launching.by_template(options.launch)
    if cpu.needed():
        cpu.install()
    from megatron_bp.arguments.command_line import given_values
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.tools.verify import report
    from megatron_bp.tools.verify.run import Plan, verify

    plan = Plan(
        values=given_values([options.config, *options.more], full_parser()),
        layouts=layouts,
        reference=reference,
        folder=folder,
        steps=options.steps,
        tiny=options.tiny,
        timeout=options.timeout,
        most_ranks=None if options.launch else launching.machine_ranks(),
    )
    verdicts = verify(plan, launch)
    print(report.table(verdicts))
    if options.json is not None:
        settings = {"config": options.config, "tiny": options.tiny, "reference": reference.name}
        report.write_json(options.json, verdicts, settings)
    return 0 if all(v.passed for v in verdicts) else 1
