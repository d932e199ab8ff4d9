"""Our configuration beside Megatron's."""

import dataclasses

from jax_impl.config import OptimizerConfig


def test_defaults_are_megatrons():
    from megatron.core.optimizer import OptimizerConfig as Megatron

    theirs = {f.name: f.default for f in dataclasses.fields(Megatron)}
    ours = {f.name: f.default for f in dataclasses.fields(OptimizerConfig)}
    assert ours.keys() - theirs.keys() == {
        "weight_decay_method",
        "custom_coefficients",
        "ns_method",
        "rank_aware",
        "embedding_or_output_parameters",
        "qkv_split_shapes",
        "tensor_model_parallel_size",
        "partition_dim",
    }
    shared = ours.keys() & theirs.keys()
    assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}
