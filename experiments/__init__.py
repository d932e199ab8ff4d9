"""Experiments: training runs and measurements built on the JAX implementation."""

import os

# JAX's Cholesky and triangular solves on a CPU are OpenBLAS's, whose threads spin against XLA's:
# on busy cores many small ones took a hundred times longer than with one thread each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
