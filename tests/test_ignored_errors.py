"""What `ignored_params` refuses, and the texts."""

from typing import Any

import pytest
from flax import nnx
from helpers import make_mesh, shard_refused
from models import MLP, LoRA, Stack

import jfsdp


def test_glob_that_matches_nothing_lists_what_is_there():
    text = shard_refused(ValueError, LoRA(nnx.Rngs(0)), ignored_params="lora.*")
    assert text == (
        "ignored_params='lora.*' matches no parameter of LoRA. It has parameters of the types LoRAParam, "
        "Param, at the paths layer.bias, layer.kernel, layer.lora.lora_a, layer.lora.lora_b."
    )


def test_type_that_matches_nothing_lists_the_types():
    text = shard_refused(ValueError, MLP(nnx.Rngs(0)), ignored_params=[nnx.LoRAParam])
    assert text.startswith(
        "ignored_params=LoRAParam matches no parameter of MLP. It has parameters of the"
    )


WRONG = {"module class": nnx.Linear, "number": 3, "None in a list": ["**.bias", None]}


@pytest.mark.parametrize("selector", WRONG.values(), ids=WRONG)
def test_what_selects_nothing_it_could_is_refused(selector):
    text = shard_refused(TypeError, MLP(nnx.Rngs(0)), ignored_params=selector)
    assert text.startswith(
        "ignored_params takes a Variable type such as nnx.LoRAParam, a glob over"
    )


@pytest.mark.parametrize("several", [False, True])
def test_variable_itself_is_refused(several):
    model = MLP(nnx.Rngs(0))
    given: Any = [model.fc1.kernel] if several else model.fc1.kernel
    assert "or several of them, got Param(" in shard_refused(TypeError, model, ignored_params=given)


def test_parameter_of_an_earlier_unit_is_refused():
    mesh, model = make_mesh(fsdp=8), Stack(2, 16, nnx.Rngs(0))
    jfsdp.shard(model.blocks[1], mesh)
    text = shard_refused(ValueError, model, mesh, ignored_params="blocks.*.linear.kernel")
    assert text == (
        "blocks.1.linear.kernel (shape (16, 16)) is selected by ignored_params, but an earlier jfsdp.shard "
        "has sharded it. Give ignored_params to that call."
    )


def test_same_selector_for_inner_and_outer_unit_is_fine():
    mesh, model = make_mesh(fsdp=8), Stack(2, 16, nnx.Rngs(0))
    for block in model.blocks:
        jfsdp.shard(block, mesh, ignored_params="**.kernel")
    jfsdp.shard(model, mesh, ignored_params="**.kernel")
    assert len(jfsdp.plan(model).ignored) == 2


def test_own_spec_that_does_not_divide_is_refused():
    model = MLP(nnx.Rngs(0))
    model.fc2.kernel.set_metadata("out_sharding", (None, "fsdp"))
    text = shard_refused(ValueError, model, ignored_params="fc2.*")
    assert text.startswith(
        "fc2.kernel: its own PartitionSpec shards dimension 1 of shape (32, 10) over fsdp=8"
    )
