"""SHA-256 of what is written to disk, by which damage is seen."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def array_digest(x: np.ndarray) -> str:
    """Of dtype, shape and bytes."""
    head = f"{x.dtype.name}{list(x.shape)}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(x).tobytes()).hexdigest()


def digest(record: Mapping[str, Any]) -> str:
    """Of what JSON can hold, in one way of writing it."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
