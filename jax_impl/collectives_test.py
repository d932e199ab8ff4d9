"""The reader finds every communication of a program, and its size."""

import pytest

from jax_impl.collectives import Collective, collectives, count

PROGRAM = """
  %p = f32[8,2]{1,0} parameter(0), metadata={op_name="all-reduce(x)"}
  %ar = (f32[8]{0}, f32[2,8,8]{2,1,0:T(8,128)}) all-reduce(%a, %b), channel_id=1
  %rs = bf16[3,5]{1,0} reduce-scatter(%c), dimensions={0}
  %mask = pred[7]{0} all-gather(%d), dimensions={0}
  ROOT %scalar = f64[] all-reduce(%e), to_apply=%add
  %fused = f32[8]{0} fusion(%ar), kind=kLoop, calls=%all-reduce.1
"""
ASYNC = """
  %ars = f32[4]{0} all-reduce-start(%a), to_apply=%add
  %ard = f32[4]{0} all-reduce-done(%ars)
  %ags = (f32[1,3]{1,0}, f32[8,3]{1,0}) all-gather-start(%b), dimensions={0}
  %agd = f32[8,3]{1,0} all-gather-done(%ags)
  %cps = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%c)
  %cpd = f32[2]{0} collective-permute-done(%cps)
"""


def test_kinds_shapes_and_bytes():
    assert collectives(PROGRAM) == [
        Collective("all-reduce", ((8,), (2, 8, 8)), 4 * (8 + 128)),
        Collective("reduce-scatter", ((3, 5),), 2 * 15),
        Collective("all-gather", ((7,),), 7),
        Collective("all-reduce", ((),), 8),
    ]


def test_a_communication_in_two_halves_is_one():
    assert collectives(ASYNC) == [
        Collective("all-reduce", ((4,),), 16),
        Collective("all-gather", ((8, 3),), 96),
        Collective("collective-permute", ((2,),), 8),
    ]


@pytest.mark.parametrize("dtype", ["s4", "u4"])
def test_half_bytes(dtype):
    (found,) = collectives(f"%x = {dtype}[5]{{0}} all-gather(%y)")
    assert found.bytes == 3


def test_counts_by_kind():
    assert count(collectives(PROGRAM)) == {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1}
    assert count([]) == {}
