"""Merging attention over disjoint key sets by log-sum-exp.

With parts (o_j, l_j) over disjoint keys, l = logsumexp_j l_j and o = sum_j exp(l_j - l) o_j.
Feeding the final (o, l) to each part's backward gives that part's exact gradients (FlashAttention,
arXiv 2205.14135, section 3.1; ring attention, arXiv 2310.01889).
"""

# Shapes: H key heads, G query heads a key head, S rows, n of them, D head dimension.

import torch
from torch import Tensor

Rows = slice | Tensor


def merge_into(
    out_HGSD: Tensor, lse_HGS: Tensor, rows: Rows, part_HGnD: Tensor, part_lse_HGn: Tensor
) -> None:
    """Merge a part over some rows into the running result, in place.

    A row that has met no key yet has out 0 and lse -inf. The part's rows all have keys.
    """
    old_lse_HGn = lse_HGS[:, :, rows]
    new_lse_HGn = torch.logaddexp(old_lse_HGn, part_lse_HGn)
    weight_HGn = torch.exp(part_lse_HGn - new_lse_HGn)
    old_HGnD = out_HGSD[:, :, rows]
    out_HGSD[:, :, rows] = torch.lerp(old_HGnD, part_HGnD, weight_HGn[..., None])
    lse_HGS[:, :, rows] = new_lse_HGn
