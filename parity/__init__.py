"""Holds the JAX optimizers to the Megatron reference, event by event."""
