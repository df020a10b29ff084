"""The order of verify's steps: configs, refusals, reference, layouts, comparison."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_bp.tools.verify import compare, report
from megatron_bp.tools.verify.configuration import Values, of_a_few_steps, of_layout
from megatron_bp.tools.verify.launch import Launch, LaunchError
from megatron_bp.tools.verify.order import CONFIG, FACTS, GRADIENTS, METRICS, Order
from megatron_bp.tools.verify.report import Verdict
from megatron_bp.tools.verify.sample_data import has_data, with_sample_data
from megatron_bp.tools.verify.shrink import shrink
from megatron_bp.tools.verify.stored import StoredTensors
from megatron_bp.tools.verify.topology import Topology

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is to be verified.

    Attributes:
        values: the config, file and flags together.
        layouts: to be certified.
        reference: what they are compared with.
        folder: work folder; layouts leave their configs, logs and gradients in it.
        steps: training steps.
        tiny: shrink the config, and make data if there is none.
        timeout: seconds for one layout.
        most_ranks: what `launch` can run at once; None where there is no bound.
    """

    values: Values
    layouts: tuple[Topology, ...]
    reference: Topology
    folder: Path
    steps: int = 3
    tiny: bool = False
    timeout: float = 1800.0
    most_ranks: int | None = None


class PlanError(ValueError):
    """What cannot be verified: the layout, the rule and the way out."""


def verify(plan: Plan, launch: Launch, say: Say = print) -> list[Verdict]:
    """A verdict on the reference and on each layout.

    Raises:
        ValueError: nothing was started, as a layout is refused.
        LaunchError: the reference did not run.
    """
    values = _values(plan, say)
    references = _references(plan, bool(values.get("bf16")))
    runs = [*references, *((t.name, t) for t in plan.layouts)]
    _write_configs(plan, values, runs)
    weights = plan.folder / "weights"
    verdicts: list[Verdict] = []
    base: list[tuple[Verdict, compare.Run]] = []
    for place, (name, topology) in enumerate(runs):
        folder = _folder(plan, name)
        is_reference = place < len(references)
        Order(str(weights), make=place == 0, steps=plan.steps).write(folder)
        try:
            launch(folder, topology.world, plan.timeout)
        except LaunchError as error:
            if is_reference:
                raise LaunchError(f"{name}: {error}", error.refused) from error
            verdict = Verdict(name, failures=(str(error),), refused=error.refused)
        else:
            verdict, run = _read(name, folder)
            verdict = _judge(verdict, run, base)
            if is_reference:
                base.append((verdict, run))
        say(report.told(verdict))
        verdicts.append(verdict)
    return verdicts


def _values(plan: Plan, say: Say) -> Values:
    """The config that every layout shares."""
    values = of_a_few_steps(plan.values, plan.steps)
    if plan.tiny:
        values, changed = shrink(values, (plan.reference, *plan.layouts))
        say(f"--tiny: {', '.join(changed)}")
        if values.get("chats") or not has_data(values):
            values = with_sample_data(values, plan.folder)
            why = "few chats fit so small a row" if values.get("chats") else "its data is not there"
            say(f"--tiny: {why}; made a little of this package's source")
    values.setdefault("global_batch_size", 1)
    values.setdefault("data_cache_path", str(plan.folder / "cache"))
    return values


def _references(plan: Plan, bf16: bool) -> list[tuple[str, Topology]]:
    """In fp32 always: that is the truth. In 16 bits too, if a layout is: that is its budget."""
    layouts = (plan.reference, *plan.layouts)
    low = any(bf16 if t.bf16 is None else t.bf16 for t in layouts)
    names = ["reference", *(["reference in bf16"] if low else [])]
    return [
        (name, dataclasses.replace(plan.reference, bf16=bool(place) if low or bf16 else None))
        for place, name in enumerate(names)
    ]


def _write_configs(plan: Plan, values: Values, runs: Sequence[tuple[str, Topology]]) -> None:
    """Write a config for each layout, and refuse what pretrain_bdlm.py would refuse.

    Raises:
        PlanError: with every layout that is refused.
    """
    from megatron_bp import arguments

    refused = []
    for name, topology in runs:
        folder = _folder(plan, name)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            own = of_layout(values, topology)
            (folder / CONFIG).write_text(yaml.safe_dump({"layout": own}), encoding="utf-8")
            arguments.resolve([str(folder / CONFIG)], topology.world)
        except (ValueError, NotImplementedError) as error:
            refused.append(f"{name}: {error}")
        if plan.most_ranks is not None and topology.world > plan.most_ranks:
            refused.append(
                f"{name}: needs {topology.world} GPUs, and this machine has {plan.most_ranks}; "
                f"start the ranks elsewhere with --launch, or use --tiny with fewer"
            )
    if refused:
        raise PlanError("\n".join(refused))


def _folder(plan: Plan, name: str) -> Path:
    return plan.folder / "layouts" / name.replace(" ", "-")


def _read(name: str, folder: Path) -> tuple[Verdict, compare.Run]:
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    run = compare.Run(
        StoredTensors(folder / GRADIENTS), rows, facts["vocabulary"], facts["padded_vocabulary"]
    )
    return Verdict(name, facts, rows, failures=report.replica_failures(facts)), run


def _judge(
    verdict: Verdict, run: compare.Run, base: Sequence[tuple[Verdict, compare.Run]]
) -> Verdict:
    """Compare with the fp32 reference; a 16-bit layout within the 16-bit reference's budget."""
    if not base:
        return verdict
    want = base[0][1]
    if not verdict.facts["bf16"]:
        gradients = compare.compare_gradients(run, want)
        steps = compare.compare_steps(run.rows, want.rows)
    elif len(base) == 1:  # the 16-bit reference itself: what it errs is the budget
        gradients = compare.compare_gradients(run, want, lambda name: compare.BF16_MOST_GRADIENT)
        steps = compare.compare_steps(run.rows, want.rows, lambda name: compare.BF16_MOST_STEP)
    else:
        measured = base[1][0]
        assert measured.gradients is not None
        assert measured.steps is not None
        gradients = compare.compare_gradients(
            run, want, compare.bf16_gradient_tolerance(measured.gradients)
        )
        steps = compare.compare_steps(
            run.rows, want.rows, compare.bf16_step_tolerance(measured.steps)
        )
    failures = (*verdict.failures, *steps.failures, *gradients.failures)
    return dataclasses.replace(verdict, gradients=gradients, steps=steps, failures=failures)
