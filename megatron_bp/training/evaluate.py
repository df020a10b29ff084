"""What an evaluation says: the mean of the validation loss and its standard error.

When the loss is a bound on the text's negative log-likelihood, in bits per token and per byte too.
Pure functions of per-sample sums; the same on every layout.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over samples, with its standard error; both in nats.

    Attributes:
        mean: sum of losses / sum of counts.
        error: standard error of the mean over samples (NaN for a single sample).
        samples: independent samples.
        draws: noise draws of each.
    """

    mean: float
    error: float
    samples: int
    draws: int


def estimate(sums: Tensor, counts: Tensor, draws: int) -> Estimate:
    """The ratio estimate of sum(sums) / sum(counts).

    Draws of one sample are averaged first, since samples and not draws are independent texts. The
    error is the linearised one of a ratio (Cochran, Sampling Techniques, 2.11).

    Args:
        sums: float64[draws * samples], loss sum of each sample, draw after draw.
        counts: float64[draws * samples], what divides it.
        draws: noise draws.
    """
    by_sample = sums.view(draws, -1).mean(0)
    count = counts.view(draws, -1).mean(0)
    whole = count.sum().item()
    if whole == 0:
        return Estimate(0.0, math.nan, len(count), draws)
    mean = by_sample.sum().item() / whole
    n = len(count)
    if n < 2:
        return Estimate(mean, math.nan, n, draws)
    residual = by_sample - mean * count
    error = math.sqrt((residual**2).sum().item() * n / (n - 1)) / whole
    return Estimate(mean, error, n, draws)


def as_row(samples: Tensor, draws: int, is_bound: bool) -> dict[str, Any]:
    """The evaluation as fields of a JSON row.

    Args:
        samples: float64[draws * samples, 3]: loss sum, count and bytes of text of each sample; NaN
            bytes where the data does not tell.
        draws: noise draws of each sample.
        is_bound: the loss bounds the negative log-likelihood.
    """
    of_tokens = estimate(samples[:, 0], samples[:, 1], draws)
    row: dict[str, Any] = {
        "samples": of_tokens.samples,
        "draws": draws,
        "standard_error": _or_none(of_tokens.error),
    }
    if not is_bound or samples[:, 1].sum() == 0:
        return row
    row["bound_bits_per_token"] = of_tokens.mean / math.log(2)
    row["bound_bits_per_token_error"] = _or_none(of_tokens.error / math.log(2))
    if not torch.isnan(samples[:, 2]).any() and samples[:, 2].sum() > 0:
        of_bytes = estimate(samples[:, 0], samples[:, 2], draws)
        row["bound_bits_per_byte"] = of_bytes.mean / math.log(2)
        row["bound_bits_per_byte_error"] = _or_none(of_bytes.error / math.log(2))
    return row


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
