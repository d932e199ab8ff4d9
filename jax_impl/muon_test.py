import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.config import OptimizerConfig
from jax_impl.muon import MuonState, muon, own_sizes, scale_factor
from jax_impl.newton_schulz import step_coefficients
from jax_impl.per_slot import per_slot
from jax_impl.testing import assert_same_bits, relative_error
from jax_impl.weight_decay import METHODS

HIGHEST = dict(fp32_matmul_prec="highest")
SHAPES = {"wide": (4, 10), "tall": (10, 4), "square": (5, 5)}


def matrices(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def newton_schulz64(x, steps=5, kind="quintic"):
    if x.shape[0] > x.shape[1]:
        return newton_schulz64(x.T, steps, kind).T
    x = x / max(np.linalg.norm(x), 1e-7)
    for a, b, c in step_coefficients(steps, kind):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon64(p, m, g, *, lr, wd, momentum, nesterov, method="decoupled", scale="spectral", extra=1.0):
    """One step in float64: the new parameter and the new momentum."""
    p, m, g = (np.asarray(x, np.float64) for x in (p, m, g))
    if method == "l2":
        g = g + wd * p
    old = p
    p = p - {"decoupled": lr * wd, "independent": wd, "palm": lr**2 * wd, "l2": 0.0}[method] * old
    m = momentum * m + (1 - momentum) * g
    u = (1 - momentum) * g + momentum * m if nesterov else m
    rows, columns = p.shape
    factor = {
        "shape_scaling": max(1, rows / columns) ** 0.5,
        "spectral": max(rows, columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }[scale]
    return p - lr * factor * extra * newton_schulz64(u), m


def assert_follows_float64(tx, steps=3, **settings):
    """Runs ``tx`` and `muon64` side by side, each step from the same state."""
    params = jax.tree.map(jnp.asarray, matrices(0))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(steps):
        grads = matrices(t + 1)
        updates, new_state = update(grads, state, params)
        new = optax.apply_updates(params, updates)
        for k in params:
            p, m = muon64(params[k], state.momentum_buffer[k], grads[k], **settings)
            # The iteration multiplies rounding (6e-8) by about a hundred.
            assert relative_error(new[k] - params[k], p - np.asarray(params[k], float)) < 2e-5, k
            assert relative_error(new_state.momentum_buffer[k], m) < 2e-7, k
        params, state = new, new_state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_weight_decay_methods(method, nesterov):
    # lr * wd is large, so that decaying the new parameter, or the momentum, would show.
    settings = dict(wd=0.9, momentum=0.8, nesterov=nesterov)
    tx = muon(
        0.5,
        weight_decay=0.9,
        momentum=0.8,
        nesterov=nesterov,
        weight_decay_method=method,
        **HIGHEST,
    )
    assert_follows_float64(tx, lr=0.5, method=method, **settings)


@pytest.mark.parametrize("scale", ["shape_scaling", "spectral", "unit_rms_norm"])
@pytest.mark.parametrize("ns_method", ["gram", "standard"])
def test_scale_modes_and_extra_factor(scale, ns_method):
    tx = muon(0.1, scale_mode=scale, extra_scale_factor=0.2, ns_method=ns_method, **HIGHEST)
    settings = dict(wd=0.01, momentum=0.95, nesterov=False)
    assert_follows_float64(tx, lr=0.1, scale=scale, extra=0.2, **settings)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 2), (2.0, 8**0.5, 2.0)), ((2, 8), (1.0, 8**0.5, 0.5)), ((4, 4), (1.0, 2.0, 1.0))],
)
def test_scale_factor(shape, expected):
    for mode, value in zip(("shape_scaling", "spectral", "unit_rms_norm"), expected, strict=True):
        assert scale_factor(*shape, mode) == value
        assert jnp.allclose(scale_factor(*map(jnp.float32, shape), mode), value, rtol=1e-7)


def test_defaults_are_the_configs():
    config = OptimizerConfig()
    params = jax.tree.map(jnp.asarray, matrices(0))
    explicit = muon(
        0.1,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_decay=config.weight_decay,
        fp32_matmul_prec="medium",
        coefficient_type="quintic",
        num_ns_steps=5,
        scale_mode="spectral",
    )
    ours, theirs = (tx.update(matrices(1), tx.init(params), params) for tx in (muon(0.1), explicit))
    assert_same_bits(ours, theirs)
    assert config.muon_momentum == 0.95 and config.muon_nesterov is False


def test_hyperparameters_given_anew_are_those_of_construction():
    params = jax.tree.map(jnp.asarray, matrices(0))
    given = dict(learning_rate=0.3, weight_decay=0.7, momentum=0.6)
    fixed = muon(**given, nesterov=True, **HIGHEST)
    late = muon(nesterov=True, **HIGHEST)
    state = MuonState(jax.tree.map(jnp.asarray, matrices(2)))
    expected = fixed.update(matrices(1), state, params)
    assert_same_bits(late.update(matrices(1), state, params, **given), expected)
    other = muon(9.0, weight_decay=9.0, momentum=0.1, nesterov=True, **HIGHEST)
    assert_same_bits(other.update(matrices(1), state, params, **given), expected)


def test_slots_have_hyperparameters_of_their_own():
    tx = per_slot(muon(**HIGHEST))
    pool = jax.tree.map(lambda *x: jnp.stack(x), *map(matrices, range(3)))
    grads = jax.tree.map(lambda *x: jnp.stack(x), *map(matrices, range(3, 6)))
    lr, wd = jnp.asarray([0.1, 0.0, 0.3]), jnp.asarray([0.0, 0.5, 0.9])

    @jax.jit
    @chex.assert_max_traces(n=1)
    def update(lr, wd, momentum):
        return tx.update(
            grads, tx.init(pool), pool, learning_rate=lr, weight_decay=wd, momentum=momentum
        )

    for momentum in (0.9, 0.5):
        updates, state = update(lr, wd, momentum)
        for i in range(3):
            for k in SHAPES:
                p, m = muon64(
                    pool[k][i],
                    0 * pool[k][i],
                    grads[k][i],
                    lr=float(lr[i]),
                    wd=float(wd[i]),
                    momentum=momentum,
                    nesterov=False,
                )
                moved = np.asarray(pool[k][i], float) + np.asarray(updates[k][i], float)
                assert relative_error(moved, p) < 2e-5
                assert relative_error(state.momentum_buffer[k][i], m) < 3e-7


def test_zero_gradients_and_padding_give_exact_zeros():
    params = {"zero": jnp.zeros((4, 10)), "padded": jnp.zeros((10, 4))}
    grads = {"zero": jnp.zeros((4, 10)), "padded": jnp.ones((10, 4)).at[:, 2:].set(0.0)}
    for precision in ("highest", "medium"):
        tx = muon(0.1, weight_decay=0.1, fp32_matmul_prec=precision)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert not updates["zero"].any() and not updates["padded"][:, 2:].any()
        assert updates["padded"][:, :2].all()


def test_rank_aware_scales_by_the_adapters_own_rank():
    tx = per_slot(muon(1.0, weight_decay=0.0, scale_mode="unit_rms_norm", rank_aware=True))
    plain = per_slot(muon(1.0, weight_decay=0.0, scale_mode="unit_rms_norm"))
    grads = {"a": jnp.ones((2, 4, 9)), "b": jnp.ones((2, 9, 4))}
    rank = jnp.asarray([1, 4])
    ours, _ = tx.update(grads, tx.init(grads), grads, rank=rank)
    padded, _ = plain.update(grads, plain.init(grads), grads)
    np.testing.assert_allclose(ours["a"], padded["a"] * jnp.sqrt(rank / 4)[:, None, None], 1e-6)
    np.testing.assert_allclose(ours["b"], padded["b"] * jnp.sqrt(4 / rank)[:, None, None], 1e-6)
    with pytest.raises(ValueError, match="rank_aware needs"):
        tx.update(grads, tx.init(grads), grads)
    assert own_sizes((4, 9), 2, (4, 9)) == (2, 9) and own_sizes((9, 4), 2, (9, 4)) == (9, 2)
    # Two of three rows of a matrix that is tall as a whole, and a shard of half the rank.
    assert own_sizes((2, 4), 3, (6, 4)) == (2, 3) and own_sizes((2, 9), 3, (4, 9)) == (1.5, 9)


def test_bfloat16_parameters_keep_float32_momentum():
    params = {"w": jnp.ones((3, 4), jnp.bfloat16)}
    tx = muon(0.1)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16 and state.momentum_buffer["w"].dtype == jnp.float32
    # 0.05 * 1 is kept with its digits, which bfloat16 does not have
    np.testing.assert_allclose(state.momentum_buffer["w"], 0.05, rtol=1e-6)


def test_float64_under_x64():
    with jax.enable_x64(True):
        params = {k: jnp.asarray(v, jnp.float64) for k, v in matrices(0).items()}
        grads = {k: jnp.asarray(v, jnp.float64) for k, v in matrices(1).items()}
        tx = muon(0.5, weight_decay=0.5, **HIGHEST)
        updates, state = tx.update(grads, tx.init(params), params)
        for k in params:
            settings = dict(lr=0.5, wd=0.5, momentum=0.95, nesterov=False)
            p, m = muon64(params[k], 0 * params[k], grads[k], **settings)
            assert relative_error(params[k] + updates[k], p) < 1e-13
            assert relative_error(state.momentum_buffer[k], m) < 1e-15


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(scale_mode="spectrum"), "scale_mode is 'spectrum'"),
        (dict(weight_decay_method="l1"), "weight_decay_method is 'l1'"),
        (dict(coefficient_type="quartic"), "coefficient_type is 'quartic'"),
        (dict(num_ns_steps=0), "steps is 0"),
        (dict(coefficient_type="custom"), "custom_coefficients"),
    ],
)
def test_construction_names_the_argument(kwargs, message):
    with pytest.raises(ValueError, match=message):
        muon(0.1, **kwargs)


def test_errors_of_init_and_update():
    params = {"w": jnp.ones((3, 4))}
    tx = muon()
    with pytest.raises(ValueError, match=r"params\['b'\] has shape \(4,\)"):
        tx.init({**params, "b": jnp.ones(4)})
    with pytest.raises(ValueError, match="learning_rate is missing"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params), learning_rate=0.1)
