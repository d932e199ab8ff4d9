"""Real English text as byte tokens, from the standard library: the same on every machine."""

import functools
import zlib
from pydoc_data.topics import topics

import numpy as np


def batch(seed: int, index: int, n_samples: int, seq_length: int, tenant: str = "") -> np.ndarray:
    """Returns ``n_samples`` windows of the text, drawn for this seed, event index and tenant.

    Returns:
        int64 (n_samples, seq_length + 1), each a byte: inputs are ``[:, :-1]``, targets
        ``[:, 1:]``.
    """
    tokens = _tokens()
    rng = np.random.default_rng([seed, index, zlib.crc32(tenant.encode())])
    starts = rng.integers(0, len(tokens) - seq_length, size=n_samples)
    return tokens[starts[:, None] + np.arange(seq_length + 1)]


@functools.cache
def _tokens() -> np.ndarray:
    """The Python manual's topics, as pydoc prints them, one after the other; int64."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
