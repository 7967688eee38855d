"""The policies: fields, defaults, frozen, normalized dtypes, and what they refuse."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jfsdp

DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


def defaults(policy: type) -> dict[str, object]:
    return {field.name: field.default for field in dataclasses.fields(policy)}


def test_mixed_precision_policy_has_the_seed_s_fields_and_defaults():
    assert defaults(jfsdp.MixedPrecisionPolicy) == {
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
        "param_dtype_override_fn": None,
    }


def test_mixed_precision_policy_takes_its_fields_by_position():
    policy = jfsdp.MixedPrecisionPolicy("bfloat16", "float32", "float16", False)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        jnp.bfloat16,
        jnp.float32,
        jnp.float16,
    )
    assert policy.cast_forward_inputs is False


def test_offload_policy_has_no_fields():
    assert defaults(jfsdp.OffloadPolicy) == {}


def test_cpu_offload_policy_pins_memory_by_default():
    assert defaults(jfsdp.CPUOffloadPolicy) == {
        "pin_memory": True,
        "parameters": True,
        "optimizer_state": True,
        "activations": (),
    }


@pytest.mark.parametrize(
    "given, text",
    [
        ({"pin_memory": "host"}, "CPUOffloadPolicy.pin_memory must be True or False, got 'host'."),
        ({"parameters": 1}, "CPUOffloadPolicy.parameters must be True or False, got 1."),
        ({"optimizer_state": None}, "CPUOffloadPolicy.optimizer_state must be True or False, got None."),
        (
            {"activations": 3},
            "CPUOffloadPolicy.activations takes names that jax.ad_checkpoint.checkpoint_name gives, got 3.",
        ),
    ],
)  # fmt: skip
def test_a_cpu_offload_policy_of_the_wrong_type_is_refused(given, text):
    with pytest.raises(TypeError) as error:
        jfsdp.CPUOffloadPolicy(**given)
    assert str(error.value) == text


def test_a_cpu_offload_policy_that_keeps_nothing_on_the_host_is_refused():
    with pytest.raises(ValueError) as error:
        jfsdp.CPUOffloadPolicy(parameters=False, optimizer_state=False)
    assert str(error.value) == (
        "CPUOffloadPolicy(parameters=False, optimizer_state=False) without activations keeps nothing on the "
        "host. Pass OffloadPolicy()."
    )


def test_one_name_of_activations_is_a_tuple_of_one():
    assert jfsdp.CPUOffloadPolicy(activations="block").activations == ("block",)


def test_cpu_offload_policy_is_an_offload_policy():
    assert issubclass(jfsdp.CPUOffloadPolicy, jfsdp.OffloadPolicy)


def test_offload_policies_are_told_apart():
    assert jfsdp.OffloadPolicy() == jfsdp.OffloadPolicy()
    assert jfsdp.CPUOffloadPolicy() != jfsdp.CPUOffloadPolicy(pin_memory=False)
    assert jfsdp.CPUOffloadPolicy() != jfsdp.OffloadPolicy()


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (jfsdp.MixedPrecisionPolicy(), "param_dtype"),
        (jfsdp.MixedPrecisionPolicy(), "cast_forward_inputs"),
        (jfsdp.CPUOffloadPolicy(), "pin_memory"),
    ],
)
def test_policies_are_frozen(policy, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, field, None)


def test_offload_policy_takes_no_new_attribute():
    with pytest.raises(dataclasses.FrozenInstanceError):
        jfsdp.OffloadPolicy().pin_memory = True


@pytest.mark.parametrize("field", DTYPE_FIELDS)
@pytest.mark.parametrize("spelling", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_dtypes_of_any_spelling_are_held_as_numpy_dtypes(field, spelling):
    held = getattr(jfsdp.MixedPrecisionPolicy(**{field: spelling}), field)
    assert isinstance(held, np.dtype)
    assert held == jnp.bfloat16


def test_policies_of_the_same_dtypes_are_equal_and_hash_equal():
    one = jfsdp.MixedPrecisionPolicy("bfloat16", np.float32)
    other = jfsdp.MixedPrecisionPolicy(jnp.bfloat16, jnp.dtype("float32"))
    assert one == other
    assert hash(one) == hash(other)


def test_replace_gives_a_new_policy():
    policy = dataclasses.replace(jfsdp.MixedPrecisionPolicy("bfloat16"), reduce_dtype="float32")
    assert policy == jfsdp.MixedPrecisionPolicy("bfloat16", "float32")


@pytest.mark.parametrize("field", DTYPE_FIELDS)
def test_what_is_no_dtype_is_refused_by_the_field_s_name(field):
    with pytest.raises(TypeError) as error:
        jfsdp.MixedPrecisionPolicy(**{field: "bf16"})
    assert f"MixedPrecisionPolicy.{field} must name a dtype such as 'bfloat16'" in str(error.value)
    assert "got 'bf16'" in str(error.value)


@pytest.mark.parametrize("field", DTYPE_FIELDS)
@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64"])
def test_dtypes_that_are_not_real_floating_are_refused(field, dtype):
    with pytest.raises(ValueError, match="real floating") as error:
        jfsdp.MixedPrecisionPolicy(**{field: dtype})
    assert f"MixedPrecisionPolicy.{field}" in str(error.value)
    assert dtype in str(error.value)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_cast_forward_inputs_must_be_a_bool(value):
    with pytest.raises(TypeError, match="cast_forward_inputs must be True or False, got"):
        jfsdp.MixedPrecisionPolicy(cast_forward_inputs=value)
