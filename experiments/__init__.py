"""Experiments: training runs and measurements built on the JAX implementation."""
