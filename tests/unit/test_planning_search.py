"""The search: what training accepts, nothing better left out, and why the rest is dropped."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import run_ranks

from megatron_bp import arguments
from megatron_bp.arguments.parse import parsed
from megatron_bp.arguments.task import layout_of, task_of
from megatron_bp.planning import search as searching
from megatron_bp.planning.allowed import refusal
from megatron_bp.planning.candidates import candidates, divisors
from megatron_bp.planning.counts import count, full_rows, options_of
from megatron_bp.planning.hardware import Gpu
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.memory import Memory, memory
from megatron_bp.planning.rates import Rates, Uncounted
from megatron_bp.planning.search import TIE, Counts, Judged, Machine, Outcome, Search, in_order
from megatron_bp.planning.seconds import Seconds
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Task
from megatron_bp.planning.words import family, flags, in_words
from megatron_bp.sequence.plan import SequenceOptions, make_plan

DENSE = Layer(Attention(8, 4, 16), Mlp(256))
SPARSE = Layer(Attention(8, 4, 16), Mlp(0, experts=4, top_k=2, expert_width=64))
NEAR = Layer(Attention(8, 4, 16, window=64), Mlp(256))
RATES = Rates(0.5, 0.5, 0.5, 1.0)


def task_with(*layers: Layer, length: int = 2048, batch: int = 8) -> Task:
    shape = Shape("small", 128, 512, True, layers)
    return Task(shape, SequenceOptions(16, row_cost=500), length=length, global_batch=batch)


def machine(gpus: int = 8, memory: float = 1e12, per_node: int = 8, link: float = 1e8) -> Machine:
    gpu = Gpu("some", memory, 1e12, 1e11, 1e11, 8 * link, link, 8)
    return Machine(gpu, gpus, per_node, RATES, Uncounted(1_000_000, 1.1))


# --- what training accepts -----------------------------------------------------------------------

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --kv-channels 16 --ffn-hidden-size 256 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --seq-length 256 --global-batch-size 4 "
    "--vocab-size 250 --mask-token-id 249 --diffusion-block-size 8 --tokenizer-type NullTokenizer "
    "--bf16"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"


def as_flags(task: Task, layout: Layout) -> list[str]:
    """What `words.flags` says, as a command line."""
    out = []
    for section in flags(task, layout).values():
        for name, value in section.items():
            given = [str(one) for one in value] if isinstance(value, list) else [str(value)]
            if value is not False:
                out += [f"--{name.replace('_', '-')}", *([] if value is True else given)]
    return out


def accepted(rank: int, world: int, model: str, data: str, gpus: int, every: int) -> list[str]:
    """Layouts on which the planner and training disagree, in words."""
    task = task_of(parsed(model.split())[1])
    wrong = []
    for number, layout in enumerate(candidates(task, gpus)):
        ours = refusal(task, layout, gpus_per_node=gpus)
        if ours is None and number % every:
            continue  # of those that are allowed some
        line = [*model.split(), "--data-path", data, *as_flags(task, layout)]
        try:
            arguments.resolve(line, gpus)
            theirs = None
        except ValueError as error:
            theirs = str(error)
        if (ours is None) != (theirs is None):
            wrong.append(f"{in_words(layout)}: planner {ours}, training {theirs}")
        elif ours is None and layout_of(parsed(line)[1], gpus) != layout:
            wrong.append(f"{in_words(layout)}: its flags make {layout_of(parsed(line)[1], gpus)}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize(("more", "gpus", "every"), [("", 6, 3), (EXPERTS, 4, 5)])
def test_the_planner_refuses_what_training_does(
    tmp_path: Path, more: str, gpus: int, every: int
) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    data = str(tmp_path / "data")
    assert run_ranks(1, accepted, f"{MODEL} {more}", data, gpus, every)[0] == []


@pytest.mark.ranks
def test_the_best_layouts_run(tmp_path: Path) -> None:
    """With recomputation and chunks, as a search gives them."""
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    wrong = run_ranks(1, best_that_training_refuses, MODEL, str(tmp_path / "data"))[0]
    assert wrong == []


def best_that_training_refuses(rank: int, world: int, model: str, data: str) -> list[str]:
    task = task_of(parsed(model.split())[1])
    wrong, kinds = [], set()
    start = Layout(bp=4, cp=4)
    for recompute, keep in (("none", False), ("attention", False), ("full", True), ("full", False)):
        layout = replace(start, recompute=recompute, keep_attention=keep)  # type: ignore[arg-type]
        has = Search(task, machine(4)).judge(layout).memory.total  # just enough for this one
        for one in Search(task, machine(4, has)).run().fitting[::3]:
            kinds.add((one.layout.recompute, one.layout.keep_attention))
            line = [*model.split(), "--data-path", data, *as_flags(task, one.layout)]
            arguments.resolve(line, 4)
            if (found := layout_of(parsed(line)[1], 4)) != one.layout:
                wrong.append(f"{one.layout} is {found}")
    return [*wrong, *([] if len(kinds) == 4 else [f"only {kinds}"])]


@pytest.mark.parametrize(
    ("layout", "layers", "words"),
    [
        (Layout(tp=8), [DENSE], "TP 8 does not divide 4 key heads"),
        (Layout(tp=4), [DENSE], None),
        (Layout(tp=2), [SPARSE], "experts with TP need sequence parallelism"),
        (Layout(tp=2, sequence_parallel=True), [SPARSE], None),
        (Layout(sequence_parallel=True), [DENSE], "sequence parallelism without TP"),
        (Layout(pp=2), [DENSE] * 3, "PP 2 does not divide 3 layers"),
        (Layout(ep=2, dp=2), [DENSE], "EP without experts"),
        (Layout(ep=3, dp=3), [SPARSE], "EP 3 does not divide 4 experts"),
        (Layout(ep=4, dp=2), [SPARSE], "EP 4 does not divide the ranks of a pipeline stage"),
        (Layout(ep=4, dp=2, bp=2), [SPARSE], None),
        (Layout(cp=3, over_heads=True), [DENSE], "a2a over 3 ranks with 8 query and 4 key heads"),
        (Layout(cp=8, over_heads=True), [DENSE], None),
        (Layout(dp=4, micro_batch=4), [DENSE], "16 rows at a time (replicas x micro-batch) do not"),
        (Layout(dp=4, micro_batch=2), [DENSE], None),
    ],
)
def test_rules(layout: Layout, layers: list[Layer], words: str | None) -> None:
    told = refusal(task_with(*layers), layout, gpus_per_node=8)
    assert told is None if words is None else told is not None and told.startswith(words)


def test_tensor_parallelism_stays_in_a_node() -> None:
    task, layout = task_with(DENSE), Layout(tp=4)
    assert refusal(task, layout, 4) is None
    assert refusal(task, layout, 2) == "TP 4 would leave a node of 2 GPUs"


# --- candidates ----------------------------------------------------------------------------------


def test_candidates_use_all_gpus_once() -> None:
    found = [*candidates(task_with(DENSE), 8)]
    assert {layout.gpus for layout in found} == {8}
    assert len(found) == len(set(found))
    assert {layout.mode for layout in found} == {"single", "CSBP", "BP", "hybrid", "CP"}
    assert {family(layout) for layout in found if layout.mode == "CP"} == {
        *("CP all-gather", "CP clean all-gather", "CP ring", "CP a2a"),
    }
    assert {layout.ep for layout in found} == {1}
    assert {layout.ep for layout in candidates(task_with(SPARSE), 8)} == {1, 2, 4, 8}


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


# --- nothing better is left out ------------------------------------------------------------------


def by_brute_force(task: Task, where: Machine) -> dict[Layout, float]:
    """Tokens/s of all allowed layouts under every recomputation that fit."""
    search = Search(task, where)
    out = {}
    for layout in candidates(task, where.gpus):
        if refusal(task, layout, where.per_node) is None:
            for recompute, keep in itertools.product(("none", "attention", "full"), (False, True)):
                if keep and recompute != "full":
                    continue
                one = search.judge(replace(layout, recompute=recompute, keep_attention=keep))
                if one.seconds is not None:
                    out[one.layout] = one.speed
    return out


@pytest.mark.parametrize(
    ("recompute", "keep"), [("none", False), ("attention", False), ("full", True), ("full", False)]
)
@pytest.mark.parametrize("layers", [(DENSE,) * 2, (NEAR, DENSE)], ids=["dense", "window"])
def test_the_best_is_found(layers: tuple[Layer, ...], recompute: Any, keep: bool) -> None:
    """With just the memory that CSBP 4 needs under some recomputation."""
    task = task_with(*layers, batch=4)
    just = Layout(bp=4, cp=4, recompute=recompute, keep_attention=keep, micro_batches=4)
    where = machine(4, Search(task, machine(4)).judge(just).memory.total)
    want = by_brute_force(task, where)
    outcome = Search(task, where).run()
    assert bool(want) == bool(outcome.fitting)
    if want:
        best = max(want.values())
        assert max(one.speed for one in outcome.fitting) == pytest.approx(best, rel=2e-3)
        for one in outcome.fitting:
            assert want[one.layout] == one.speed


def test_ties_come_first_and_the_rest_by_speed() -> None:
    outcome = Search(task_with(DENSE, DENSE), machine(4)).run()
    ties, best = outcome.ties(), max(one.speed for one in outcome.fitting)
    assert outcome.fitting[: len(ties)] == ties
    assert [one.wire for one in ties] == sorted(one.wire for one in ties)
    rest = [one.speed for one in outcome.fitting[len(ties) :]]
    assert rest == sorted(rest, reverse=True)
    assert min(one.speed for one in ties) >= best * (1 - TIE) > max(rest)


def test_ties_are_in_order_of_their_links() -> None:
    """Of 100, 99 and 90 tokens/s the second comes first: its links are busy for a shorter time."""

    def one(speed: float, wire: float) -> Judged:
        took = Seconds(products=1000 / speed, attention=0.0, head=0.0, tokens=1000)
        return Judged(Layout(), Memory({}), took, wire=wire)

    fast, tie, slow = one(100, 5.0), one(99, 1.0), one(90, 0.0)
    assert in_order([slow, fast, tie]) == (tie, fast, slow)


def test_a_slower_network_asks_for_fewer_bytes() -> None:
    """Replicas where batches are many, since rows are long; K/V when nothing else is left."""
    task = task_with(DENSE, DENSE, batch=1)
    fast, slow = (Search(task, machine(4, per_node=1, link=n)).run() for n in (1e12, 1e5))
    for outcome in (fast, slow):
        assert {one.layout.dp for one in outcome.fitting} == {1}
    sent = [sum(flow.bytes for flow in outcome.fitting[0].flows) for outcome in (fast, slow)]
    assert sent[1] < sent[0]


# --- why others are dropped ----------------------------------------------------------------------


def number(outcome: Outcome, what: str, words: str) -> int:
    return sum(one.number for one in outcome.dropped if one.what == what and words in one.why)


def test_what_does_not_fit_says_what_it_lacks() -> None:
    """One GPU with a byte too few for the layout that needs least."""
    task = task_with(DENSE, batch=1)
    search = Search(task, machine(1))
    needs = {
        (recompute, keep): search.judge(
            Layout(recompute=recompute, keep_attention=keep)  # type: ignore[arg-type]
        ).memory.total
        for recompute, keep in (("none", 0), ("attention", 0), ("full", 1), ("full", 0))
    }
    least = min(needs.values())
    outcome = Search(task, machine(1, least - 1)).run()
    assert outcome.fitting == ()
    assert outcome.closest is not None
    assert outcome.closest.memory.total == least
    assert number(outcome, "single", "0.0 GiB too little memory at least") == 4
    assert [one.layout.recompute for one in Search(task, machine(1, least)).run().fitting] == [
        "full"
    ]


def test_memory_is_that_of_the_worst_rank_and_stage() -> None:
    task, where = task_with(DENSE, NEAR, DENSE, DENSE, length=500), machine()
    first = 0
    for layout in (
        Layout(pp=2, bp=4, cp=2, recompute="none", micro_batches=4),
        Layout(pp=2, bp=4, cp=1, micro_batches=1),
        Layout(bp=2, cp=1, recompute="none"),
    ):
        plan = make_plan(full_rows(500), options_of(task.sequence, layout))
        counts = count(plan, layout, [None, 64])
        totals = [
            memory(task, layout, counts, stage, rank, where.uncounted).total
            for stage in range(layout.pp)
            for rank in range(layout.slot)
        ]
        first += totals[0] == max(totals)
        assert Search(task, where).judge(layout).memory.total == max(totals)
    assert first < 3  # or this would not tell the worst from the first


def test_reasons_are_counted() -> None:
    outcome = Search(task_with(DENSE, DENSE, batch=1, length=1 << 17), machine(4)).run()
    assert number(outcome, "", "PP 4 does not divide 2 layers") == 3  # for 3 micro-batches
    assert number(outcome, "", "more is recomputed than memory asks for") > 0
    assert number(outcome, "BP", "a rank computes more than 2 times") > 0
    assert number(outcome, "", "2 rows at a time (replicas x micro-batch) do not divide") > 0
    two = Search(task_with(DENSE, DENSE, batch=4, length=1 << 15), machine(1)).run()
    assert number(two, "micro-batches of 2 rows", "16,384 rows or more") == 1
    everything = Search(task_with(DENSE, batch=4, length=1 << 15), machine(1)).run(everything=True)
    assert {one.layout.micro_batch for one in everything.fitting} == {1, 2, 4}


# --- counts --------------------------------------------------------------------------------------


def test_plans_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(sample: Any, options: SequenceOptions) -> Any:
        made.append(
            (
                options.block_parallel_size,
                options.context_parallel_size,
                options.align_chunks,
                len(sample.tokens),
            )
        )
        return make_plan(sample, options)

    monkeypatch.setattr(searching, "make_plan", counted)
    Search(task_with(DENSE, DENSE), machine(4)).run()
    assert len(made) == len(set(made))
    assert {(bp, cp) for bp, cp, *_ in made} == {
        (1, 1),
        (2, 2),
        (2, 1),
        (1, 2),
        (4, 4),
        (4, 2),
        (4, 1),
        (1, 4),
    }


@pytest.mark.parametrize("length", [2048, 1000, 999])
def test_counts_are_shared_only_where_they_are_equal(length: int) -> None:
    task = task_with(DENSE, length=length)
    counts = Counts(task)
    for layout in (
        Layout(bp=2, cp=2),
        Layout(tp=4, bp=2, cp=2),
        Layout(tp=4, sequence_parallel=True, bp=2, cp=2),
        Layout(tp=4, sequence_parallel=True, cp=2, over_heads=True),
    ):
        plan = make_plan(full_rows(length), options_of(task.sequence, layout))
        assert counts.of(layout).ranks == count(plan, layout, [None]).ranks


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(recompute="none"), "single, no recompute"),
        (
            Layout(tp=2, sequence_parallel=True, dp=3, bp=8, cp=8),
            "TP 2, DP 3, CSBP 8, full recompute",
        ),
        (
            Layout(tp=2, bp=8, cp=2, keep_attention=True),
            "TP 2 without SP, hybrid 8/2, full recompute but attention",
        ),
        (Layout(pp=2, ep=2, bp=2, recompute="attention"), "PP 2, EP 2, BP 2, attention recomputed"),
        (
            Layout(cp=2, over_heads=True, micro_batch=4),
            "CP 2 a2a, micro-batches of 4, full recompute",
        ),
    ],
)
def test_layouts_in_words(layout: Layout, words: str) -> None:
    assert in_words(layout) == words


def test_flags_are_a_config() -> None:
    layout = Layout(bp=4, cp=2, recompute="attention")
    text = yaml.safe_dump(flags(task_with(DENSE), layout))
    assert yaml.safe_load(text)["memory"]["recompute_modules"] == ["core_attn"]
