"""``python -m experiments.soak``: weeks of a pool's life in minutes, crashes included."""
