"""The page docs/benchmarks/paper.md: what is counted, what is fitted, what is predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_bp.planning.memory import peak
from megatron_bp.planning.rates import Rates, Uncounted
from megatron_bp.tools.paper.counting import Counted, counted
from megatron_bp.tools.paper.figures import CELLS, NETWORK, PEAK, TIMES, Cell, K, Scheme
from megatron_bp.tools.paper.fit import LENGTH, MODEL, cell, equations, fit
from megatron_bp.tools.paper.predict import Seconds, ours, paper

GIB = 2**30
HELD_OUT = (
    ("Nemotron 3B", 256 * K),
    ("Nemotron 8B", 256 * K),
    ("Nemotron 14B", 64 * K),
    ("Nemotron 14B", 128 * K),
)

INTRODUCTION = """\
# The paper's figures, counted and predicted

The figures of [arXiv 2609.19242](https://arxiv.org/abs/2609.19242) (version 1, abstract and project
page): 16 x H200, block 256, tokens/s counts each clean token once. **Nothing on this page was
measured by this project.** Bytes are counted by the plan that training makes, from the files in
[configs/shapes](../../configs/shapes); times are counted FLOPs and bytes over three rates that are
fitted on one of the paper's models. This page is what

    .venv/bin/python -m megatron_bp.tools.paper --page docs/benchmarks/paper.md

writes, on any machine and without a GPU; a test holds that it is up to date.
"""

TRAFFIC = """\
## Traffic

GiB of K/V and of their gradients that a GPU sends in a step of one sequence of 262,144 tokens among
8 ranks, everything recomputed: gathered for the forward, once more for the backward, and gradients
back. The mean over the ranks. The paper computes all clean rows and moves no unit, and so does this
count (`score_clean` "all"; by itself a plan leaves out the clean rows of a last block that nobody
sees). DiffusionGemma goes in two passes in the paper: clean rows in an encoder, then corrupted ones
in a decoder that is handed the clean K/V once more.
"""

TRAFFIC_NOTE = """\
Rows without a figure of the paper say where its saving comes from. CP in whole blocks that gathers
clean rows alone (`--cp-comm-type clean_all_gather`) sends of Nemotron what CSBP sends; what
DiffusionGemma saves beyond that is awareness of windows, which any form of CP could have. The one
pass in which this project trains halves the rest.
"""

FIT = """\
## Rates

Fitted on Nemotron 14B at 256K alone: step, forward, backward and exposed communication, of CP and
of CSBP, eight figures. A step is FLOPs of products, attention and loss head over their rate, and
bytes of K/V over the rate at which they are waited for; a third of them in the forward. FLOPs are
those of the slot rank that has most, attention's backward has 2.5 times those of its forward. Least
squares of relative errors.

At one context and model the FLOPs of products and attention stand in nearly the same ratio in every
figure, and forward and backward, which were timed apart, add up to {more:.1f} % more than CSBP's
step: a fit with a rate for each gives {products:.0f} % of the peak to products and
{attention:.0f} % to attention, and misses CSBP at 64K by {missed:.0f} %. So both have **one** rate
together: three numbers are fitted, not four.
"""

FIT_NOTE = """\
The link is no bandwidth: it is bytes over seconds that the paper says were not hidden,
{link:.1f} GB/s. How much of the exchange was hidden there, and over which links it went, is not
told. Sums over tensor-parallel ranks and rows to experts are taken to be waited for at the same
rate; gradients, parameters and the optimizer cost nothing here.

The fit's own figures, and how far off they stay:
"""

TOKENS = """\
## Tokens a second

All cells of the paper's tables. Held out of the fit and to be met within 10 %: Nemotron 3B and 8B
at 256K, 14B at 64K and 128K (marked *).

![Tokens/s against context, measured by them and predicted](../pictures/scaling_paper.png)
"""

TOKENS_NOTE = """\
The rates are those of a dense model with heads of 128, and do **not** carry over. DiffusionGemma
has heads of 256 and 512, small experts and short windows; three of four layers of Qwen are gated
DeltaNet, whose recurrence is not counted, and its runs are conversions, which may compute more than
one model. Which of these takes the time, these figures cannot tell, and no rate was bent to hide
it.
"""

MEMORY = """\
## Memory

Peak of a GPU at 256K in GiB: what this project's layouts would hold, by
[planning/memory.py](../../megatron_bp/planning/memory.py), against the paper's peaks. Nothing is
fitted on the paper here: the factor on activations ({slack}) is that of runs on CPUs, and the
process itself is left out, as torch's allocator leaves it out. Everything is recomputed, layers are
Transformer Engine's, weights bfloat16, gradients float32, and the optimizer's 12 bytes a parameter
are shared by replicas and slot. Megatron's gradient buffers are whole on each GPU; shared like the
optimizer (as FSDP does it) they take what the last columns say.
"""

MEMORY_NOTE = """\
With whole buffers in float32 the 14B model would hold two fifths more than the paper's run did:
that run has none. With shared gradients dense models stay below the paper, by what an allocator may
hold beyond tensors. The paper's DiffusionGemma holds more than is counted: its two passes keep what
one does not, and in which form it holds its experts' gradients is not told.
"""

OURS = """\
## What this project's exchange is predicted to give

CSBP on the same cluster: **predicted, not measured**. Assumed to be the paper's: the rates of
products and of attention, and that K/V travel at the rate at which the paper's are waited for, as
if nothing had been hidden there. Counted: one pass where the paper takes two; needed rows where
layers have windows; and the pairs whose keys are a rank's own. Beside these K/V travel in the
forward and in the recomputed one; beside those of them that are clean, gradients travel. A layer
waits for what is longer than that; the slot rank that waits longest is told.

Seconds of a step by part; for comparison what the paper's CSBP waits by the same rates; and the
gain in tokens a second over the paper's CSBP, as the same rates predict it.
"""

OURS_NOTE = """\
So at 128K and above nothing of the exchange is waited for, and the gain is what the paper's CSBP
waits: a few per cent. Most of a step at long context is attention, and only faster kernels or fewer
pairs would change that. Steps of DiffusionGemma and Qwen are as far off here as their tokens are
above; what their exchange waits for depends on the rate of attention, and a slower one hides more.
"""


def page(rates: Rates, uncounted: Uncounted) -> str:
    """The page under some rates, and constants of memory."""
    parts = [
        INTRODUCTION,
        TRAFFIC,
        *_table(("model, scheme", "counted", "paper"), _traffic()),
        TRAFFIC_NOTE,
        _fit_text(),
        *_table(("rate", "part of", "fitted"), _rates(rates)),
        FIT_NOTE.format(link=rates.link * NETWORK / 1e9),
        *_table(("figure", "fitted, s", "paper, s", "error"), _fitted(rates)),
        TOKENS,
        *_table(("model, context", "scheme", "predicted", "paper", "error"), _tokens(rates)),
        TOKENS_NOTE,
        MEMORY.format(slack=uncounted.slack),
        *_table(MEMORY_HEADS, _memory(uncounted)),
        MEMORY_NOTE,
        OURS,
        *_table(OURS_HEADS, _ours(rates)),
        OURS_NOTE,
    ]
    return "\n".join(parts)


def _fit_text() -> str:
    apart, times = fit(apart=True), TIMES[MODEL]["CSBP"]
    (short,) = (one for one in CELLS if (one.model, one.length) == (MODEL, 64 * K))
    return FIT.format(
        more=100 * ((times.forward + times.backward) / times.step - 1),
        products=100 * apart.products,
        attention=100 * apart.attention,
        missed=100 * abs(paper(short, "CSBP", apart).rate / short.tokens["CSBP"] - 1),
    )


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return ["\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"]


def _sent(counts: Counted) -> str:
    return f"{counts.sent / GIB:.3f}"


def _traffic() -> Iterator[Sequence[str]]:
    for model, schemes in TIMES.items():
        (one,) = (c for c in CELLS if (c.model, c.length) == (model, 256 * K))
        yield f"{model}, CP", _sent(counted(one, "CP")), f"{schemes['CP'].sent:.2f}"
        yield f"{model}, CP in whole blocks", _sent(counted(one, "CP", aligned=True)), "-"
        yield f"{model}, CSBP", _sent(counted(one, "CSBP")), f"{schemes['CSBP'].sent:.2f}"
        if one.setting.passes == "two":
            yield f"{model}, CSBP in one pass", _sent(counted(one, "CSBP", one_pass=True)), "-"


def _rates(rates: Rates) -> Iterator[Sequence[str]]:
    peak, both = f"{PEAK / 1e12:.0f} TFLOP/s", " (one number)"
    yield "products" + both, peak, f"{rates.products:.3f}"
    yield "attention" + both, peak, f"{rates.attention:.3f}"
    yield "attention over combined rows (CP)", peak, f"{rates.combined_attention:.3f}"
    yield "K/V that are waited for", f"{NETWORK / 1e9:.0f} GB/s", f"{rates.link:.3f}"


def fitted(rates: Rates) -> Iterator[tuple[str, float, float]]:
    """(figure, seconds by the rates, the paper's) of what is fitted on."""
    for scheme, times in TIMES[MODEL].items():
        names = ("step", "forward", "backward", "exposed")
        found = equations(counted(cell(), scheme), scheme, times)
        for name, ((linear, pairs, combined, sent), seconds) in zip(names, found, strict=True):
            got = linear / rates.products + pairs / rates.attention
            got += combined / rates.combined_attention
            yield f"{scheme}, {name}", got / PEAK + sent / (rates.link * NETWORK), seconds


def _fitted(rates: Rates) -> Iterator[Sequence[str]]:
    for name, got, seconds in fitted(rates):
        yield name, f"{got:.2f}", f"{seconds:.2f}", _error(got, seconds)


def tokens(rates: Rates) -> Iterator[tuple[Cell, Scheme, Seconds]]:
    """What each cell is predicted to take."""
    for one in CELLS:
        for scheme in one.tokens:
            yield one, scheme, paper(one, scheme, rates)


def _tokens(rates: Rates) -> Iterator[Sequence[str]]:
    for one, scheme, seconds in tokens(rates):
        told = one.tokens[scheme]
        yield (
            _name(one) + (" *" if (one.model, one.length) in HELD_OUT else ""),
            scheme + (", fitted on" if (one.model, one.length) == (MODEL, LENGTH) else ""),
            f"{seconds.rate:,.0f}",
            f"{told:,}",
            _error(seconds.rate, told),
        )


MEMORY_HEADS = ["model", "scheme", "paper", "whole buffers", "error", "shared gradients", "error"]


def _memory(uncounted: Uncounted) -> Iterator[Sequence[str]]:
    for one in CELLS:
        for scheme, told in (one.peak or {}).items():
            counts = counted(one, scheme, one_pass=True)
            row = [one.model, scheme, f"{told:.1f}"]
            for shared in (False, True):
                task = replace(counts.task, sharded_gradients=shared)
                held = peak(task, counts.layout, counts.counts, uncounted)
                got = (held.total - uncounted.process) / GIB
                row += [f"{got:.1f}", _error(got, told)]
            yield row


OURS_HEADS = (
    *("model, context", "products", "attention", "head", "TP sums, experts", "K/V waited for"),
    *("step", "paper's K/V", "gain"),
)


def _ours(rates: Rates) -> Iterator[Sequence[str]]:
    for one in CELLS:
        if one.model == "Qwen3.5-27B":  # of the shape of Qwen3.8
            continue
        got, theirs = ours(one, rates), paper(one, "CSBP", rates)
        parts = (got.products, got.attention, got.head, got.beside, got.exposed, got.total)
        gain = _error(got.rate, theirs.rate)
        yield (_name(one), *(f"{part:.2f}" for part in parts), f"{theirs.exposed:.2f}", gain)


def _name(one: Cell) -> str:
    return f"{one.model}, {one.length // K}K"


def _error(got: float, told: float) -> str:
    return f"{100 * (got / told - 1):+.1f} %"
