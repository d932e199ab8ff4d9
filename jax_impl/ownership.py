"""Who updates what: work spread evenly over devices, the same on every process."""

import heapq
import math
from collections.abc import Sequence

from jax_impl.newton_schulz import Coefficients, gram_segments, step_coefficients

# Operations per number that are no products: moment, decay, update. Where these are all there is,
# only ratios between parameters count.
ELEMENTWISE = 8


def balance(costs: Sequence[float], owners: int, *, at_most: int | None = None) -> list[int]:
    """Returns the owner of each item, so that no owner has much more than its share of the cost.

    The costliest item first, each to the owner with the least so far (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969): the largest share is at most 4/3 of the best one.
    Equal costs go by position, equal owners by number, and sums are exact: every process that
    knows the costs comes to the same result.

    Args:
      costs: of each item, 0 or more.
      owners: how many there are.
      at_most: the most items that one owner can have, e.g. a device's slots; None: any number.

    Raises:
      ValueError: no owner, a cost that is negative or not finite, or more items than fit.
    """
    if owners < 1:
        raise ValueError(f"owners is {owners}; at least 1 is needed")
    if at_most is not None and len(costs) > owners * at_most:
        raise ValueError(f"{len(costs)} items do not fit {owners} owners of at most {at_most}")
    for i, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"costs[{i}] is {cost}; it must be finite and not negative")
    given: list[list[float]] = [[] for _ in range(owners)]
    result = [0] * len(costs)
    heap = [(0.0, owner) for owner in range(owners)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        _, owner = heapq.heappop(heap)
        result[i] = owner
        given[owner].append(costs[i])
        if at_most is None or len(given[owner]) < at_most:
            heapq.heappush(heap, (math.fsum(given[owner]), owner))
    return result


def update_cost(shape: Sequence[int], coefficients: Coefficients | None = None) -> int:
    """Floating-point operations of one update of a parameter of one adapter.

    For a matrix, Muon's in Gram form; for anything else the elementwise ones.

    Args:
      shape: (m, n), or any other.
      coefficients: of the iteration; None: the defaults of `newton_schulz`.
    """
    size = math.prod(shape)
    if len(shape) != 2:
        return ELEMENTWISE * size
    coefficients = coefficients or step_coefficients(5, "quintic")
    small = min(shape)
    large, cubes = gram_products(coefficients)
    return size * (ELEMENTWISE + 2 * small * large) + 2 * cubes * small**3


def gram_products(coefficients: Coefficients) -> tuple[int, int]:
    """How many products the Gram form makes: (with the long side, of r x r matrices alone)."""
    segments = gram_segments(coefficients)
    # Of a segment's k steps: each squares G, the later ones multiply Q, the earlier ones update G.
    return 2 * len(segments), sum(4 * len(segment) - 3 for segment in segments)
