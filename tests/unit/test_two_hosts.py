"""The benchmark of two hosts: what it proposes, counts and tells, by hand; no link is made here."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron_bp.parallel.collectives import Pending
from megatron_bp.tools.bench import crossing, waits
from megatron_bp.tools.bench.two_hosts import command, curve, picture, steps, table, traffic
from megatron_bp.tools.bench.two_hosts.figures import Figures, Spread, best_cp, bound, checks
from megatron_bp.tools.bench.two_hosts.figures import figures as figures_of
from megatron_bp.tools.bench.two_hosts.forms import CLEAN, CP, CSBP, FORMS, P2P, chosen
from megatron_bp.tools.bench.two_hosts.link import limiting
from megatron_bp.tools.bench.two_hosts.orders import Order, Place
from megatron_bp.tools.bench.two_hosts.page import BEGIN, END
from megatron_bp.tools.bench.two_hosts.page import main as fill_page
from megatron_bp.tools.bench.two_hosts.rate import Load, hidden, propose
from megatron_bp.tools.bench.two_hosts.steps import Step

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_two_hosts.sh"
HOSTS = (0, 0, 1, 1)


def test_the_rate_by_hand() -> None:
    """2 s of work, 20 MB of K/V, 2 MB of gradients, half of the step: (20 - 11) MB / 1 s.

    At 9 MB/s: K/V take 20/9 s, gradients 2/9, so a step takes 2 + 22/9 = 40/9, and waits half.
    """
    assert propose(Load(2.0, 20e6, 2e6), 0.5) == pytest.approx(9e6)


@pytest.mark.parametrize("hides", [0.0, 0.4])
@pytest.mark.parametrize("fraction", [0.3, 0.675])
def test_at_the_proposed_rate_the_step_waits_as_wanted(fraction: float, hides: float) -> None:
    load = Load(compute=1.7, attention=20e6, other=3e6)
    rate = propose(load, fraction, hides)
    exposed = load.attention / rate - hides
    assert exposed / (load.compute + load.other / rate + exposed) == pytest.approx(fraction)
    assert hidden(load, rate, exposed) == pytest.approx(hides)


def test_no_rate_where_gradients_are_most() -> None:
    with pytest.raises(ValueError, match=r"no rate makes attention 0\.70 of a step: .* more micro"):
        propose(Load(1.0, 2e6, 1e6), 0.7)


def step(limited: bool, seconds: float, waited: float = 0.0, link: int = 1030) -> Step:
    return Step(limited, seconds, (waited, 3 * waited), 4000, (1000, 900), (800, 700), (link, 918))


def test_figures_by_hand() -> None:
    """Waits of 0.5 and 1.5 s in steps of 4, 4 and 2 s: 1/4, 1/4 and 1/2 of a step."""
    slow = [step(True, 4.0, 0.5), step(True, 4.0, 0.5, 1040), step(True, 2.0, 0.5)]
    got = figures_of([step(False, 1.0), step(False, 2.0), *slow])
    assert got.limited == Spread(4.0, (3.0, 4.0), 2.0, 4.0)
    assert got.unlimited == Spread(1.5, (1.25, 1.75), 1.0, 2.0)
    assert got.waiting == 0.25
    assert (got.sent, got.handed, got.by_attention, got.link) == (4000, 1000, 800, 1030)
    assert got.counters == pytest.approx(0.04), "the worst step of the worst host"


def form(
    limited: float, unlimited: float = 1.0, waiting: float = 0.2, off: float = 0.01
) -> Figures:
    fast = Spread(unlimited, (unlimited * 0.98, unlimited * 1.02), unlimited * 0.9, unlimited * 1.1)
    slow = Spread(limited, (limited, limited), limited, limited)
    return Figures(fast, slow, waiting, 4000, 1000, 800, 1030, off)


GOOD = {
    CSBP: form(2.0),
    CP: form(3.0, 1.5, 0.66),
    P2P: form(2.8, 1.5, 0.6),
    CLEAN: form(2.0),
    "bp": form(1.0, 1.01),
}


def failing(forms: dict[str, Figures]) -> list[str]:
    return [check["name"] for check in checks(forms) if not check["holds"]]


def test_what_was_promised() -> None:
    """0.93 / (1 - 0.66 / 2) = 1.388, 0.93 / (1 - 0.6 / 2) = 1.329."""
    assert bound(0.66) == pytest.approx(1.388, abs=1e-3)
    assert failing(GOOD) == []
    rules = {check["name"]: check["rule"] for check in checks(GOOD)}
    assert rules[f"{CP} / {CSBP}"] == "at least 1.388"
    assert rules[f"{P2P} / {CSBP}"] == "at least 1.329"


@pytest.mark.parametrize(
    ("name", "worse", "told"),
    [
        (CP, form(3.0, 1.5, 0.59), "cp:all_gather: part of the step that waits for K/V"),
        (CP, form(3.0, 1.5, 0.76), "cp:all_gather: part of the step that waits for K/V"),
        (CP, form(2.7, 1.5, 0.66), "cp:all_gather / csbp:all_gather"),
        (P2P, form(2.65, 1.5, 0.6), "cp:p2p / csbp:all_gather"),
        (CLEAN, form(1.94), "csbp:all_gather / cp:clean_all_gather"),
        ("bp", form(1.0, 0.9), "unlimited: csbp:all_gather / bp"),
        ("bp", form(1.0, 1.0, off=0.06), "link's counters against bytes handed over"),
    ],
)
def test_each_promise_can_be_broken(name: str, worse: Figures, told: str) -> None:
    got = failing(GOOD | {name: worse})
    assert told in got
    assert all(other == told or CP in other for other in got)


def test_faster_within_noise_is_not_faster() -> None:
    assert failing(GOOD | {"bp": form(1.0, 0.97)}) == []


def test_the_best_cp_form() -> None:
    assert best_cp(GOOD) == CLEAN
    assert best_cp(GOOD, [CLEAN]) == P2P


def test_what_crosses_by_hand() -> None:
    """Ranks 0 and 1 on one host. In a ring of four, 1 sends to 2 and 3 sends to 0."""
    ring = [crossing.ring([0, 1, 2, 3], rank, HOSTS) for rank in range(4)]
    assert ring == [False, True, False, True]
    assert not crossing.ring([2, 3], 3, HOSTS), "a group inside a host"
    assert crossing.ring([0, 2], 0, HOSTS)
    assert crossing.direct([0, 1, 2, 3], 1, HOSTS, [1, 10, 100, 1000]) == 1100
    assert crossing.direct([0, 1, 2, 3], 2, HOSTS, [1, 10, 100, 1000]) == 11


class Slow:
    def wait(self) -> None:
        time.sleep(0.02)


def as_attention(call: Callable[[], object]) -> None:
    """Calls it as if attention did."""
    exec("call()", {"call": call, "__name__": "megatron_bp.attention.some"})


def on_its_way() -> Pending:
    return Pending(torch.ones(1), [Slow(), Slow()], torch.ones(1))  # type: ignore[list-item]


def test_waits_are_those_of_attention_for_what_is_on_its_way() -> None:
    pending, there = on_its_way(), Pending(torch.ones(1), [], torch.ones(1))
    with waits.watching() as watched:
        assert on_its_way().wait() == 1
        assert (watched.calls, watched.seconds) == (0, 0.0), "somebody else waits"
        for _ in range(2):  # the second time it is there
            as_attention(pending.wait)
        as_attention(there.wait)
        assert watched.calls == 1
        assert 0.04 <= watched.seconds < 1
        assert watched.take().calls == 1
        assert (watched.calls, watched.seconds) == (0, 0.0)
    as_attention(on_its_way().wait)
    assert watched.calls == 0, "not watched any more"


def test_forms_and_their_flags() -> None:
    flags = {form.name: " ".join(form.flags(4)) for form in FORMS}
    csbp = "--block-parallel-size 4 --context-parallel-size 4 --clean-kv-exchange"
    assert flags[CSBP] == f"{csbp} all_gather"
    assert flags[P2P] == "--block-parallel-size 1 --context-parallel-size 4 --cp-comm-type p2p"
    assert flags["bp"] == "--block-parallel-size 4 --context-parallel-size 1"
    assert flags["hybrid"].startswith("--block-parallel-size 4 --context-parallel-size 2 --clean")
    assert [form.name for form in chosen(["bp"])] == [CSBP, CP, "bp"]
    with pytest.raises(ValueError, match=r"--forms csbp: there is none; there are csbp:all_gather"):
        chosen(["csbp"])


def test_the_kernel_is_told_bits() -> None:
    told = " ".join(limiting("x", 50e6 / 8))
    assert told == "qdisc replace dev x root tbf rate 50000000bit burst 32768 latency 400ms"
    assert "burst 625000" in " ".join(limiting("x", 1e9 / 8)), "5 ms of a fast link"
    assert " ".join(limiting("x", None)) == "qdisc del dev x root"


def test_orders_and_places_arrive_as_they_were() -> None:
    order = Order("/folder", ("a.yaml", "--flag"), 29601, 3)
    assert Order.read(order.written()) == order
    place = Place(3, HOSTS, "link")
    assert Place.read(place.written()) == place
    assert [Place(rank, HOSTS, "link").local_rank for rank in range(4)] == [0, 1, 0, 1]


def test_steps_are_read_as_far_as_all_ranks_are(tmp_path: Path) -> None:
    rows = [
        {"kind": "train", "iteration": i, "seconds": float(i), "bytes_sent": 4000}
        for i in (1, 2, 3)
    ]
    assert steps.read(tmp_path, 2) == []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank in range(4):
        lines = [
            {
                "wait_seconds": 0.1 * rank,
                "handed_bytes": 10**rank,
                "handed_by_attention": rank,
                "link_bytes": 5000 + rank if rank in (0, 2) else None,
            }
        ] * (2 if rank == 1 else 3)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"rank{rank}.jsonl").write_text(text + '{"half')
    got = steps.read(tmp_path, 1)
    assert [(s.limited, s.seconds) for s in got] == [(False, 1.0), (True, 2.0)]
    assert got[0].handed == (11, 1100)
    assert got[0].by_attention == (1, 5)
    assert got[0].link == (5000, 5002)
    assert got[1].waiting == pytest.approx(0.15 / 2)


def test_points_of_a_curve() -> None:
    rows = [
        {"kind": "train", "iteration": 1, "seconds": 2.0},
        {"kind": "train", "iteration": 2, "seconds": 3.0},
        {"kind": "validation", "iteration": 2, "seconds": 9.0, "bound_bits_per_byte": 6.5},
        {"kind": "train", "iteration": 3, "seconds": 4.0},
        {"kind": "validation", "iteration": 3, "seconds": 9.0, "bound_bits_per_byte": 6.0},
        {"kind": "validation", "iteration": 3, "seconds": 9.0, "bound_bits_per_byte": 6.0},
    ]
    assert curve.points(rows) == [
        {"step": 2.0, "seconds": 5.0, "bits": 6.5},
        {"step": 3.0, "seconds": 9.0, "bits": 6.0},
    ]
    assert curve.unit_of(rows) == "byte"
    of_tokens = [{"kind": "validation", "iteration": 1, "bound_bits_per_token": 7.0}]
    assert curve.unit_of(of_tokens) == "token"
    assert curve.points(of_tokens)[0]["bits"] == 7.0
    with pytest.raises(ValueError, match="no evaluation tells a bound"):
        curve.points([{"kind": "validation", "iteration": 1}])
    assert curve.Length.of(80.0, 2.5) == curve.Length(32, 4)
    assert curve.Length.of(1.0, 2.5) == curve.Length(2, 1), "one of them warms up"


def window() -> Step:
    """A step that hands over what the hand says: 93 rows of 512 B, 2 layers, 8 micro-batches."""
    whole = (2e6, 2e6)
    return Step(False, 1.0, (0.0,) * 4, 0, whole, (761_856.0,) * 2, (2_040_000, 2_040_000))


def test_documents_are_as_long_as_the_hand_has_them(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(traffic.documents(tmp_path, 256)))
    assert data.sequence_lengths.tolist() == [256] * traffic.DOCUMENTS


def test_bytes_are_held_against_the_hand() -> None:
    assert [case.bytes for case in traffic.CASES] == [10_485_760, 20_971_520, 761_856, 6_291_456]
    case, step = traffic.CASES[2], window()
    assert traffic.compare(case, step)["holds"]
    for wrong in (
        replace(step, by_attention=(761_856.0, 761_344.0)),  # one row less
        replace(step, link=(2_040_000, 2_120_000)),
        replace(step, link=(1_890_000, 2_040_000)),
    ):
        assert not traffic.compare(case, wrong)["holds"]


def result() -> dict:
    line = [{"step": 2.0, "seconds": 5.0, "bits": 6.5}]
    forms = {name: {"steps": [], "figures": asdict(f), "refused": None} for name, f in GOOD.items()}
    forms["cp:a2a"] = {"steps": [], "figures": None, "refused": "no such choice"}
    return {
        "machine": "a machine",
        "date": "2026-11-30",
        "ranks": 4,
        "rate": 50e6 / 8,
        "forms": forms,
        "checks": checks(GOOD),
        "traffic": [traffic.compare(traffic.CASES[2], window())],
        "curve": {
            "seconds": 80.0,
            "unit": "byte",
            "forms": {CSBP: line, P2P: line},
            "failed": None,
        },
    }


def test_what_is_printed() -> None:
    told = table.lines(result())
    assert "link 50.0 Mbit/s each way" in told[0]
    row = next(line for line in told if line.startswith(f"| {CP} |"))
    assert row.startswith("| cp:all_gather | 3.00 (3.00 to 3.00) | 1.500 | 0.66 | 1.50 ")
    assert "cp:a2a did not run: no such choice" in told
    assert f"| {CP} / {CSBP} | 1.500 | at least 1.388 | yes |" in told
    assert f"| {P2P} | 2 | 5.0 | 6.500 |" in told
    window = (
        "| csbp:needed_rows, window of 32 | 761,856 | 761,856 | 2,000,000 | 2,040,000 | 2.0 % |"
    )
    assert f"{window} yes |" in told
    broken = result()
    broken["curve"]["failed"] = "bp: it fell"
    assert table.lines(broken)[-1] == "The curve did not come to its end: bp: it fell"


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = picture.draw(result(), str(tmp_path / "curve"))
    assert [Path(file).stat().st_size > 1000 for file in files] == [True, True]


def test_a_picture_of_no_curve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--curve-seconds was 0"):
        picture.draw(result() | {"curve": None}, str(tmp_path / "curve"))


def test_a_page_keeps_its_text(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "result.json"
    file.write_text(json.dumps(result()))
    for before in ("stale\n", "newer\n"):  # filled twice
        text = page.read_text() if page.exists() else f"# Head\n{BEGIN}\n{before}{END}\ntail\n"
        page.write_text(text)
        fill_page([str(file), str(page)])
    told = page.read_text()
    assert told.startswith("# Head\n<!-- result -->\n\na machine; 4 ranks")
    assert told.endswith(f"{END}\ntail\n")
    assert told.count("a machine; 4 ranks") == 1
    assert "stale" not in told
    assert "![validation bound against training time](page.svg)" in told
    page.write_text("no marks")
    with pytest.raises(SystemExit, match=r"page: error: the page needs one line <!-- result -->"):
        fill_page([str(file), str(page)])


@pytest.mark.parametrize(
    "wrong",
    ["--repeats 0", "--ranks 3", "--fraction 1.0", "--rate 0.0", "--curve-seconds -1.0"],
)
def test_values_that_cannot_be(wrong: str) -> None:
    from megatron_bp.tools.bench.__main__ import main

    stand = "--namespaces a b --interface c --addresses d e"
    with pytest.raises(SystemExit, match=f"bench hosts: error: {wrong}: "):
        main(["hosts", *stand.split(), *wrong.split()])


def test_why_a_form_does_not_run() -> None:
    told = "rank 0 ended with 2\n    pretrain_bdlm.py: error: a2a: is not there\n    usage: ..."
    assert command._reason(told) == "a2a: is not there"


FAKE = """#!/bin/sh
echo "$0 $*" | sed 's#.*/##' >> "$CALLS"
if echo "$0 $*" | grep -qE -- "${SLOW:-nothing}"; then sleep 0.5; fi
if echo "$0 $*" | grep -qE -- "$FAILS"; then echo "Operation not permitted" >&2; exit 1; fi
"""


@pytest.mark.parametrize(
    ("fails", "user", "told", "made"),
    [
        ("nothing", 1000, "network namespaces need root", 0),
        ("netns add .*a$", 0, "does not allow network namespaces", 0),
        ("netns add .*b$", 0, "does not allow network namespaces", 1),
        ("link add", 0, "does not allow a link between two namespaces", 2),
        ("link set", 0, "the link's ends could not be set up", 2),
        ("exec .*tc qdisc", 0, "does not limit the rate of a link", 2),
    ],
)
def test_the_script_says_why_it_stops_and_removes_all(
    tmp_path: Path, fails: str, user: int, told: str, made: int
) -> None:
    environment, calls = fakes(tmp_path, user) | {"FAILS": fails}, tmp_path / "calls"
    done = subprocess.run(
        [SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert "nothing was run" in done.stderr
    assert done.stdout == "", "stops before the environment is made"
    assert of_calls(calls, "del") == of_calls(calls, "add")[:made]


def test_two_signals_leave_no_namespace(tmp_path: Path) -> None:
    """As of a `timeout` that signals the script and then its group: the second comes at the end."""
    calls, slow = tmp_path / "calls", {"FAILS": "nothing", "SLOW": "link add|netns del"}
    script = subprocess.Popen([SCRIPT], env=fakes(tmp_path, 0) | slow, stderr=subprocess.PIPE)
    for sign in ("link add", "netns del"):
        end = time.monotonic() + 30
        while sign not in calls.read_text() and time.monotonic() < end:
            time.sleep(0.02)
        script.terminate()
    _, told = script.communicate(timeout=30)
    assert script.returncode == 130
    assert b"interrupted" in told
    assert of_calls(calls, "del") == of_calls(calls, "add")
    assert len(of_calls(calls, "add")) == 2


def fakes(folder: Path, user: int) -> dict[str, str]:
    """The environment in which ip, tc and id are files of this folder that do nothing."""
    for name in ("ip", "tc"):
        (folder / name).write_text(FAKE)
    (folder / "id").write_text(f"#!/bin/sh\necho {user}\n")
    for name in ("ip", "tc", "id"):
        (folder / name).chmod(0o755)
    (folder / "calls").touch()
    path = f"{folder}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "CALLS": str(folder / "calls")}


def of_calls(calls: Path, what: str) -> list[str]:
    """The namespaces that were added or deleted, in order."""
    lines = calls.read_text().splitlines()
    return [line.split()[-1] for line in lines if line.startswith(f"ip netns {what}")]
