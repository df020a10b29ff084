"""Shape files: what is read, what is refused, and the sizes of the models that come with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.shape_file import (
    ShapeFileError,
    is_shape_file,
    read_shape,
    read_task,
    row_cost,
)
from megatron_bp.planning.task import Precision, Task
from megatron_bp.sequence.plan import SequenceOptions

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "configs" / "shapes"

TEXT = """
model: {name: small, hidden: 8, vocabulary: 16, tied: true}
layers:
  repeat: 2
  groups:
    - times: 2
      attention: {query_heads: 4, key_heads: 2, head_dim: 2, window: 5}
      mlp: {width: 3}
    - mixer: {made: 10, inner: 6}
      mlp: {width: 0, experts: 4, top_k: 2, expert_width: 5, gated: false}
task:
  length: 64
  global_batch: 3
  scored: 1
  sequence: {block_size: 4, score_clean: all}
  precision: {optimizer: 8}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "shape.yaml"
    path.write_text(text)
    return path


def test_a_file_is_a_task(tmp_path: Path) -> None:
    attends = Layer(Attention(4, 2, 2, 5), Mlp(3))
    mixes = Layer(None, Mlp(0, 4, 2, 5, gated=False), mixer=8 * 16)
    shape = Shape("small", 8, 16, True, (attends, attends, mixes) * 2)
    path = written(tmp_path, TEXT)
    assert read_shape(path) == shape
    # 2 x (8 x (8 + 8) + 8 x 8 + 3 x 8 x 3 = 264) and 128 + 2 x 8 x 10 + 4 x 8 = 320 a repeat:
    # 2 x 848 / (4 x 2 x 8) = 26.5
    assert row_cost(shape) == 26
    assert read_task(path) == Task(
        shape=shape,
        sequence=SequenceOptions(4, score_clean="all", row_cost=26),
        length=64,
        global_batch=3,
        precision=Precision(2, 4, 8),
        scored=1,
    )
    assert is_shape_file(path)
    assert not is_shape_file(ROOT / "configs" / "quickstart.yaml")
    assert not is_shape_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden: 8, ", "", "model: hidden is missing"),
        ("hidden: 8", "hidden: big", "model: hidden: 'big': must be a number"),
        ("tied: true", "tied: 1", "tied: 1: must be true or false"),
        ("name: small", "name: 3", "name: 3: must be a text"),
        ("vocabulary", "vocab", "model: vocab: is not known; there are name, hidden"),
        ("repeat: 2", "repeat: 0", "layers: repeat: 0: must be a whole number, at least 1"),
        ("times: 2", "times: yes", "group 0: times: True: must be a whole number"),
        ("width: 3", "width: -3", "group 0: mlp: width: -3: must be a number, not below 0"),
        ("window: 5", "windows: 5", "attention: windows: is not known"),
        ("window: 5", "window: far", "attention: window: 'far'"),
        ("key_heads: 2", "key_heads: 3", "4 query heads cannot share 3 key heads"),
        ("mixer:", "mixing:", "group 1: must have `mlp`, and `attention` or `mixer`"),
        ("- mixer: {made: 10, inner: 6}", "- times: 1", "either `attention` or `mixer`"),
        ("top_k: 2", "top_k: 5", "of which a row passes 5"),
        ("mlp: {width: 3}", "times: 2", "mlp: must be a mapping of width"),
        ("  groups:", "  group:", "layers: must have `groups`"),
        ("task:", "tasks:", "has the sections model, layers, task"),
        ("length: 64", "longer: 64", "task: longer: is not known"),
        ("sequence: {block_size: 4, score_clean: all}", "", "task: sequence: must be a mapping"),
        ("score_clean: all", "score_clean: most", "'most': must be one of none, supervised, all"),
        ("block_size: 4", "block_size: 0", "the diffusion block size must be at least 1"),
        ("score_clean: all", "align_chunks: true", "align_chunks: is the planner's to choose"),
        ("optimizer: 8", "optimiser: 8", "precision: optimiser: is not known"),
        ("hidden: 8", "hidden: 0", "model: hidden: 0: must be at least 1"),
        ("key_heads: 2", "key_heads: 0", "attention: key_heads: 0: must be at least 1"),
        ("window: 5", "window: 0", "attention: window: 0: must be at least 1"),
        ("length: 64", "length: 0", "task: length: 0: must be at least 1"),
        ("global_batch: 3", "global_batch: 0", "task: global_batch: 0: must be at least 1"),
        ("scored: 1", "scored: 2", "task: scored: 2: is a part of the rows; give 0 to 1"),
        ("scored: 1", "scored: .inf", "task: scored: inf: is a part of the rows"),
        ("optimizer: 8", "model: 3", "task: precision: model: 3 bytes: must be 2, 4 or 8"),
        ("experts: 4, ", "", "mlp: top_k 2 and expert_width 5 of no experts"),
        ("layers:", "layers: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TEXT
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(ShapeFileError) as caught:
        read_task(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_and_one_that_is_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ShapeFileError, match="cannot be read"):
        read_shape(tmp_path / "none.yaml")
    with pytest.raises(ShapeFileError, match="has list"):
        read_shape(written(tmp_path, "[1, 2]"))


# Parameters in billions, as published: rounded or cut (the 8B's 8.49 is given as 8.4), so good to
# one of the last digit. A layer more or less would be 0.1 to 0.8.
@pytest.mark.parametrize(
    ("name", "published", "digit"),
    [
        ("nemotron_3b", 3.83, 0.01),
        ("nemotron_8b", 8.4, 0.1),
        ("nemotron_14b", 13.5, 0.1),
        ("diffusion_gemma_26b_a4b", 25.2, 0.1),
        ("qwen3_8_27b", 27, 1),
    ],
)
def test_shapes_have_the_published_sizes(name: str, published: float, digit: float) -> None:
    shape = read_shape(SHAPES / f"{name}.yaml")
    assert abs(shape.parameters / 1e9 - published) < digit
    assert read_task(SHAPES / f"{name}.yaml").length == 262_144


def test_active_parameters_of_diffusion_gemma_are_about_4_billion() -> None:
    """A4B: what a row passes, the embedding's table once, as the output."""
    shape = read_shape(SHAPES / "diffusion_gemma_26b_a4b.yaml")
    active = sum(map(shape.active_parameters, shape.layers)) + shape.embedding_parameters
    assert 3.5 <= active / 1e9 < 4.5


def test_every_shape_file_is_tested() -> None:
    assert len(list(SHAPES.glob("*.yaml"))) == 5
    assert all(is_shape_file(path) for path in SHAPES.glob("*.yaml"))


def test_reading_needs_no_megatron() -> None:
    code = (
        "import sys\nfrom megatron_bp.planning import shape_file, traffic\n"
        "sys.exit('megatron.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
