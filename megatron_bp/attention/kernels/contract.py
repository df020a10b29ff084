"""What a kernel is: attention of some rows over one contiguous run of keys, merged into a result.

A kernel adds to what other parts of the same attention left: `forward` merges its part into a
running (out, lse); `backward`, given the *final* out and lse of all parts, adds this part's exact
share to the gradients. What it needs to know of who sees whom it prepares once, on the host.
"""

# Shapes: n rows, K keys, Q query heads, H key heads (query head h reads key head h * H // Q),
# D head dimension.

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Kernel(Protocol):
    """One implementation of attention over a part.

    Tensors may be strided views, dense in D alone. Running results and gradients are of the
    accumulation dtype; inputs of the model's.
    """

    @property
    def name(self) -> str:
        """As in --attention-kernel."""
        ...

    def prepare(self, lo: NDArray[np.int32], hi: NDArray[np.int32], device: torch.device) -> Any:
        """What the calls below take as `spec`, of rows that see the keys [lo_i, hi_i), none empty.

        Args:
            lo: int32[n].
            hi: int32[n].
            device: where the calls will be.
        """
        ...

    def forward(
        self,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        spec: Any,
        scale: float,
        out_nQD: Tensor,
        lse_nQ: Tensor,
    ) -> None:
        """Merge attention over these keys into out_nQD and lse_nQ, in place.

        A row that has met no key yet has out 0 and lse -inf; lse is in natural units.
        """
        ...

    def backward(
        self,
        dout_nQD: Tensor,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        out_nQD: Tensor,
        lse_nQ: Tensor,
        spec: Any,
        scale: float,
        dq_nQD: Tensor,
        dk_KHD: Tensor,
        dv_KHD: Tensor,
    ) -> None:
        """Add this part's share to dq_nQD, dk_KHD and dv_KHD, in place.

        Args:
            dout_nQD: gradient of the final output, in the model's dtype.
            q_nQD: as in `forward`, as are the next two.
            k_KHD: see there.
            v_KHD: see there.
            out_nQD: final output of all parts, in the model's dtype.
            lse_nQ: final log-sum-exp of all parts, in the accumulation dtype.
            spec: as in `forward`.
            scale: as in `forward`.
            dq_nQD: what other parts left, as do the next two.
            dk_KHD: see there.
            dv_KHD: see there.
        """
        ...
