"""Whole runs of pretrain_bdlm.py on gloo ranks: same losses on any layout, resume, a true bound.

Each run is the real entry: its command line, Megatron's loop, data sets and checkpoints.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from megatron_bp.tools.prepare import Options, prepare

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
LENGTH, BLOCK, MASK, VOCABULARY, SEED = 61, 4, 257, 258, 3  # 61: any length will do
SHAPE = oracle.GPTShape(
    layers=2, hidden=32, heads=4, groups=2, head_dim=8, tied=True, qk_layernorm=True
)
CONFIG = f"""
data:
  split: 80,20,0
  tokenizer_type: NullTokenizer
  vocab_size: {VOCABULARY}
  null_tokenizer_eod_id: 256
  num_workers: 0
block_diffusion:
  diffusion_block_size: {BLOCK}
  mask_token_id: {MASK}
model:
  num_layers: {SHAPE.layers}
  hidden_size: {SHAPE.hidden}
  num_attention_heads: {SHAPE.heads}
  group_query_attention: true
  num_query_groups: {SHAPE.groups}
  qk_layernorm: true
  ffn_hidden_size: 48
  swiglu: true
  normalization: RMSNorm
  disable_bias_linear: true
  position_embedding_type: rope
  init_method_std: 0.1
  seq_length: {LENGTH}
training:
  global_batch_size: 4
  train_iters: 6
  lr: 1.0e-2
  min_lr: 1.0e-3
  lr_decay_style: cosine
  lr_warmup_iters: 1
  seed: {SEED}
evaluation:
  eval_interval: 3
  eval_iters: 1
logging:
  log_interval: 1
  save_interval: 3
"""


def pretrain(rank: int, world: int, arguments: list[str]) -> None:
    """One rank of `torchrun pretrain_bdlm.py ARGUMENTS`; a run that stops early exits with 0."""
    sys.path.insert(0, str(ROOT))
    import pretrain_bdlm

    sys.argv = ["pretrain_bdlm.py", *arguments]
    try:
        pretrain_bdlm.main()
    except SystemExit as end:
        if end.code:
            raise


class Runs:
    """Runs of one config over one small data set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(1)
        texts = folder / "texts"
        texts.mkdir()
        for i in range(60):
            words = rng.choice(["red ", "green ", "blue ", "one\n", "two\n"], rng.integers(2, 40))
            (texts / f"{i:02}.txt").write_text("".join(words) + str(i))
        self.prefix = folder / "data" / "words"
        prepare(Options(input=[texts], output_prefix=self.prefix))
        self.config = folder / "run.yaml"
        self.config.write_text(CONFIG)

    def run(self, name: str, ranks: int, *more: str) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl after a run into the folder `name`."""
        save = self.folder / name
        arguments = [str(self.config), "--data-path", str(self.prefix), "--save", str(save)]
        arguments += ["--load", str(save), *more]
        run_ranks(ranks, pretrain, arguments, fresh=True)
        return rows(save)

    def weights(self, name: str, step: int) -> dict[str, Tensor]:
        """The parameters in a checkpoint, by the names of Megatron's local spec."""
        return run_ranks(1, load, str(self.folder / name / f"iter_{step:07}"))[0]


def rows(save: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict[str, Any]], kind: str = "train") -> dict[int, float]:
    return {r["iteration"]: r["loss"] for r in rows if r["kind"] == kind}


def load(rank: int, world: int, path: str) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    weights = {}
    for name, tensor in dist_checkpointing.load_plain_tensors(path).items():
        if name.startswith("optimizer") or not isinstance(tensor, Tensor):
            continue
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        if not name.startswith("decoder.layers."):
            weights[name] = tensor
            continue
        for layer, part in enumerate(tensor):  # layers are stored stacked
            weights[name.replace("layers.", f"layers.{layer}.", 1)] = part
    return weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pretrain"))


@pytest.fixture(scope="module")
def csbp(runs: Runs) -> list[dict[str, Any]]:
    """The reference run: CSBP on 2 ranks, 6 steps without a break."""
    return runs.run("csbp", 2, "--block-parallel-size", "2")


def test_a_run_writes_a_row_for_each_step_and_learns(csbp: list[dict[str, Any]]) -> None:
    train = [r for r in csbp if r["kind"] == "train"]
    assert [r["iteration"] for r in train] == [1, 2, 3, 4, 5, 6]
    assert all(r["diffusion_count"] == r["clean_tokens"] == 4 * LENGTH for r in train)
    # twice the tokens, less the clean rows of each document's last block
    assert all(1.5 * r["clean_tokens"] < r["rows"] < 2 * r["clean_tokens"] for r in train)
    assert all(r["bytes_sent"] > 0 for r in train)
    assert [r["iteration"] for r in csbp if r["kind"] == "validation"] == [3, 6, 6]
    assert losses(csbp)[6] < losses(csbp)[1] - 0.1


def test_the_same_run_twice_is_the_same_to_the_bit(runs: Runs, csbp: list[dict[str, Any]]) -> None:
    again = runs.run("again", 2, "--block-parallel-size", "2")
    assert losses(again) == losses(csbp)
    assert losses(again, "validation") == losses(csbp, "validation")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ["--block-parallel-size", "1"]),
        (2, ["--block-parallel-size", "1"]),  # data parallel: 2 x 2 instead of 1 x 4
        (4, ["--block-parallel-size", "4"]),
        (1, ["--block-parallel-size", "1", "--micro-batch-size", "2"]),
        (2, ["--block-parallel-size", "1", "--micro-batch-size", "2"]),
        (2, ["--block-parallel-size", "2", "--context-parallel-size", "1"]),
        (4, ["--block-parallel-size", "4", "--context-parallel-size", "2"]),
        (2, ["--context-parallel-size", "2", "--cp-comm-type", "all_gather"]),
    ],
)
def test_the_loss_does_not_depend_on_the_layout(
    runs: Runs, csbp: list[dict[str, Any]], ranks: int, flags: list[str]
) -> None:
    """Case 7: the same noise whatever slot and accumulation; then the same loss at every step."""
    other = runs.run(f"layout-{ranks}{''.join(flags)}", ranks, *flags)
    assert losses(other) == pytest.approx(losses(csbp), rel=1e-5)
    assert losses(other, "validation") == pytest.approx(losses(csbp, "validation"), rel=1e-5)
    masked = [[r["scored"] for r in run if r["kind"] == "train"] for run in (other, csbp)]
    assert masked[0] == masked[1]


def test_a_resumed_run_goes_on_as_if_never_stopped(runs: Runs, csbp: list[dict[str, Any]]) -> None:
    """Evaluations are rarer after the break, and still read the same rows from the first."""
    flags = ["--block-parallel-size", "2"]
    often = ["--exit-interval", "3", "--eval-interval", "1"]
    first = runs.run("resumed", 2, *flags, *often)
    assert sorted(losses(first)) == [1, 2, 3]
    reported(runs.folder / "resumed", first, starts=1)
    second = runs.run("resumed", 2, *flags)
    assert losses(second) == losses(csbp)
    reported(runs.folder / "resumed", second, starts=2)
    evaluated = losses(second, "validation")
    assert {step: evaluated[step] for step in (3, 6)} == losses(csbp, "validation")
    assert sorted(evaluated) == [1, 2, 3, 6]
    assert len([r for r in second if r["kind"] == "train"]) == 6


def reported(save: Path, rows: list[dict[str, Any]], starts: int) -> None:
    """The report is there, and its numbers are those of metrics.jsonl."""
    text = (save / "report.md").read_text()
    train = [r for r in rows if r["kind"] == "train"]
    for row in train:
        assert f"| {row['iteration']} | {row['loss']:.6f} |" in text
    for row in (r for r in rows if r["kind"] == "validation"):
        assert f"| {row['iteration']} | validation | {row['loss']:.6f} +- " in text
        assert f"| {row['bound_bits_per_byte']:.4f} +- " in text
    how = "it came to its end" if starts == 2 else "it was told to stop"
    assert f"After step {train[-1]['iteration']} of 6; {how}." in text
    assert f"({max(r['memory_bytes'] for r in train):,} bytes)" in text
    assert f"{sum(r['clean_tokens'] for r in train):,} clean tokens trained on" in text
    assert f"({float(np.median([r['bytes_sent'] for r in train])):,.0f} bytes)" in text
    assert "| mode | CSBP |" in text
    assert (f"{starts} starts; made again after one: 0 rows" in text) == (starts > 1)
    sent = json.loads((save / "journal.jsonl").read_text().splitlines()[0])["predicted"]
    # full rows of one document: those of the run are packed, so fewer clean rows are needed
    assert 1 < sent["attention_bytes"] / np.median([r["bytes_sent"] for r in train]) < 1.5


def evaluate(rank: int, world: int, arguments: list[str]) -> None:
    """One rank of `torchrun -m megatron_bp.tools.evaluate ARGUMENTS`."""
    sys.path.insert(0, str(ROOT))
    from megatron_bp.tools.evaluate import main

    main(arguments)


def test_evaluation_of_a_checkpoint_is_that_of_the_run(
    runs: Runs, csbp: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Bit-equal on the run's layout, and on any other to rounding."""
    trained = csbp[-1]
    told = {}
    for ranks in (1, 2, 4):
        file = tmp_path / f"{ranks}.json"
        arguments = [str(runs.folder / "csbp"), "--data", str(runs.prefix), "--json", str(file)]
        run_ranks(ranks, evaluate, arguments, fresh=True)
        told[ranks] = json.loads(file.read_text())
    same = ("loss", "diffusion_loss_sum", "diffusion_count", "standard_error", "scored")
    same += ("bound_bits_per_byte", "bound_bits_per_byte_error")
    assert {name: told[2][name] for name in same} == {name: trained[name] for name in same}
    for ranks in (1, 4):
        for name in same:
            assert told[ranks][name] == pytest.approx(trained[name], rel=1e-6), (ranks, name)


def test_more_draws_lower_the_noise_but_not_the_texts(
    runs: Runs, csbp: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "draws.json"
    step = runs.folder / "csbp" / "iter_0000003"
    arguments = [str(step), "--data", str(runs.prefix), "--json", str(file)]
    run_ranks(1, evaluate, [*arguments, "--draws", "5", "--samples", "8"], fresh=True)
    row = json.loads(file.read_text())
    assert (row["draws"], row["samples"]) == (5, 8)
    assert row["diffusion_count"] == 5 * 8 * LENGTH
    assert row["iteration"] == 3
    assert 0 < row["standard_error"] < row["loss"]


def validation_rows(rank: int, world: int, prefix: str) -> list[dict[str, np.ndarray]]:
    """Tokens, documents and keys of the validation samples, from Megatron's own indexed data."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    from megatron_bp.batch.dataset import VALIDATION, build_datasets

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="80,20,0",
        tokenizer=MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null-text"}, vocab_size=VOCABULARY, eod_id=256
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=False,
    )
    data = build_datasets(config, [24, 12, 0], 4)[VALIDATION]
    assert data is not None
    return [data[i] for i in range(4)]


def test_the_dense_oracle_agrees_with_the_checkpoint(
    runs: Runs, csbp: list[dict[str, Any]]
) -> None:
    """It gets tokens, documents, draws and weights, and derives mask, weights and bound itself."""
    from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform

    weights = runs.weights("csbp", 6)
    total, count = 0.0, 0
    for row in run_ranks(1, validation_rows, str(runs.prefix))[0]:
        t, u = [], []
        for ordinal, key in enumerate(row["document_keys"]):
            length = int((row["document"] == ordinal).sum())
            noise = NoiseKey(SEED, 1, 0, int(key), 0)
            t += (1 - uniform(noise, Purpose.LEVEL, 0, -(-length // BLOCK))).tolist()
            u += uniform(noise, Purpose.MASK, 0, length).tolist()
        u += [1.0] * (LENGTH - len(u))
        bound = oracle.bound(
            weights,
            SHAPE,
            row["tokens"],
            row["document"],
            BLOCK,
            np.float32(t).tolist(),
            u,
            mask_id=MASK,
            vocab=VOCABULARY,
        )
        total, count = total + bound.total.item(), count + bound.count
    (last,) = (r for r in csbp[-1:] if r["kind"] == "validation")
    assert last["diffusion_count"] == count
    assert last["loss"] == pytest.approx(total / count, rel=1e-4)
    assert last["bound_bits_per_token"] == pytest.approx(total / count / np.log(2), rel=1e-4)


def hidden_rows(
    rank: int, world: int, weights: dict[str, Tensor], row: dict[str, Any], block: int | None
) -> tuple[Tensor, Tensor, int]:
    """Last hidden states of this rank's rows, their index and the number of clean ones.

    With `block`, the clean tokens of that block are changed, and nothing else: the corrupted rows
    keep the ids that the untouched text gave them.
    """
    import dataclasses

    from megatron.core import parallel_state
    from whole import Shape, build

    from megatron_bp.attention.kernels.sdpa import Sdpa
    from megatron_bp.attention.layout import AttentionOptions, make_layout
    from megatron_bp.batch.dataset import sample_of
    from megatron_bp.batch.shard import local_batch
    from megatron_bp.diffusion.corruption import corrupt
    from megatron_bp.diffusion.objective import Objective
    from megatron_bp.sequence.plan import SequenceOptions, make_plan

    parallel_state.initialize_model_parallel(context_parallel_size=world)
    import whole

    whole.SLOT = world
    shape = Shape(SHAPE, (), vocabulary=VOCABULARY, divisible_by=128, extra={"ffn_hidden_size": 48})
    model = build(shape, ddp=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    sample = sample_of(torch.utils.data.default_collate([row]))
    plan = make_plan(sample, SequenceOptions(BLOCK, world, world))
    corruption = corrupt(sample, plan, Objective(MASK, VOCABULARY, SEED))
    batch = local_batch(sample, plan, corruption, rank)
    ids = batch.input_ids.clone()
    index = batch.index
    if block is not None:
        clean = index[: batch.num_clean].long()
        hit = torch.from_numpy(plan.block_of)[clean] == block
        ids[: batch.num_clean][hit] = (ids[: batch.num_clean][hit] + 1) % 256
        batch = dataclasses.replace(batch, input_ids=ids)
    group = parallel_state.get_context_parallel_group()
    options = AttentionOptions(Sdpa())
    layout = make_layout(plan, batch.shards, rank, [None], batch.position_ids, group, options)
    with torch.no_grad():
        hidden = model(
            ids[None],
            layout.positions[None],
            None,
            packed_seq_params=layout,
            output_processor=lambda *, hidden_states, **unused: hidden_states[:, 0],
        )
    return hidden, index, batch.num_clean


@pytest.mark.parametrize("world", [1, 2])
def test_a_clean_block_moves_later_corrupted_blocks_and_no_other(
    runs: Runs, csbp: list[dict[str, Any]], world: int
) -> None:
    weights = runs.weights("csbp", 6)
    row = run_ranks(1, validation_rows, str(runs.prefix))[0][0]
    document = row["document"].tolist()
    block = oracle.block_of(document, BLOCK)
    position = oracle.corrupted_rows(document, BLOCK)

    def corrupted(changed: int | None) -> dict[int, Tensor]:
        out = {}
        for hidden, index, clean in run_ranks(world, hidden_rows, weights, row, changed):
            places = index[clean:].tolist()
            out.update(dict(zip(places, hidden[clean:].double(), strict=True)))
        return out

    before = corrupted(None)
    assert len(before) == len(position)
    for changed in (0, 1, max(block) // 2, max(block)):
        after = corrupted(changed)
        of_changed = document[block.index(changed)]
        for place, i in enumerate(position):
            moved = (after[place] - before[place]).abs().max().item()
            if document[i] == of_changed and block[i] > changed:
                assert moved > 1e-6, f"block {block[i]} does not see clean block {changed}"
            else:
                assert moved == 0, f"block {block[i]} sees clean block {changed}"
