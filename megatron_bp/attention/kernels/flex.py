"""FlexAttention (arXiv 2412.05496): any intervals, and head dimensions that FlashAttention lacks.

The block mask is written down in closed form from the intervals: O(rows + tiles), nothing of size
rows x keys. Forward is the public function. Backward is the operator's own, called directly with
the final output and log-sum-exp of all parts: it computes P = exp(score - lse) and
dS = P (dO.V - rowsum(dO * out)) from what it is given, so that it returns this part's exact share,
and the part is not recomputed; before torch 2.13 it is. On a CPU both run eagerly with all scores
built: for tests alone.
"""

# Shapes: n rows, K keys, Q query heads, H key heads, D head dimension, M row tiles, N key tiles.

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from megatron_bp.attention.merge import merge_into

TILE = 128
RECOMPILE_LIMIT = 64
# Since torch 2.13 a direct call of the backward operator makes its own graphs of what it is given.
DIRECT = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 13)


class TileMap(NamedTuple):
    """bool[M, N] each: tiles some of whose pairs are visible, and tiles all of whose are."""

    partial: NDArray[np.bool_]
    full: NDArray[np.bool_]


def tile_map(lo: NDArray[np.int32], hi: NDArray[np.int32], keys: int, tile: int = TILE) -> TileMap:
    """Which tiles of `tile` rows x `tile` keys are visible, of rows that see keys [lo, hi).

    A tile that reaches past the last row or key is never full: its mask is what hides the rest.

    Args:
        lo: int32[n], as is hi; no row without a key.
        hi: see lo.
        keys: K.
        tile: rows and keys of a tile.
    """
    rows = len(lo)
    height, width = -(-rows // tile), -(-keys // tile)
    row_tile = np.arange(rows) // tile
    # A row touches tiles [lo // tile, ceil(hi / tile)): count where such runs begin and end.
    steps = np.zeros((height, width + 1), dtype=np.int32)
    np.add.at(steps, (row_tile, lo // tile), 1)
    np.add.at(steps, (row_tile, -(-hi // tile)), -1)
    touched = np.cumsum(steps, axis=1)[:, :width] > 0
    # All rows of a tile see keys [max lo, min hi).
    starts = np.arange(0, rows, tile)
    full_lo = -(-np.maximum.reduceat(lo, starts) // tile)
    full_hi = np.minimum.reduceat(hi, starts) // tile
    column = np.arange(width)
    full = (column >= full_lo[:, None]) & (column < full_hi[:, None])
    full[rows // tile :] = False  # the last row tile, if it is cut short
    return TileMap(touched & ~full, full)


def block_mask(
    lo: NDArray[np.int32], hi: NDArray[np.int32], keys: int, device: torch.device
) -> BlockMask:
    """The BlockMask of rows that see keys [lo, hi) of `keys`, with the tables of both directions.

    Equal to what create_block_mask makes by evaluating every pair.
    """
    low, high = torch.from_numpy(lo).to(device), torch.from_numpy(hi).to(device)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= low[row]) & (key < high[row])

    def table(tiles: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
        count, which = (torch.from_numpy(x).to(device)[None, None] for x in _ordered(tiles))
        return count, which

    partial, full = tile_map(lo, hi, keys)
    tables = (*table(partial), *table(full), *table(partial.T), *table(full.T))
    return BlockMask((len(lo), keys), *tables, BLOCK_SIZE=(TILE, TILE), mask_mod=visible)


def _ordered(tiles: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How many tiles of each line are set, int32[M], and which, ascending, then zeros [M, N]."""
    count = tiles.sum(axis=1, dtype=np.int32)
    line, place = np.nonzero(tiles)
    first = np.cumsum(count) - count
    which = np.zeros(tiles.shape, dtype=np.int32)
    which[line, np.arange(len(line)) - first[line]] = place
    return count, which


class Spec(NamedTuple):
    """The block mask over the first `keys` keys, behind which nobody sees any."""

    mask: BlockMask
    keys: int


@dataclass(frozen=True)
class Flex:
    """The kernel.

    Attributes:
        name: as in --attention-kernel.
        backend: FlexAttention's BACKEND: TRITON, or FLASH (FlashAttention-4).
        direct: whether torch compiles a direct call of the backward operator.
    """

    name: str = "flex"
    backend: str = "TRITON"
    direct: bool = DIRECT

    def prepare(self, lo: NDArray[np.int32], hi: NDArray[np.int32], device: torch.device) -> Spec:
        """See contract.Kernel, as for the other two."""
        keys = int(hi.max())
        return Spec(block_mask(lo, hi, keys, device), keys)

    def forward(
        self,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        spec: Spec,
        scale: float,
        out_nQD: Tensor,
        lse_nQ: Tensor,
    ) -> None:
        """Merge this part into out_nQD and lse_nQ."""
        q, k, v = (_heads_first(x) for x in (q_nQD, k_KHD[: spec.keys], v_KHD[: spec.keys]))
        run = _runner(_forward, q_nQD.device)
        out_1QnD, lse_1Qn = run(q, k, v, spec.mask, scale, self.backend)
        merge_into(out_nQD, lse_nQ, out_1QnD[0].transpose(0, 1), lse_1Qn[0].mT)

    def backward(
        self,
        dout_nQD: Tensor,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        out_nQD: Tensor,
        lse_nQ: Tensor,
        spec: Spec,
        scale: float,
        dq_nQD: Tensor,
        dk_KHD: Tensor,
        dv_KHD: Tensor,
    ) -> None:
        """Add this part's share to dq_nQD, dk_KHD and dv_KHD."""
        keys = spec.keys
        q, k, v = (_heads_first(x) for x in (q_nQD, k_KHD[:keys], v_KHD[:keys]))
        out, dout, lse = _heads_first(out_nQD), _heads_first(dout_nQD), lse_nQ.mT[None].contiguous()
        grads = _direct if self.direct else _recomputed
        dq, dk, dv = grads(q, k, v, out, lse, dout, spec.mask, scale, self.backend)
        dq_nQD += dq[0].transpose(0, 1)
        dk_KHD[:keys] += dk[0].transpose(0, 1)
        dv_KHD[:keys] += dv[0].transpose(0, 1)


def _heads_first(x_nQD: Tensor) -> Tensor:
    """A view [1, Q, n, D] of [n, Q, D], which autograd does not follow."""
    return x_nQD.detach().transpose(0, 1)[None]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Output [1, Q, n, D] and log-sum-exp [1, Q, n] in natural units, from [1, Q, n, D]."""
    options = cast(FlexKernelOptions, {"BACKEND": backend})
    out, aux = flex_attention(
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse


def _same(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """A score_mod that changes nothing."""
    return score


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    mask: BlockMask,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, shaped as q, k and v; lse in the operator's units."""
    options = {
        "BACKEND": backend,
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }
    # Without a joint graph the operator makes it from _same; its type does not tell so.
    operator = cast(Any, flex_attention_backward)
    dq, dk, dv, _ = operator(
        q, k, v, out, lse, dout, None, _same, None, mask.as_tuple(), scale, options, (), ()
    )
    return dq, dk, dv


def _direct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    mask: BlockMask,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from the operator; lse in natural units."""
    # The operator's log-sum-exp is in log2, but for FLASH's; on a CPU it is always in log2.
    if not (backend == "FLASH" and q.is_cuda):
        lse = lse / math.log(2.0)
    run = _runner(_backward, q.device)
    grads: tuple[Tensor, Tensor, Tensor] = run(q, k, v, out, lse, dout, mask, scale, backend)
    return grads


def _recomputed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    mask: BlockMask,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by autograd through the part, computed again; lse in natural units.

    The part's output o and log-sum-exp l enter the final ones with the weight w = exp(l - lse), so
    that their gradients are w dout and w (dout.o - dout.out).
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        part, part_lse = _runner(_forward, q.device)(*leaves, mask, scale, backend)
        weight = torch.exp(part_lse.detach() - lse)
        wide = dout.to(weight.dtype)
        dlse = weight * (wide * (part.detach() - out)).sum(-1)
        dpart = (weight[..., None] * wide).to(part.dtype)
        dq, dk, dv = torch.autograd.grad((part, part_lse), leaves, (dpart, dlse))
    return dq, dk, dv


def _runner(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function as it runs on `device`: compiled on CUDA, as it is on a CPU."""
    return function if device.type == "cpu" else _compiled(function)


@cache
def _compiled(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """The function compiled whole: never the eager form, which builds all scores.

    Row and key counts differ between micro-batches. Dynamo makes them symbols once it has seen two,
    but compiles again where one of them is 1, and would give up after a few of those.
    """
    compiled = torch.compile(function, fullgraph=True, backend=backend)

    def run(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled(*args)

    return run
