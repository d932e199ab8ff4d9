"""Who sits in which slot: tenants wait, arrive, train for as long as they want, and leave."""

import dataclasses
from collections.abc import Iterator

from experiments.pool import Batch, Tenant, make_batch


@dataclasses.dataclass
class Roster:
    """The seating of a pool, on the host; everything but ``tenants`` and ``owners`` changes.

    Attributes:
      tenants: all that will ever train, in the order of their arrival.
      owners: (S,), each slot's optimizer; a tenant takes a slot of its own optimizer's.
      seats: (S,), the index of each slot's tenant, None where it is free.
      positions: (S,), how many samples that tenant has had.
      waiting: indices of the tenants that have not been seated yet.
    """

    tenants: tuple[Tenant, ...]
    owners: tuple[str, ...]
    seats: list[int | None] = None
    positions: list[int] = None
    waiting: list[int] = None

    def __post_init__(self):
        size = len(self.owners)
        self.seats = [None] * size if self.seats is None else self.seats
        self.positions = [0] * size if self.positions is None else self.positions
        self.waiting = list(range(len(self.tenants))) if self.waiting is None else self.waiting
        for tenant in self.tenants:
            if tenant.optimizer not in self.owners:
                raise ValueError(f"{tenant.name}: no slot has the optimizer {tenant.optimizer!r}")

    @property
    def seated(self) -> list[Tenant | None]:
        """(S,), the tenants by slot."""
        return [None if i is None else self.tenants[i] for i in self.seats]

    @property
    def done(self) -> bool:
        """Whether nobody is left."""
        return not self.waiting and all(i is None for i in self.seats)

    def arrivals(self) -> Iterator[tuple[int, Tenant]]:
        """Seats whom it can, and yields (slot, tenant) of each."""
        for slot, owner in enumerate(self.owners):
            fitting = [i for i in self.waiting if self.tenants[i].optimizer == owner]
            if self.seats[slot] is None and fitting:
                self.seats[slot], self.positions[slot] = fitting[0], 0
                self.waiting.remove(fitting[0])
                yield slot, self.tenants[fitting[0]]

    def batch(self, rows: int, length: int) -> Batch:
        """The next micro-batch, see `make_batch`."""
        return make_batch(self.seated, self.positions, rows, length)

    def advance(self, rows: int) -> list[int]:
        """Counts ``rows`` samples more for each; returns the slots whose tenants are through."""
        finished = []
        for slot, tenant in enumerate(self.seated):
            if tenant is not None:
                self.positions[slot] += rows
                if self.positions[slot] >= tenant.num_steps * tenant.batch_size:
                    finished.append(slot)
        return finished

    def leave(self, slot: int) -> None:
        """Frees a slot."""
        self.seats[slot] = None
