"""Document: the unit that data sources yield.

Knows nothing of packing, blocks, noise or ranks.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Document:
    """One document, or one piece of a document that a data source cut.

    Attributes:
        tokens: int32[n], token ids.
        supervised: bool[n], True where a token may be corrupted and scored.
        key: stable in its data set whatever the order, packing or number of ranks; the noise of
            this document is keyed by it.
        bytes: UTF-8 bytes of its text; NaN where the data does not tell. Of a piece of a document,
            the document's bytes in proportion to its tokens.
    """

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    key: int
    bytes: float = math.nan
