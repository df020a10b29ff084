"""tools.verify on real runs: layouts pass, planted faults do not, the reference is the oracle's."""

import math
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import yaml
from faults import plant
from launch import make_data
from ranks import RankError, run_ranks
from torch import Tensor

from megatron_bp.tools.verify.launch import LaunchError
from megatron_bp.tools.verify.report import Verdict
from megatron_bp.tools.verify.run import Plan, PlanError, verify
from megatron_bp.tools.verify.stored import StoredTensors
from megatron_bp.tools.verify.topology import parse_topology

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PADDED = {"vocab_size": 300, "make_vocab_size_divisible_by": 128}
AR = {"ar_loss_weight": 0.5, "clean_relation": "token"}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}
# Faults, the layout that has to notice each, and flags beside quickstart's.
FAULTS = [
    ("noise keyed by rank", "bp=2", {}),
    ("gradient not reduced", "dp=2", {}),
    ("one replica steps aside", "dp=2", {}),
    ("loss of a clean row counted by every replica", "bp=2,cp=1", AR),
    ("padded ids in a TP rank's softmax", "tp=2", PADDED),
    ("auxiliary losses scaled by local rows", "bp=2", EXPERTS),
]


def layout_on_rank(rank: int, world: int, folder: str, fault: str | None) -> None:
    """One rank of verify's worker, with a fault."""
    sys.path.insert(0, str(ROOT))
    from megatron_bp.tools.verify.worker import main

    with plant(fault, rank) if fault is not None else nullcontext():
        main([folder])


@dataclass
class Verification:
    """Runs of verify that share a folder, and so the reference, which is never given a fault."""

    folder: Path
    data: list[str]
    more: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def run(self, topologies: Iterable[str], fault: str | None = None) -> list[Verdict]:
        def launch(folder: Path, ranks: int, timeout: float) -> None:
            reference = folder.name.startswith("reference")
            if reference and (folder / "facts.json").exists():
                return
            for stale in ("gradients", "facts.json", "metrics.jsonl"):
                path = folder / stale
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            planted = None if reference else fault
            try:
                run_ranks(ranks, layout_on_rank, str(folder), planted, timeout=timeout, fresh=True)
            except RankError as error:
                raise LaunchError(str(error)) from error

        content = yaml.safe_load(QUICKSTART.read_text())
        values = {name: v for section in content.values() for name, v in section.items()}
        plan = Plan(
            values=values | {"data_path": self.data, "split": "100,0,0"} | self.more,
            layouts=tuple(parse_topology(t) for t in topologies),
            reference=parse_topology("dp=1"),
            folder=self.folder,
            tiny=True,
            timeout=120,
        )
        return verify(plan, launch, self.said.append)


Verifications = Callable[[dict[str, Any]], Verification]


@pytest.fixture(scope="module")
def verifications(tmp_path_factory: pytest.TempPathFactory) -> Verifications:
    """The Verification of quickstart with these flags; one each, so that the reference is kept."""
    made: dict[str, Verification] = {}
    data = [make_data(tmp_path_factory.mktemp("data"))[-1]]

    def of(more: dict[str, Any]) -> Verification:
        if str(more) not in made:
            made[str(more)] = Verification(tmp_path_factory.mktemp("verify"), data, more)
        return made[str(more)]

    return of


@pytest.fixture(scope="module")
def quickstart(verifications: Verifications) -> Verification:
    return verifications({})


def assert_passed(verdicts: Sequence[Verdict]) -> None:
    reference, *layouts = verdicts
    assert reference.passed
    for verdict in layouts:
        assert verdict.failures == (), verdict.name
        assert verdict.gradients is not None
        assert verdict.steps is not None
        assert len(verdict.gradients.errors) + len(verdict.gradients.under_floor) == 34
        assert len(verdict.steps.loss) == 3
        assert verdict.facts["global_batch"] == reference.facts["global_batch"]


def test_layouts_pass(quickstart: Verification) -> None:
    layouts = quickstart.run(["bp=2", "bp=2,cp=1", "tp=2,sp", "pp=2,vpp=2"])
    assert_passed(layouts)
    rows = {v.name: v.facts["rows"] for v in layouts}
    assert rows["reference"] == [[60, 63]]
    assert np.sum(rows["bp=2"], axis=0).tolist() == [60, 63]
    assert rows["pp=2,vpp=2"] == [[60, 63]] * 2
    groups = layouts[2].facts["groups"]
    assert groups | {"dp": 1, "slot": 2, "clean": 1} == groups
    told = "\n".join(quickstart.said)
    assert "groups: tp=1 pp=1 dp=1 slot=2 bp=2 clean=2" in told


@pytest.mark.parametrize(("fault", "topology", "more"), FAULTS)
def test_a_planted_fault_fails(
    verifications: Verifications, fault: str, topology: str, more: dict[str, Any]
) -> None:
    reference, layout = verifications(more).run([topology], fault)
    assert reference.passed
    assert layout.facts, "the faulty layout has to run to its end, and be told by its numbers"
    assert not layout.passed


def test_a_padded_vocabulary_passes(verifications: Verifications) -> None:
    assert_passed(verifications(PADDED).run(["tp=2"]))


def first_samples(rank: int, world: int, config: str, count: int) -> list[dict[str, Any]]:
    """The first training samples of a config, and the noise that they are given."""
    sys.path.insert(0, str(ROOT))
    from megatron_bp import arguments
    from megatron_bp.batch.dataset import TRAIN, build_datasets, sample_of
    from megatron_bp.diffusion.levels import levels
    from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform

    args = arguments.parse([config])
    objective = arguments.settings(args).objective
    sizes: list[int | None] = [args.train_iters * args.global_batch_size, 0, 0]
    data = build_datasets(arguments.dataset_config(args), sizes, 0)[TRAIN]
    assert data is not None
    found = []
    for i in range(count):
        sample = sample_of(torch.utils.data.default_collate([data[i]]))
        t: list[float] = []
        u: list[float] = []
        for ordinal, key in enumerate(sample.document_keys):
            length = int((sample.document == ordinal).sum())
            noise = NoiseKey(args.seed, 0, 0, int(key), 0)
            blocks = -(-length // args.diffusion_block_size)
            t += levels(noise, blocks, objective, objective.interval).tolist()
            u += uniform(noise, Purpose.MASK, 0, length).tolist()
        u += [1.0] * (len(sample.tokens) - len(u))
        given = {"tokens": sample.tokens.tolist(), "document": sample.document.tolist()}
        found.append(given | {"t": t, "u": u})
    return found


def local_names(tensors: StoredTensors) -> dict[str, Tensor]:
    """By the names of Megatron's local spec, which the oracle reads."""
    names = {
        name: name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
            "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
        )
        for name in tensors
    }
    return {local: tensors[name] for name, local in names.items()}


def test_the_reference_is_the_oracles(quickstart: Verification) -> None:
    """Dense, float64, from tokens, documents, draws and weights alone."""
    reference, _ = quickstart.run(["bp=2"])
    folder = quickstart.folder / "layouts" / "reference"
    config = yaml.safe_load((folder / "config.yaml").read_text())["layout"]
    shape = oracle.GPTShape(
        layers=config["num_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        groups=config["num_query_groups"],
        head_dim=config["kv_channels"],
        qk_layernorm=config["qk_layernorm"],
        rotary_base=config["rotary_base"],
        tied=not config.get("untie_embeddings_and_output_weights", False),
    )
    leaves = {
        name: w.double().requires_grad_()
        for name, w in local_names(StoredTensors(quickstart.folder / "weights")).items()
    }
    wanted = local_names(StoredTensors(folder / "gradients"))
    samples = run_ranks(
        1, first_samples, str(folder / "config.yaml"), config["global_batch_size"], fresh=True
    )[0]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        bound = oracle.bound(
            leaves,
            shape,
            sample["tokens"],
            sample["document"],
            config["diffusion_block_size"],
            sample["t"],
            sample["u"],
            mask_id=config["mask_token_id"],
            vocab=config["vocab_size"],
        )
        total, count = total + bound.total, count + bound.count
    loss = total / count
    loss.backward()
    assert reference.rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert reference.rows[0]["diffusion_count"] == count
    assert wanted.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        error = (wanted[name].double() - leaf.grad).norm() / leaf.grad.norm()
        assert error < 1e-5, name
    norm = math.sqrt(sum(float(leaf.grad.norm()) ** 2 for leaf in leaves.values()))
    assert reference.rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_refused_layouts_start_nothing(quickstart: Verification) -> None:
    with pytest.raises(PlanError, match=r"(?s)bp=4,cp=3: .*divisor.*bp=3: |bp=4,cp=3: "):
        quickstart.run(["bp=4,cp=3"])
