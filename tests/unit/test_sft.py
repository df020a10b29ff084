"""Chats from files through Megatron's data set builder to Samples."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_files import Chat, chat, random_chats, write_chats
from torch.utils.data import default_collate

from megatron_bp.batch.balance import Balanced
from megatron_bp.batch.chat_report import as_bytes, chat_report, counts, marked, parts_of
from megatron_bp.batch.dataset import SampleDataset, build_datasets, sample_of
from megatron_bp.data.answers import ChatPolicy, as_trained
from megatron_bp.data.indexed import DataError
from megatron_bp.data.pretrain import blend_key, blend_place
from megatron_bp.data.sft import ChatConfig, ChatDataset
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan

LENGTH, BATCH = 40, 4
TRAIN, VALIDATION, TEST = 0, 1, 2
Build = Callable[..., list[SampleDataset | None]]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Writes one data set a list of chats and builds training, validation and test samples."""

    def build(
        *data: Sequence[Chat],
        sizes: Sequence[int | None] = (24, 0, 0),
        evaluation: int | None = 0,
        weights: list[float] | None = None,
        draws: int = 1,
        split: str = "1,0,0",
        length: int = LENGTH,
        batch: int = BATCH,
        bytes_of: Sequence[int] | None = None,
        cache: str | None = "cache",
        seed: int = 1,
        **of_policy: Any,
    ) -> list[SampleDataset | None]:
        prefixes = [
            write_chats(tmp_path / f"data{i}", chats, bytes_of) for i, chats in enumerate(data)
        ]
        tokenizer = SimpleNamespace(unique_identifiers={}, vocab_size=258, eod=256, pad=0)
        config = ChatConfig(
            random_seed=seed,
            sequence_length=length,
            blend=(prefixes, weights),
            split=split,
            tokenizer=tokenizer,
            path_to_cache=None if cache is None else str(tmp_path / cache),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            add_extra_token_to_sequence=False,
            policy=ChatPolicy(**{"length": length, "block_size": 4, **of_policy}),
            global_batch=batch,
        )
        return list(build_datasets(config, list(sizes), evaluation, draws))

    return build


def samples(dataset: SampleDataset | None) -> list[Sample]:
    assert dataset is not None
    return [sample_of(default_collate([dataset[i]])) for i in range(len(dataset))]


def as_tuple(sample: Sample) -> tuple[Any, ...]:
    """Everything of a sample, to compare."""
    return tuple(
        getattr(sample, name).tolist()
        for name in (
            "tokens", "document", "position", "supervised", "document_keys", "document_epochs"
        )
    )  # fmt: skip


def keys_by_epoch(dataset: SampleDataset | None) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for sample in samples(dataset):
        pairs = zip(sample.document_epochs.tolist(), sample.document_keys.tolist(), strict=True)
        for epoch, key in pairs:
            found.setdefault(epoch, Counter())[key] += 1
    return found


def part(dataset: SampleDataset | None) -> ChatDataset:
    (one,) = parts_of(dataset)
    return one


def trained(chats: Sequence[Chat]) -> set[int]:
    return {i for i, (_, mask) in enumerate(chats) if any(mask)}


# --- rows ----------------------------------------------------------------------------------------


def test_every_chat_with_something_supervised_is_read_once_an_epoch(build: Build) -> None:
    chats = random_chats(90)
    train, _, _ = build(chats, sizes=(100, 0, 0))
    epochs = part(train).epoch_start.tolist()
    assert len(epochs) > 3
    found = keys_by_epoch(train)
    for epoch, (start, stop) in enumerate(pairwise(epochs)):
        if stop <= 100:
            assert found[epoch] == Counter(trained(chats)), (epoch, start)
    assert 0 < len(trained(chats)) < 90


def test_a_packed_row_holds_each_chat_as_it_is_alone(build: Build) -> None:
    chats = random_chats(90)
    train, _, _ = build(chats, fill=256, bytes_of=[7 * i for i in range(90)])
    how = part(train).policy
    several = 0
    for sample in samples(train):
        used = int((sample.document >= 0).sum())
        assert (sample.document[used:] == -1).all()
        assert not sample.supervised[used:].any()
        several += len(sample.document_keys) > 1
        for ordinal, key in enumerate(sample.document_keys.tolist()):
            ids, mask = chats[key]
            tokens, supervised = as_trained(np.array(ids, np.int32), np.array(mask, np.bool_), how)
            mine = sample.document == ordinal
            assert sample.tokens[mine].tolist() == tokens.tolist()
            assert sample.supervised[mine].tolist() == supervised.tolist()
            assert sample.position[mine].tolist() == list(range(len(tokens)))
            assert sample.document_bytes[ordinal] == 7.0 * key
    assert several > 10


def test_row_i_is_the_same_however_many_are_built(build: Build) -> None:
    """What a resume relies on, also where the rows asked for end inside of a global batch."""
    chats = random_chats(90)
    size = len(part(build(chats, cache=None)[TRAIN]).rows)
    few, _, _ = build(chats, sizes=(size, 0, 0), batch=10, cache=None)
    many, _, _ = build(chats, sizes=(400, 0, 0), batch=10, cache=None)
    assert size % 10
    assert [as_tuple(s) for s in samples(few)] == [as_tuple(s) for s in samples(many)[:size]]
    n = len(part(few).rows)
    assert part(many).rows.chats[: part(many).rows.start[n]].tolist() == (
        part(few).rows.chats.tolist()
    )


def test_epochs_are_packed_anew(build: Build) -> None:
    train, _, _ = build(random_chats(90), sizes=(100, 0, 0))
    rows, begin = part(train).rows, part(train).epoch_start
    first = {tuple(sorted(rows.of(i).tolist())) for i in range(begin[0], begin[1])}
    second = {tuple(sorted(rows.of(i).tolist())) for i in range(begin[1], begin[2])}
    assert len(first & second) < len(first) / 2


def test_another_seed_is_another_order(build: Build) -> None:
    chats = random_chats(90)
    orders = [samples(build(chats, seed=seed)[TRAIN])[0].document_keys.tolist() for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_rows_are_kept_for_the_next_start(build: Build, tmp_path: Path) -> None:
    chats = random_chats(90)
    first, _, _ = build(chats)
    (stored,) = (tmp_path / "cache").glob("*.npz")
    written = stored.stat().st_mtime_ns
    again, _, _ = build(chats)
    assert stored.stat().st_mtime_ns == written
    assert [as_tuple(s) for s in samples(first)] == [as_tuple(s) for s in samples(again)]
    plain, _, _ = build(chats, cache=None)
    assert [as_tuple(s) for s in samples(first)] == [as_tuple(s) for s in samples(plain)]


@pytest.mark.parametrize("how", ["cut", "changed", "empty"])
def test_damaged_rows_are_made_again_and_told(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    chats = random_chats(90)
    first, _, _ = build(chats)
    (stored,) = (tmp_path / "cache").glob("*.npz")
    whole = stored.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle],
        "changed": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
    }[how]
    stored.write_bytes(damaged)
    capsys.readouterr()
    again, _, _ = build(chats)
    told = capsys.readouterr().out
    assert re.search(rf"^megatron_bp: .*{stored.name}: is damaged \(.*its rows are made ", told)
    assert told.count("\n") == 1
    assert [as_tuple(s) for s in samples(first)] == [as_tuple(s) for s in samples(again)]
    assert list((tmp_path / "cache").glob("*.npz")) == [stored]
    build(chats)
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("what", ["chats", "policy", "batch"])
def test_rows_of_other_chats_or_settings_are_not_taken(
    build: Build, tmp_path: Path, what: str
) -> None:
    chats = random_chats(90)
    build(chats)
    other = random_chats(90, seed=1) if what == "chats" else chats
    changed: dict[str, Any] = {"policy": {"fill": 256}, "batch": {"batch": 2}}.get(what, {})
    cached, _, _ = build(other, **changed)
    plain, _, _ = build(other, cache=None, **changed)
    assert [as_tuple(s) for s in samples(cached)] == [as_tuple(s) for s in samples(plain)]
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 2


# Of 9 and of 8 tokens, of the same cost in blocks of 4: 9 x 13 / 2 + 4 = 8 x 12 / 2 + 6 + 8.
NINE, EIGHT = ([1] * 9, [1] + [0] * 8), ([1] * 8, [0, 0, 1, 0, 1, 0, 0, 0])


@pytest.mark.parametrize("what", ["cost", "tokens"])
def test_rows_are_not_taken_where_cost_or_tokens_alone_differ(
    build: Build, tmp_path: Path, what: str
) -> None:
    """The name of the kept rows tells both: the same sizes under another mask, and the reverse."""
    if what == "tokens":
        one, other = [NINE] * 40, [EIGHT] * 40
    else:
        one = [([1] * (21 + i % 20), [1] + [0] * (20 + i % 20)) for i in range(90)]
        other = [(ids, [1] * len(ids) if i % 3 else mask) for i, (ids, mask) in enumerate(one)]
    first = part(build(one)[TRAIN]).dataset.facts
    cached, _, _ = build(other)
    facts = part(cached).dataset.facts
    assert (first.cost.tolist() == facts.cost.tolist()) == (what == "tokens")
    assert (first.tokens.tolist() == facts.tokens.tolist()) == (what == "cost")
    plain, _, _ = build(other, cache=None)
    assert [as_tuple(s) for s in samples(cached)] == [as_tuple(s) for s in samples(plain)]
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 2


def test_batches_of_like_cost_begin_where_global_batches_do_in_every_epoch(build: Build) -> None:
    """401 rows of a chat each in batches of 4: the second epoch begins inside of a global batch."""
    chats = [([1] * (21 + i % 20), [1] * (21 + i % 20)) for i in range(401)]
    train, _, _ = build(chats, sizes=(802, 0, 0), cache=None)
    data = part(train)
    assert data.epoch_start.tolist() == [0, 401, 802, 1203]
    costs = data.costs / np.ptp(data.costs)
    for first in (0, 404, 804):  # of 99 whole global batches of an epoch each
        spans = np.ptp(costs[first : first + 396].reshape(-1, 4), axis=1)
        assert spans.mean() < 0.12
    assert np.ptp(costs[401 : 401 + 396].reshape(-1, 4), axis=1).mean() > 0.25


def test_rows_of_a_global_batch_go_by_cost_and_are_the_same_set(build: Build) -> None:
    train, _, _ = build(random_chats(200), sizes=(32, 0, 0), batch=8)
    assert train is not None
    facts, chats = part(train).dataset.facts, part(train)
    for first in range(0, 32, 8):
        costs, keys = [], []
        for i in range(first, first + 8):
            row = sample_of(default_collate([train[i]])).document_keys
            costs.append(int(facts.cost[row].sum()))
            keys += row.tolist()
        assert costs == sorted(costs)
        want = chats.rows.chats[chats.rows.start[first] : chats.rows.start[first + 8]]
        assert sorted(keys) == sorted(want.tolist())


def test_rows_can_be_read_in_any_order() -> None:
    """Workers read parts of a batch, and a resumed run begins anywhere."""

    class Source:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, idx: int | None) -> dict[str, Any]:
            return {"row": idx}

        def row_costs(self, rows: np.ndarray) -> np.ndarray:
            return np.array([5, 1, 3, 2, 9, 9, 0, 1, 7, 6])[rows]

    wanted = [1, 3, 2, 0, 6, 7, 4, 5, 9, 8]
    rows = Balanced(Source(), 4)
    assert [rows[i]["row"] for i in range(10)] == wanted
    assert [rows[i]["row"] for i in (9, 0, 5, 1, 8)] == [8, 1, 7, 3, 9]
    assert rows[None]["row"] is None


# --- splits and blends ---------------------------------------------------------------------------


def test_validation_is_in_the_order_of_the_file_each_chat_once(build: Build) -> None:
    chats = random_chats(60)
    train, validation, test = build(chats, sizes=(20, None, None), evaluation=None, split="1,1,1")
    for dataset, split, own in ((validation, 1, range(20, 40)), (test, 2, range(40, 60))):
        found = samples(dataset)
        keys = [key for s in found for key in s.document_keys.tolist()]
        assert keys == sorted(trained(chats) & set(own))
        assert {s.split for s in found} == {split}
        assert {e for s in found for e in s.document_epochs.tolist()} == {0}
    assert set(keys_by_epoch(train)[0]) == trained(chats) & set(range(20))


def test_draws_and_evaluations_read_the_same_rows(build: Build) -> None:
    _, validation, _ = build(
        random_chats(60), sizes=(4, 24, 0), evaluation=4, draws=3, split="1,1,0"
    )
    found = samples(validation)
    assert [set(s.document_epochs.tolist()) for s in found] == (
        [{0}] * 4 + [{1}] * 4 + [{2}] * 4
    ) * 2
    keys = [s.document_keys.tolist() for s in found]
    assert keys == keys[:4] * 6
    assert len({str(key) for key in keys}) == 4


def test_an_evaluation_never_reads_a_chat_twice(build: Build) -> None:
    chats = random_chats(60)
    whole = len(samples(build(chats, sizes=(4, None, 0), evaluation=None, split="1,1,0")[1]))
    exact = build(chats, sizes=(4, whole, 0), evaluation=whole, split="1,1,0")[1]
    assert keys_by_epoch(exact)[0] == Counter(trained(chats) & set(range(30, 60)))
    with pytest.raises(ValueError, match=rf"reads {whole + 1} rows .* split holds {whole}"):
        build(chats, sizes=(4, 40, 0), evaluation=whole + 1, split="1,1,0")


@pytest.mark.parametrize("weights", [[1.0, 3.0], [3.0, 1.0]])
def test_an_evaluation_longer_than_one_part_of_a_blend_is_an_error(
    build: Build, weights: list[float]
) -> None:
    data = random_chats(60), random_chats(60, seed=1)
    with pytest.raises(ValueError, match=r"reads \d+ rows of 40 tokens from .* split holds"):
        build(*data, sizes=(4, 60, 0), evaluation=40, split="1,1,0", weights=weights)


def test_a_blend_keeps_data_sets_and_epochs_apart(build: Build) -> None:
    """Half of the rows each: the short one is read again and again, under other epochs."""
    one, two = random_chats(90), random_chats(20, seed=1)
    train, _, _ = build(one, two, sizes=(60, 0, 0), weights=[0.5, 0.5])
    seen: Counter[tuple[int, int]] = Counter()
    for epoch, keys in keys_by_epoch(train).items():
        seen += Counter({(epoch, key): n for key, n in keys.items()})
    assert set(seen.values()) == {1}, "a chat has the same noise twice"
    epochs = {number: {e for e, key in seen if blend_place(key)[0] == number} for number in (0, 1)}
    assert epochs[1] > epochs[0] >= {0}
    numbers = {key for _, key in seen if blend_place(key)[0] == 1}
    assert {blend_place(key)[1] for key in numbers} == trained(two)


def test_a_blend_goes_by_cost_in_a_global_batch(build: Build) -> None:
    data = random_chats(90), random_chats(90, seed=1)
    train, _, _ = build(*data, sizes=(24, 0, 0), weights=[0.5, 0.5])
    parts = parts_of(train)
    for first in range(0, 24, BATCH):
        costs = []
        assert train is not None
        for i in range(first, first + BATCH):
            keys = sample_of(default_collate([train[i]])).document_keys.tolist()
            places = [blend_place(key) for key in keys]
            costs.append(sum(int(parts[n].dataset.facts.cost[c]) for n, c in places))
        assert costs == sorted(costs)


def test_a_blend_without_weights_that_is_read_again_has_new_noise(build: Build) -> None:
    data = random_chats(60), random_chats(20, seed=1)
    train, _, _ = build(*data, sizes=(80, 0, 0))
    found = keys_by_epoch(train)
    assert len(found) > 2
    assert all(set(keys.values()) == {1} for keys in found.values())


def test_places_of_blend_keys() -> None:
    assert blend_place(blend_key(2047, 5)) == (2047, 5)
    assert blend_place(17) == (0, 17)


# --- what is left out, and errors ----------------------------------------------------------------


def test_what_is_left_out_is_counted(build: Build) -> None:
    chats = [
        ([1] * 10, [0] * 5 + [1] * 5),
        ([1] * 10, [0] * 10),  # nothing supervised
        ([1] * 50, [0] * 20 + [1] * 30),  # cut to 40
        ([1] * 50, [0] * 45 + [1] * 5),  # cut before its answer
    ]
    train, _, _ = build(chats, overlong="truncate", sizes=(4, 0, 0))
    assert counts(part(train)) == (
        "2 chats in 2 rows an epoch, 62.5% full; 50.0% of tokens supervised, of which 0 fill up 0 "
        "answers; 0 dropped as longer than a row, 2 dropped with nothing supervised, 1 truncated"
    )
    train, _, _ = build(chats, overlong="drop", sizes=(4, 0, 0), fill=256)
    assert counts(part(train)) == (
        "1 chats in 1 rows an epoch, 30.0% full; 58.3% of tokens supervised, of which 2 fill up 1 "
        "answers; 2 dropped as longer than a row, 1 dropped with nothing supervised, 0 truncated"
    )


def test_a_chat_that_ends_as_chatml_does_is_filled(build: Build) -> None:
    """The line break after the end of turn is not supervised: filling takes its place.

    With blocks from the chat's start the two chats are of 7 + 1 and of 8 tokens; bytes are those of
    the answers, which stay.
    """
    ids = [*b"Q: ?A!", 256, ord("\n")]
    short, even = (ids, [0] * 4 + [1] * 3 + [0]), ([1, *ids], [0] * 5 + [1] * 3 + [0])
    how = {"bytes_of": [2, 5], "sizes": (4, 0, 0), "batch": 2, "fill": 256}
    train, _, _ = build([short, even], **how)
    assert "of which 1 fill up 1 answers" in counts(part(train))
    one, two = (part(train).chat(number) for number in (0, 1))
    assert one.tokens.tolist() == [*ids[:7], 256]
    assert one.supervised.tolist() == [False] * 4 + [True] * 4
    assert two.tokens.tolist() == [1, *ids[:7]]
    assert (one.bytes, two.bytes) == (2.0, 5.0)
    facts = part(train).dataset.facts
    assert facts.tokens.tolist() == [8, 8]
    train, _, _ = build([short, even], grid="response", **how)
    assert part(train).chat(0).tokens.tolist() == [*ids[:7], 256]
    assert part(train).chat(1).tokens.tolist() == [1, *ids[:7], 256]
    assert "of which 2 fill up 2 answers" in counts(part(train))


def test_bytes_of_a_cut_chat_are_in_proportion(build: Build) -> None:
    chats = [([1] * 50, [0] * 20 + [1] * 30), ([1] * 9, [0] * 4 + [1] * 5)]
    how = {"overlong": "truncate", "fill": 256, "batch": 2}
    train, _, _ = build(chats, bytes_of=[90, 11], sizes=(2, 0, 0), **how)
    told = {
        key: size
        for s in samples(train)
        for key, size in zip(s.document_keys.tolist(), s.document_bytes.tolist(), strict=True)
    }
    assert told == {0: 90 * 20 / 30, 1: 11.0}


def test_an_overlong_chat_is_an_error(build: Build) -> None:
    with pytest.raises(DataError, match=r"chat 1 has 50 tokens, and a row 40 \(--seq-length\)"):
        build([([1] * 9, [1] * 9), ([1] * 50, [1] * 50)])


def test_a_split_without_a_chat_is_an_error(build: Build) -> None:
    chats = random_chats(4) + [([1] * 9, [0] * 9)] * 4
    with pytest.raises(DataError) as error:
        build(chats, sizes=(4, 4, 0), evaluation=4, split="1,1,0")
    told = str(error.value)
    assert re.search(
        r"the validation split of .*data0 \(--split 1,1,0\) has 4 chats and none", told
    )
    assert "4 dropped with nothing supervised" in told
    assert told.endswith(": prepare more chats, change --split, or set --eval-iters 0")
    with pytest.raises(
        DataError, match=r"the training split .*: prepare more chats, or change --s"
    ):
        build(chats[4:], sizes=(4, 0, 0))
    long = [([1] * 50, [1] * 50)] * 4
    with pytest.raises(DataError, match=r"change --split, or raise --seq-length$"):
        build(long, sizes=(4, 0, 0), overlong="drop")


@pytest.mark.parametrize(
    ("n", "split", "empty"), [(1, "95,5,0", "validation"), (3, "80,10,10", "test")]
)
def test_too_few_chats_for_a_split_is_told_with_the_ways_out(
    build: Build, n: int, split: str, empty: str
) -> None:
    chats = random_chats(n, unlike=False)
    with pytest.raises(DataError) as error:
        build(chats, sizes=(4, 4, 4), evaluation=4, split=split)
    told = str(error.value)
    assert f"the {empty} split of " in told
    assert f"(--split {split}) has none of its {n} chats: prepare more chats, change" in told
    assert told.endswith("or set --eval-iters 0")
    train, _, _ = build(chats, sizes=(4, 0, 0), split=split)  # as with --eval-iters 0
    assert len(samples(train)) >= 4


def test_texts_are_no_chats(build: Build, tmp_path: Path) -> None:
    write_chats(tmp_path / "data0", random_chats(4))
    (tmp_path / "data0.supervised.npy").unlink()
    (tmp_path / "data0.json").unlink()
    with pytest.raises(DataError, match=r"no chats data set"):
        ChatDataset.build_low_level_dataset(
            str(tmp_path / "data0"),
            SimpleNamespace(
                policy=ChatPolicy(40, 4),
                mmap_bin_files=True,
                sequences_per_dataset=None,
                fast_cache_load=False,
                token_dtype_code=None,
            ),
        )


# --- noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_objective", "of_plan"),
    [
        ({}, {}),
        ({"antithetic": True}, {"grid": "response"}),
        ({"noise": "uniform", "scored": "all", "weighting": "one"}, {"grid": "response"}),
        (
            {"complementary": True, "weighting": "one", "alignment": "next"},
            {"copies": 2, "alignment": "next"},
        ),
    ],
    ids=["plain", "response", "uniform", "two views"],
)
def test_noise_of_a_chat_is_bitwise_that_of_the_chat_alone(
    build: Build, of_objective: dict[str, Any], of_plan: dict[str, Any]
) -> None:
    grid = of_plan.get("grid", "document")
    train, _, _ = build(random_chats(90), sizes=(100, 0, 0), fill=256, grid=grid)
    objective = Objective(257, 258, seed=3, **of_objective)
    several = 0
    for sample in samples(train):
        whole = by_document(sample, objective, **of_plan)
        several += len(sample.document_keys) > 1
        epoch = int(sample.document_epochs[0])
        for ordinal, key in enumerate(sample.document_keys.tolist()):
            alone = pack([part(train).chat(key)], LENGTH, TRAIN, epoch)
            assert whole[ordinal] == by_document(alone, objective, **of_plan)[0]
    assert several > 20


def by_document(sample: Sample, objective: Objective, **of_plan: Any) -> list[tuple[Any, ...]]:
    """Corrupted ids, p, labels and weights of each document of a row."""
    plan = make_plan(sample, SequenceOptions(4, **of_plan))
    out: Corruption = corrupt(sample, plan, objective)
    of_rows = np.repeat(plan.units.document, plan.units.stop - plan.units.start)
    (term,) = out.terms
    labels, weights = term.labels[len(sample.tokens) :], term.weights[len(sample.tokens) :]
    return [
        tuple(
            column[of_rows == ordinal].tobytes()
            for column in (out.tokens, out.p, out.corrupted, labels, weights)
        )
        for ordinal in range(len(sample.document_keys))
    ]


def test_noise_is_fresh_in_each_epoch(build: Build) -> None:
    chats = random_chats(20, unlike=False)
    train, _, _ = build(chats, sizes=(40, 0, 0))
    objective = Objective(257, 258, seed=3)
    seen: dict[int, list[Any]] = {}
    for sample in samples(train):
        for key, noise in zip(
            sample.document_keys.tolist(), by_document(sample, objective), strict=True
        ):
            seen.setdefault(key, []).append(noise[:3])
    several = [noises for noises in seen.values() if len(noises) > 2]
    assert len(several) == 20
    assert all(len(set(noises)) == len(noises) for noises in several)


# --- what is printed -----------------------------------------------------------------------------


def test_a_sample_is_printed_with_its_answers_marked(build: Build) -> None:
    first, second = chat("2+2?\n", "4"), chat("", "x\n")
    ids, mask = [*first[0], *second[0], ord("?")], [*first[1], *second[1], 0]
    train, _, _ = build([(ids, mask)], sizes=(4, 0, 0))
    lines = list(chat_report([train, None, None], 3, str))
    assert "1 chats in 1 rows an epoch" in lines[0]
    head = "chat 0 of {} as it is trained with (9 tokens, 3 >>>supervised<<<):"
    assert lines[1] == "megatron_bp: " + head.format(part(train).dataset.path_prefix)
    assert lines[2] == "    | 2+2?\n    | >>>4x\n    | <<<?"
    assert len(lines) == 7  # three chats: the one again in the next epochs
    assert len(list(chat_report([train, None, None], 0, str))) == 1


def test_filling_is_shown_by_its_id(build: Build) -> None:
    train, _, _ = build([chat("ab", "cd\u00e9")], sizes=(4, 0, 0), fill=256)
    *_, text = chat_report([train, None, None], 1, str)
    assert text == "    | ab>>>cd\u00e9<256><256><<<"


def test_ids_of_another_tokenizer_are_decoded_by_it(build: Build, tmp_path: Path) -> None:
    train, _, _ = build([chat("ab", "cd")], sizes=(4, 0, 0))
    (tmp_path / "data0.json").unlink()
    *_, text = chat_report([train, None, None], 1, lambda ids: f"{ids}")
    assert text == "    | [97, 98]>>>[99, 100]<<<"


def test_bytes_and_long_runs() -> None:
    assert as_bytes([0xC3, 0xA9, 300, 0xC3]) == "\u00e9<300>\\xc3"
    text = marked(np.full(5000, 97), np.zeros(5000, np.bool_), as_bytes)
    assert text == "a" * 1000 + "[... 3000 characters ...]" + "a" * 1000


def test_a_blends_samples_name_their_data_set(build: Build) -> None:
    train, _, _ = build([chat("a", "b")], [chat("c", "d")], sizes=(4, 0, 0), weights=[0.5, 0.5])
    lines = list(chat_report([train, None, None], 4, str))
    assert sum("data0: 1 chats" in line for line in lines) == 1
    assert sum("data1: 1 chats" in line for line in lines) == 1
    for number, text in ((0, "a>>>b<<<"), (1, "c>>>d<<<")):
        heads = [i for i, line in enumerate(lines) if f"data{number} as it is trained" in line]
        assert heads
        assert all(text in lines[place + 1] for place in heads)
