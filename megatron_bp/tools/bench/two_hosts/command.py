"""Steps of each form of attention's communication on two hosts joined by a slow link.

The hosts are network namespaces: scripts/bench_two_hosts.sh makes them and calls this. Each form
runs the real pretrain_bdlm.py; forms take turns, and every run has steps on the unlimited link and
then on the limited one. At the end CSBP and the best CP form train for the same time.
"""

import argparse
import datetime
import shlex
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_bp.tools.bench.machine import processor
from megatron_bp.tools.bench.two_hosts import curve, steps, traffic
from megatron_bp.tools.bench.two_hosts.figures import Figures, best_cp, checks, figures
from megatron_bp.tools.bench.two_hosts.forms import CLEAN, CP, CSBP, Form, chosen
from megatron_bp.tools.bench.two_hosts.link import Hosts
from megatron_bp.tools.bench.two_hosts.rate import Load, hidden, propose
from megatron_bp.tools.bench.two_hosts.servers import Ranks, RunError, ranks
from megatron_bp.tools.bench.two_hosts.steps import Step
from megatron_bp.tools.bench.two_hosts.table import lines

__all__ = ["add_flags", "lines", "run"]
MBIT = 1e6 / 8  # bytes a second


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--namespaces", nargs=2, required=True, metavar="NAME", help="of the two hosts")
    add("--interface", required=True, help="name of the link's end on both hosts")
    add("--addresses", nargs=2, required=True, metavar="IP", help="of the link's ends")
    add("--config", default=traffic.CONFIG, help="what is trained")
    add("--run-flags", default="", metavar="'FLAGS'", help="more flags of pretrain_bdlm.py")
    add("--folder", type=Path, default=Path("runs/bench_two_hosts"), help="of logs and numbers")
    add("--ranks", type=int, default=4, help="half of them on each host, default 4")
    add("--forms", nargs="+", metavar="FORM", help="these and the two that all is against")
    add("--repeats", type=int, default=3, help="runs of each form, default 3")
    add("--unlimited-steps", type=int, default=2, help="counted steps of a run, default 2")
    add("--limited-steps", type=int, default=1, help="counted steps of a run, default 1")
    add("--rate", type=float, metavar="MBIT", help="of the link; default: so that --fraction holds")
    add("--fraction", type=float, default=0.675, help="of cp:all_gather's step to wait for K/V")
    add("--curve-seconds", type=float, default=80.0, help="of training, each form; 0 for no curve")
    add("--no-traffic", action="store_true", help="no runs whose bytes are known by hand")
    add("--timeout", type=float, default=300.0, help="seconds a run may take, without the curve's")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as JSON.

    Raises:
        ValueError: a flag's value, or hosts that do not stand.
    """
    _check(options)
    forms = chosen(options.forms)
    hosts = Hosts(tuple(options.namespaces), options.interface, tuple(options.addresses))
    hosts.check()
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        with ranks(hosts, options.ranks, options.folder) as job:
            return _Benchmark(options, hosts, job).result(forms)
    except RunError as error:
        raise ValueError(str(error)) from error


class _Benchmark:
    """The runs of one call, in their folders."""

    def __init__(self, options: argparse.Namespace, hosts: Hosts, job: Ranks) -> None:
        self._options, self._hosts, self._job = options, hosts, job
        self._begin = time.monotonic()
        self._counts = (options.unlimited_steps, options.limited_steps)

    def result(self, forms: list[Form]) -> dict[str, Any]:
        options = self._options
        self._say("ranks stand")
        counted = self._traffic()
        rate = self._calibrate() if options.rate is None else options.rate * MBIT
        found: dict[str, list[Step]] = {form.name: [] for form in forms}
        refused: dict[str, str] = {}
        for repeat in range(options.repeats):
            for form in forms:
                if form.name not in refused:
                    try:
                        found[form.name] += self._steps(form, repeat, rate)
                    except RunError as error:
                        if not error.refused or form.name in (CSBP, CP):
                            raise
                        refused[form.name] = _reason(str(error))
                        self._say(f"{form.name} does not run: {refused[form.name]}")
        told = {name: figures(got) for name, got in found.items() if got}
        return {
            "machine": processor(),
            "date": datetime.date.today().isoformat(),
            "config": options.config,
            "run_flags": options.run_flags,
            "ranks": options.ranks,
            "rate": rate,
            "forms": {
                name: {
                    "steps": [step.written() for step in found[name]],
                    "figures": asdict(told[name]) if name in told else None,
                    "refused": refused.get(name),
                }
                for name in found
            },
            "checks": checks(told),
            "traffic": counted,
            "curve": self._curve(forms, told, rate) if options.curve_seconds else None,
            "seconds": time.monotonic() - self._begin,
        }

    def _flags(self, form: Form) -> list[str]:
        options = self._options
        return [options.config, *form.flags(options.ranks), *shlex.split(options.run_flags)]

    def _steps(self, form: Form, repeat: int, rate: float) -> list[Step]:
        folder = self._options.folder / f"{form.name.replace(':', '_')}_{repeat}"
        got = steps.run(
            self._job,
            self._hosts,
            folder,
            self._flags(form),
            self._counts,
            lambda _: rate,
            self._options.timeout,
        )
        seconds = ", ".join(f"{s.seconds:.2f}{'' if s.limited else ' unlimited'}" for s in got)
        self._say(f"repeat {repeat + 1}, {form.name}: {seconds} s")
        return got

    def _traffic(self) -> list[dict[str, Any]]:
        options = self._options
        if options.no_traffic or options.ranks != traffic.RANKS:
            return []
        told = traffic.run(self._job, self._hosts, options.folder / "traffic", options.timeout)
        self._say(f"traffic: {sum(case['holds'] for case in told)} of {len(told)} as by hand")
        return told

    def _calibrate(self) -> float:
        """Bytes a second at which CP all_gather waits the wanted fraction of a step."""
        (form,) = (form for form in chosen([]) if form.name == CP)
        fraction, first = self._options.fraction, 0.0

        def guess(unlimited: list[Step]) -> float:
            nonlocal first
            first = propose(load(unlimited), fraction)
            return first

        got = steps.run(
            self._job,
            self._hosts,
            self._options.folder / "calibration",
            self._flags(form),
            (self._counts[0], 1),
            guess,
            self._options.timeout,
        )
        of_step, slow = load(got[:-1]), got[-1]
        exposed = slow.waiting * slow.seconds
        rate = propose(of_step, fraction, hidden(of_step, first, exposed))
        rate = max(1, round(rate / MBIT)) * MBIT
        self._say(
            f"at {first / MBIT:.1f} Mbit/s {form.name} waits {slow.waiting:.2f} of its step for "
            f"K/V; for {fraction:.2f} the link gets {rate / MBIT:.0f} Mbit/s"
        )
        return rate

    def _curve(self, forms: list[Form], told: dict[str, Figures], rate: float) -> dict[str, Any]:
        seconds = self._options.curve_seconds
        best = best_cp(told)
        names = [CSBP, best, *([best_cp(told, [CLEAN])] if best == CLEAN else [])]
        by_name = {form.name: form for form in forms}
        drawn: dict[str, Any] = {}
        failed = None
        for name in names:
            length = curve.Length.of(seconds, told[name].limited.median)
            folder = self._options.folder / f"curve_{name.replace(':', '_')}"
            flags, timeout = self._flags(by_name[name]), self._options.timeout + 4 * seconds
            try:
                drawn[name] = curve.run(
                    self._job, self._hosts, folder, flags, length, rate, timeout
                )
            except RunError as error:  # what was measured before is not lost for it
                failed = f"{name}: {error}"
                break
            self._say(f"{name}: {length.steps} steps in {drawn[name][-1]['seconds']:.1f} s")
        return {"seconds": seconds, "forms": drawn, "failed": failed}

    def _say(self, what: str) -> None:
        print(f"bench hosts: {what} [{time.monotonic() - self._begin:.0f} s]", flush=True)


def load(unlimited: list[Step]) -> Load:
    """What a step costs, of some on the unlimited link."""
    computing = sorted(step.seconds * (1 - step.waiting) for step in unlimited)
    attention = max(unlimited[0].by_attention)
    return Load(computing[len(computing) // 2], attention, max(unlimited[0].handed) - attention)


def _reason(told: str) -> str:
    """The line of a failed run's log that says why, without the usage line."""
    said = [line.strip() for line in told.splitlines() if "error:" in line]
    return said[-1].split("error:", 1)[1].strip() if said else told.splitlines()[0]


def _check(options: argparse.Namespace) -> None:
    for name in ("repeats", "unlimited_steps", "limited_steps"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(options, name)}: must be at least 1")
    if options.ranks < 2 or options.ranks % 2:
        raise ValueError(
            f"--ranks {options.ranks}: half of them are on each host; give an even number"
        )
    if not 0 < options.fraction < 1:
        raise ValueError(f"--fraction {options.fraction}: must be between 0 and 1")
    if options.rate is not None and options.rate <= 0:
        raise ValueError(f"--rate {options.rate}: must be above 0; leave it out to have it chosen")
    if options.curve_seconds < 0:
        raise ValueError(f"--curve-seconds {options.curve_seconds}: must be at least 0")
