"""`Ops` of numpy's arrays."""

from __future__ import annotations

import numpy as np

maximum = np.maximum
minimum = np.minimum
sqrt = np.sqrt
ceil = np.ceil
where = np.where
