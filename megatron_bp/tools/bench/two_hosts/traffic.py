"""Bytes that cross the link, three times: by hand, by a wrapped torch.distributed, by its counter.

The hand's numbers are for configs/two_hosts.yaml on 4 ranks with a next-token term, so that every
clean row is needed: rows of 512 tokens in blocks of 16, 2 layers, 4 key heads of 16 in float32, 8
micro-batches. Of 8 parts of 64 positions rank r holds parts r and 7 - r; ranks 0 and 1 are host 0.
A clean row's K|V are 2 x 4 x 16 x 4 = 512 B; three passes: K/V twice, their gradients once.

Rows that one host hands to the other in a layer and micro-batch; the other hands over as many:

- full attention, gathered by all (CSBP): a rank has 128 rows. In a ring one rank of each host sends
  to the other host, 3 times 128, in two passes; gradients go directly, 128 rows from each of two
  ranks to each of two: (2 x 3 + 4) x 128 = 1,280.
- the same of clean and corrupted rows (CP): a rank has 256: 2,560.
- a window of 32, only what is needed: each part needs the 31 rows before it. Parts 1 and 2 are on
  different hosts, and so are 5 and 6, the other way round. Each host hands over 31 rows twice and
  the gradients of 31 once: 93.
- two documents of 256, only what is needed: parts 2 and 3 need parts 0 and 1, 6 and 7 need 4 and 5:
  2 x 128 rows, twice, and as many gradients once: 768.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bp.tools.bench.two_hosts import steps
from megatron_bp.tools.bench.two_hosts.figures import COUNTERS, counters_off
from megatron_bp.tools.bench.two_hosts.forms import CP, CSBP, NEEDED, chosen
from megatron_bp.tools.bench.two_hosts.link import Hosts
from megatron_bp.tools.bench.two_hosts.servers import Ranks
from megatron_bp.tools.bench.two_hosts.steps import Step
from megatron_bp.tools.prepare import Options, prepare

CONFIG = "configs/two_hosts.yaml"
RANKS = 4
ROW_BYTES, LAYERS, MICRO_BATCHES = 512, 2, 8
DOCUMENTS = 64
FLAGS = "--ar-loss-weight 1 --clean-relation token --split 100,0,0 --eval-iters 0"


@dataclass(frozen=True)
class Case:
    """One kind of rows.

    Attributes:
        name: in words.
        form: who sends what.
        document: tokens of every document; 512 fill a row.
        rows: that a host hands over in a layer and micro-batch, by hand.
        flags: more of pretrain_bdlm.py.
    """

    name: str
    form: str
    document: int
    rows: int
    flags: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """That a host hands over in a step."""
        return self.rows * ROW_BYTES * LAYERS * MICRO_BATCHES


CASES = (
    Case("full attention", CSBP, 512, 1280),
    Case("full attention", CP, 512, 2560),
    Case("window of 32", NEEDED, 512, 93, ("--window-size", "(31,0)")),
    Case("two documents", NEEDED, 256, 768),
)


def run(ranks: Ranks, hosts: Hosts, folder: Path, timeout: float) -> list[dict[str, Any]]:
    """Every case, as JSON.

    Args:
        ranks: they run it; 4 of them.
        hosts: whose link it is.
        folder: of data and logs.
        timeout: seconds of a case.
    """
    told = []
    for i, case in enumerate(CASES):
        prefix = _documents(folder, case.document)
        (form,) = (form for form in chosen(None) if form.name == case.form)
        data = ["--data-path", str(prefix)]
        flags = [CONFIG, *form.flags(RANKS), *FLAGS.split(), *data, *case.flags]
        (step,) = steps.run(
            ranks, hosts, folder / f"case{i}", flags, (1, 0), lambda _: 0.0, timeout
        )
        told.append(compare(case, step))
    return told


def compare(case: Case, step: Step) -> dict[str, Any]:
    """What was said by hand, handed over and counted, and whether they agree."""
    exact = all(round(handed) == case.bytes for handed in step.by_attention)
    off = counters_off(step)
    return {
        "name": f"{case.form}, {case.name}",
        "by_hand": case.bytes,
        "by_attention": step.by_attention,
        "handed": step.handed,
        "link": step.link,
        "counters": off,
        "holds": exact and off <= COUNTERS,
    }


def _documents(folder: Path, tokens: int) -> Path:
    """Prefix of data whose documents all have so many tokens, one of them the end."""
    source, prefix = folder / f"text{tokens}", folder / f"data{tokens}"
    if not prefix.with_suffix(".idx").exists():
        source.mkdir(parents=True)
        for i in range(DOCUMENTS):
            (source / f"{i}.txt").write_text(f"{i} ".ljust(tokens - 1, "abcdefg "[i % 8]))
        prepare(Options(input=[source], suffix=[".txt"], output_prefix=prefix))
    return prefix
