"""Merging attention over disjoint key sets by log-sum-exp.

With parts (o_j, l_j) over disjoint keys, l = logsumexp_j l_j and o = sum_j exp(l_j - l) o_j.
Feeding the final (o, l) to each part's backward gives that part's exact gradients (FlashAttention,
arXiv 2205.14135, section 3.1; ring attention, arXiv 2310.01889).
"""

# Shapes: n rows, Q query heads, D head dimension.

import torch
from torch import Tensor


def merge_into(out_nQD: Tensor, lse_nQ: Tensor, part_nQD: Tensor, part_lse_nQ: Tensor) -> None:
    """Merge a part into the running result of the same rows, in place.

    A row that has met no key yet has out 0 and lse -inf. The part's rows all have keys.
    """
    new_lse_nQ = torch.logaddexp(lse_nQ, part_lse_nQ.to(lse_nQ.dtype))
    weight_nQ1 = torch.exp(part_lse_nQ - new_lse_nQ)[..., None]
    out_nQD.lerp_(part_nQD.to(out_nQD.dtype), weight_nQ1)
    lse_nQ.copy_(new_lse_nQ)
