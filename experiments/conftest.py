import jax
import pytest

DEFAULTS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_disable_most_optimizations": False,
}


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Tests here compile many small models: keep what is compiled, and optimise it less."""
    folder = str(tmp_path_factory.mktemp("jax"))
    with pytest.MonkeyPatch.context() as patch:
        # For the processes that tests start, too.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
    # The same process goes on with the tests of other folders.
    for name, value in DEFAULTS.items():
        jax.config.update(name, value)
