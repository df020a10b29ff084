"""Plans, and what follows from them alone, made once for equal layouts.

Rows of one text of full length all have one layout; an evaluation reads the same samples again; the
draws of noise are no part of it. A plan that is shared is one object, so whatever is derived from
it can be kept with it (`once`). Its arrays are read-only.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan

_DERIVED: WeakKeyDictionary[SequencePlan, dict[Hashable, Any]] = WeakKeyDictionary()


class PlanCache:
    """The plans of the layouts that were read last."""

    def __init__(self, options: SequenceOptions, entries: int = 8) -> None:
        """Start empty.

        Args:
            options: what plans are made with.
            entries: plans that are kept; of 256K tokens each takes about 10 MB.
        """
        self._options, self._entries = options, entries
        self._plans: OrderedDict[tuple[bytes, ...], SequencePlan] = OrderedDict()

    def plan(
        self,
        sample: Sample,
        make: Callable[[Sample, SequenceOptions], SequencePlan] = make_plan,
    ) -> SequencePlan:
        """The plan of a sample: the same object for samples whose documents and spans are the same.

        Args:
            sample: the packed row.
            make: makes a plan that is not there; what it raises is not kept.
        """
        layout = (sample.document, sample.position, sample.supervised)
        key = tuple(array.tobytes() for array in layout)
        if key not in self._plans:
            self._plans[key] = frozen(make(sample, self._options))
            if len(self._plans) > self._entries:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]


def once[T](plan: SequencePlan, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns, made once for a plan and a key, and kept as long as the plan."""
    derived = _DERIVED.setdefault(plan, {})
    if key not in derived:
        derived[key] = frozen(make())
    value: T = derived[key]
    return value


def frozen[T](value: T) -> T:
    """The value itself; its numpy arrays, and those of dataclasses in it, are read-only now."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            frozen(getattr(value, field.name))
    return value
