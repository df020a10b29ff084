"""Shape files: a model and a step for the planner alone, also of models that cannot be trained yet.

    model:
      name: some model
      hidden: 2816
      vocabulary: 262144          # padded
      tied: true                  # the rest may be left out: norm_vectors: 1, bias: false
    layers:                       # groups, one after the other, all of them `repeat` times
      repeat: 5
      groups:
        - times: 5
          attention: {query_heads: 16, key_heads: 8, head_dim: 256, window: 1024}
          mlp: {width: 2112, experts: 128, top_k: 8, expert_width: 704}
        - mixer: {made: 16480, inner: 6144}   # something else than softmax attention, see below
          mlp: {width: 2112}
    task:
      length: 262144
      sequence: {block_size: 256}
      precision: {model: 2, gradient: 4, optimizer: 12}   # bytes; this is the default

Fields are those of `Attention`, `Mlp`, `Task` and `SequenceOptions`, whose docstrings say what they
mean. A mixer makes `made` numbers of a row of the hidden size, and a row of it of `inner` numbers;
its parameters are (made + inner) x hidden.
"""

import dataclasses
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Precision, Task
from megatron_bp.sequence.units import SequenceOptions

# Of these there is at least one.
POSITIVE = (
    *("hidden", "vocabulary", "norm_vectors", "query_heads", "key_heads", "head_dim", "window"),
    *("made", "inner", "length", "global_batch"),
)

# Of the layout, not of the file.
DEGREES = ("block_parallel_size", "context_parallel_size", "align_chunks")


class ShapeFileError(ValueError):
    """What is wrong with a shape file: the file, the place, the rule and the way out."""


@dataclasses.dataclass(frozen=True)
class _Model:
    name: str
    hidden: int
    vocabulary: int
    tied: bool
    norm_vectors: int = 1
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class _Mixer:
    made: int
    inner: int


@dataclasses.dataclass(frozen=True)
class _Step:
    length: int
    global_batch: int = 1
    distributed_optimizer: bool = True
    scored: float = 0.5
    passes: Literal["one", "two"] = "one"
    sharded_gradients: bool = False
    fused: bool = True


def is_shape_file(path: Path) -> bool:
    """Whether a YAML file looks like one: it has sections of which run configs have none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    layers = content.get("layers") if isinstance(content, dict) else None
    return isinstance(layers, dict) and "groups" in layers


def read_shape(path: Path) -> Shape:
    """The model of a file.

    Raises:
        ShapeFileError: it cannot be read, or something in it is missing, unknown or means nothing.
    """
    return _shape(_content(path), path)


def read_task(path: Path) -> Task:
    """The model and the step of a file; a row's linear work follows from the shape.

    Raises:
        ShapeFileError: as for `read_shape`.
    """
    content = _content(path)
    shape = _shape(content, path)
    section = dict(_section(content, "task", f"{path}: task"))
    where = f"{path}: task"
    sequence = {"row_cost": row_cost(shape)} | _section(section, "sequence", f"{where}: sequence")
    for name in DEGREES:
        if name in sequence:
            raise ShapeFileError(
                f"{where}: sequence: {name}: is the planner's to choose; leave it out"
            )
    precision = section.pop("precision", {})
    del section["sequence"]
    step = _made(_Step, section, where)
    try:
        return Task(
            shape=shape,
            sequence=_made(SequenceOptions, sequence, f"{where}: sequence"),
            precision=_made(Precision, precision, f"{where}: precision"),
            **vars(step),
        )
    except ShapeFileError:
        raise
    except ValueError as error:
        raise ShapeFileError(f"{where}: {error}") from error


def row_cost(shape: Shape) -> int:
    """Linear work of a row in visible pairs, the mean over layers; 0 if none has attention."""
    widths = [
        layer.attention.query_heads * layer.attention.head_dim
        for layer in shape.layers
        if layer.attention is not None
    ]
    linear = 2 * sum(shape.active_parameters(layer) for layer in shape.layers)
    return round(linear / (4 * sum(widths))) if widths else 0


def _content(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapeFileError(
            f"{path}: cannot be read ({error.strerror}); check the path"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ShapeFileError(f"{path}: is not valid YAML: {error}") from error
    allowed = ("model", "layers", "task", "source")
    if not isinstance(content, dict) or not set(content) <= set(allowed):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ShapeFileError(
            f"{path}: has {found}; a shape file has the sections {', '.join(allowed)}"
        )
    return content


def _section(content: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict):
        raise ShapeFileError(f"{where}: must be a mapping of names to values; it is {value!r}")
    return value


def _shape(content: dict[str, Any], path: Path) -> Shape:
    model = _made(_Model, _section(content, "model", f"{path}: model"), f"{path}: model")
    section = _section(content, "layers", f"{path}: layers")
    where = f"{path}: layers"
    groups = section.get("groups")
    if not isinstance(groups, list) or not groups or set(section) - {"repeat", "groups"}:
        raise ShapeFileError(
            f"{where}: must have `groups`, a list, and may have `repeat`; it has {sorted(section)}"
        )
    layers: list[Layer] = []
    for number, group in enumerate(groups):
        layers += _group(group, model.hidden, f"{where}: group {number}")
    repeat = _times(section.get("repeat", 1), f"{where}: repeat")
    return Shape(layers=tuple(layers) * repeat, **vars(model))


def _group(group: Any, hidden: int, where: str) -> list[Layer]:
    if not isinstance(group, dict) or set(group) - {"times", "attention", "mixer", "mlp"}:
        raise ShapeFileError(
            f"{where}: must have `mlp`, and `attention` or `mixer`, and may have `times`; it is "
            f"{group!r}"
        )
    if ("attention" in group) == ("mixer" in group):
        raise ShapeFileError(f"{where}: must have either `attention` or `mixer`; give one of them")
    attention, mixer = None, 0
    if "attention" in group:
        attention = _made(Attention, group["attention"], f"{where}: attention")
        if attention.query_heads % attention.key_heads:
            raise ShapeFileError(
                f"{where}: attention: {attention.query_heads} query heads cannot share "
                f"{attention.key_heads} key heads evenly; make the one a multiple of the other"
            )
    else:
        inner = _made(_Mixer, group["mixer"], f"{where}: mixer")
        mixer = hidden * (inner.made + inner.inner)
    mlp = _made(Mlp, group.get("mlp"), f"{where}: mlp")
    if mlp.experts and not (0 < mlp.top_k <= mlp.experts and mlp.expert_width):
        raise ShapeFileError(
            f"{where}: mlp: {mlp.experts} experts of width {mlp.expert_width}, of which a row "
            f"passes {mlp.top_k}: give expert_width, and top_k from 1 to their number"
        )
    if not mlp.experts and (mlp.top_k or mlp.expert_width):
        raise ShapeFileError(
            f"{where}: mlp: top_k {mlp.top_k} and expert_width {mlp.expert_width} of no experts: "
            f"give their number, or leave these out"
        )
    return [Layer(attention, mlp, mixer)] * _times(group.get("times", 1), f"{where}: times")


def _times(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShapeFileError(f"{where}: {value!r}: must be a whole number, at least 1")
    return value


def _made[T](kind: type[T], values: Any, where: str) -> T:
    """A value of a dataclass, each field of the kind that it says."""
    assert dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    if not isinstance(values, dict):
        raise ShapeFileError(f"{where}: must be a mapping of {', '.join(fields)}; it is {values!r}")
    for name in values:
        if name not in fields:
            raise ShapeFileError(f"{where}: {name}: is not known; there are {', '.join(fields)}")
    for name in needed:
        if name not in values:
            raise ShapeFileError(f"{where}: {name} is missing; give {', '.join(needed)}")
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ShapeFileError(f"{where}: {name}: {value!r}: {_rule(hints[name])}")
        if name in POSITIVE and value == 0:
            raise ShapeFileError(f"{where}: {name}: 0: must be at least 1")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (UnionType, Union):
        return any(_fits(value, one) for one in get_args(hint))
    if hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, hint)


def _rule(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"must be one of {', '.join(map(str, get_args(hint)))}"
    if hint in (bool, str):
        return {bool: "must be true or false", str: "must be a text"}[hint]
    return "must be a number, not below 0" + (" (a whole one)" if hint is not float else "")
