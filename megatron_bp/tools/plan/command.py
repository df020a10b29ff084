"""The command line of the planner."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

DESCRIPTION = """Which layouts train CONFIG on so many GPUs, and how fast: counted, not measured.

CONFIG is a config of a run, as for pretrain_bdlm.py, or a shape file (configs/shapes). Flags after
-- override a run's config. docs/planning.md says what is counted and what is estimated.

exit status: 0 something fits, 1 nothing does in some context, 2 bad input"""

MOST_GPUS = 512
UNITS = {"K": 2**10, "M": 2**20}


class InputError(ValueError):
    """What cannot be planned."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what stands after `--` in `more`."""
    own, more = list(argv), []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    parser = _Parser(
        "python -m megatron_bp.tools.plan",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", type=Path, help="of a run, or a shape file")
    add("--gpus", type=int, metavar="N", help="how many (default: those of --nodes)")
    add("--gpu", default="h200", metavar="NAME", help="of planning/hardware.yaml (%(default)s)")
    add("--nodes", type=int, metavar="N", help="that they stand in (default: as few as hold them)")
    add("--network", type=float, metavar="GB/s", help="a GPU's part of a node's network")
    add("--free", type=float, default=10, metavar="%%", help="of memory, to stay so (%(default)s)")
    add("--context", metavar="T,...", help="tokens a row, such as 64K,1M (default: the config's)")
    add("--global-batch", type=int, metavar="N", help="packed rows a step (default: the config's)")
    add("--rates", type=Path, nargs="+", metavar="BENCH", help="JSON files of bench of this kind")
    add("--top", type=int, default=8, metavar="N", help="layouts that are printed (%(default)s)")
    add("--all", action="store_true", help="look also at layouts that are known to be worse")
    add("--json", type=Path, metavar="FILE", help="write all that fits there")
    add("--draw", type=Path, metavar="DIR", help="pictures of the best layout's rows and ranks")
    options = parser.parse_args(own)
    options.more = more
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and print; the exit status is in DESCRIPTION."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        fits = run(options)
    except BrokenPipeError:
        raise SystemExit(1) from None
    except MemoryError as error:
        fail(f"rows of this length cannot be counted in the memory of this machine: {error}")
    except (ValueError, OSError, ImportError) as error:
        fail(str(error))
    raise SystemExit(0 if fits else 1)


def fail(message: str) -> NoReturn:
    """One clear line, and exit status 2."""
    print(f"plan: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def run(options: argparse.Namespace) -> bool:
    """Whether something fits in every context.

    Raises:
        ValueError: bad input.
    """
    began = time.perf_counter()
    contexts = lengths(options.context)
    for name in ("gpus", "nodes", "top", "global_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise InputError(f"--json {options.json}: there is no such folder; make it first")
    # Imported once the line is known to mean something: this takes seconds.
    from megatron_bp.planning.search import Counts, Search
    from megatron_bp.tools.plan import text
    from megatron_bp.tools.plan.change import changes
    from megatron_bp.tools.plan.record import of_outcome
    from megatron_bp.tools.plan.source import read_source

    machine, rates = machine_of(options)
    source = read_source(options.config, options.more, machine.gpus, options.global_batch)
    task = source.task
    say(text.head(task, machine, rates))
    say(f"note: {note}" for note in source.notes)
    record: dict[str, Any] = {
        "config": str(options.config),
        "gpu": machine.gpu.name,
        "gpus": machine.gpus,
        "gpus_per_node": machine.per_node,
        "rates": rates,
        "contexts": [],
    }
    fits = True
    for length in contexts or [task.length]:
        task = replace(task, length=length)
        search = Search(task, machine, Counts(task))
        outcome = search.run(source.start, options.all)
        start = source.start
        if start is not None:
            micro_batches = task.global_batch // (start.dp * start.micro_batch)
            start = replace(start, micro_batches=micro_batches) if micro_batches else None
        say(["", *text.body(task, search, outcome, start, options.top)])
        ways: list[str] = []
        if not outcome.fitting:
            fits = False
            if outcome.closest is not None:
                say(["", "What would fit:", ""])
                for way in changes(task, machine):
                    ways.append(way)
                    say([f"- {way}"])
        record["contexts"].append(of_outcome(task, outcome, ways))
        if options.draw is not None and outcome.fitting:
            from megatron_bp.tools.plan.drawn import draw

            say(f"drawn: {path}" for path in draw(task, outcome.fitting[0].layout, options.draw))
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    say(["", f"planned in {time.perf_counter() - began:.1f} s"])
    return fits


def machine_of(options: argparse.Namespace) -> tuple[Any, str]:
    """(the machine, where its rates come from in words).

    Raises:
        ValueError: there is no such machine, or the rates cannot be read.
    """
    from megatron_bp.planning import rates as fitted
    from megatron_bp.planning.hardware import gpu_named
    from megatron_bp.planning.search import Machine
    from megatron_bp.tools.plan.bench_rates import read_bench

    gpu = gpu_named(options.gpu)
    if options.network is not None:
        if not options.network > 0:
            raise InputError(f"--network {options.network}: must be above 0")
        gpu = replace(gpu, network=options.network * 1e9)
    if not 0 <= options.free < 100:
        raise InputError(f"--free {options.free}: per cent of a GPU's memory, from 0 to below 100")
    gpus = options.gpus or gpu.node * (options.nodes or 1)
    if gpus > MOST_GPUS:
        raise InputError(
            f"--gpus {gpus}: at most {MOST_GPUS} are planned at once; plan a part of them with its "
            f"part of the global batch: replicas differ in nothing but their number"
        )
    fewest = -(-gpus // gpu.node)
    nodes = options.nodes or next(n for n in range(fewest, gpus + 1) if gpus % n == 0)
    if gpus % nodes:
        raise InputError(
            f"--gpus {gpus} on --nodes {nodes}: nodes hold equally many; give a multiple of {nodes}"
        )
    rates, uncounted = fitted.read()
    keys = f"K/V at no more than {rates.link * gpu.network / 1e9:,.1f} GB/s"
    told = (
        f"products {rates.products:.0%} and attention {rates.attention:.0%} of the peak, {keys} "
        f"(planning/rates.yaml)"
    )
    if options.rates:
        rates, measured = read_bench(options.rates, gpu, rates)
        told = f"{measured}; {keys} (planning/rates.yaml)"
    return Machine(gpu, gpus, gpus // nodes, rates, uncounted, options.free / 100), told


def lengths(text: str | None) -> list[int]:
    """Tokens of "64K,1M"; none for none.

    Raises:
        ValueError: one is no length.
    """
    out = []
    for part in text.split(",") if text is not None else []:
        word = part.strip().upper()
        unit = UNITS.get(word[-1:], 1)
        number = word[:-1] if unit > 1 else word
        if not (number.isascii() and number.isdecimal()) or int(number) < 1:
            raise InputError(
                f"--context {text}: {part!r} is no length; write tokens, such as 65536 or 64K"
            )
        out.append(int(number) * unit)
    return out


def say(lines: Sequence[str] | Iterator[str]) -> None:
    """Print lines, and let them be seen at once."""
    for line in lines:
        print(line, flush=True)
