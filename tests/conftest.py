"""The test bed: 8 simulated CPU devices, whatever accelerators and plugins the machine has."""

import os

DEVICES = 8
COUNT_FLAG = "--xla_force_host_platform_device_count"

# Before JAX is imported, and in the environment, so that subprocesses have it too.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # An installed libtpu asks the cloud which TPU this is.
if COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COUNT_FLAG}={DEVICES}".lstrip()

import hypothesis
import jax
import pytest

# A plugin may have imported JAX before: it has then read JAX_PLATFORMS, but not yet XLA_FLAGS.
jax.config.update("jax_platforms", "cpu")

# Flax and optax run with this (2026-11-30: jax 0.10.2 and 0.12.0.1, flax 0.12.8 and 0.12.12). They
# do not with jax_numpy_dtype_promotion="strict": optax.adamw multiplies a float by an int32 count,
# and Flax's norms, masked attention, LoRA and recurrent cells mix bfloat16 with float32.
# jax_default_matmul_precision stays as users have it: no bit changes on CPU, but the programs that
# the tests compile for a TPU or a GPU would.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Reproducible where nobody can rerun the failure by hand; new examples everywhere else.
hypothesis.settings.register_profile(
    "jfsdp",
    deadline=None,
    max_examples=25,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jfsdp")


def pytest_configure() -> None:
    """Stops a run that would test something else than 8 CPU devices."""
    devices = jax.devices()
    if len(devices) != DEVICES or devices[0].platform != "cpu":
        raise pytest.UsageError(
            f"jfsdp's tests need {DEVICES} CPU devices; JAX has {devices} with "
            f"XLA_FLAGS={os.environ['XLA_FLAGS']!r}.\n"
            f"1. Unset XLA_FLAGS, or take {COUNT_FLAG} out of it.\n"
            "2. If it is right, something used JAX before tests/conftest.py: look for a pytest "
            "plugin or a `-p` option that does (`pytest --trace-config` lists them)."
        )
