import pytest

from experiments.pool import Tenant
from experiments.roster import Roster

TENANTS = tuple(
    Tenant(name, "source", optimizer, batch_size=4, num_steps=steps)
    for name, optimizer, steps in [
        ("a", "adamw", 2),
        ("b", "adamw", 1),
        ("c", "adamw", 1),
        ("d", "muon", 3),
    ]
)


def test_tenants_come_in_order_and_leave_when_they_are_done():
    roster, log = Roster(TENANTS, ("adamw", "muon", "adamw")), []
    while not roster.done:
        for slot, tenant in roster.arrivals():
            log.append((tenant.name, "to", slot))
        for slot in roster.advance(rows=2):
            log.append((roster.seated[slot].name, "from", slot))
            roster.leave(slot)
    assert log == [
        ("a", "to", 0), ("d", "to", 1), ("b", "to", 2),
        ("b", "from", 2), ("c", "to", 2),
        ("a", "from", 0), ("c", "from", 2),
        ("d", "from", 1),
    ]  # fmt: skip


def test_batches_follow_each_tenants_own_position():
    roster = Roster(TENANTS[:1], ("adamw", "adamw"))
    list(roster.arrivals())
    first = roster.batch(2, 8)
    roster.advance(2)
    second = roster.batch(2, 8)
    assert first.samples.tolist() == second.samples.tolist() == [2, 0]
    assert (first.tokens[:2] != second.tokens[:2]).any()
    assert not second.tokens[2:].any()


def test_a_tenant_nobody_can_serve_is_an_error():
    with pytest.raises(ValueError, match="d: no slot has the optimizer 'muon'"):
        Roster(TENANTS, ("adamw",))
