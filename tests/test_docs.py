"""The examples in jfsdp's docstrings run, and print what they say."""

import doctest
import importlib
import inspect
import pkgutil
import types

import pytest

import jfsdp


def modules() -> list[str]:
    """All of jfsdp's, but those that run something when they are imported."""
    found = [info.name for info in pkgutil.walk_packages(jfsdp.__path__, "jfsdp.")]
    return ["jfsdp", *(name for name in found if not name.endswith("__main__"))]


def examples(module: types.ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("name", modules())
def test_examples_of_the_module_run(name):
    failures: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples(importlib.import_module(name)):
        runner.run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize(
    "name",
    [
        "DataParallelMeshDims",
        "MixedPrecisionPolicy",
        *("auto_partitioning", "init", "init_optimizer", "inspect"),
        *("offload_by_budget", "shard", "shard_batch", "shardings", "unshard"),
    ],
)
def test_main_names_have_an_example_that_runs(name):
    assert doctest.DocTestFinder(recurse=False).find(getattr(jfsdp, name))[0].examples


@pytest.mark.parametrize("name", jfsdp.__all__)
def test_every_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(jfsdp, name))


@pytest.mark.parametrize(
    "name", [name for name in jfsdp.__all__ if inspect.isfunction(getattr(jfsdp, name))]
)
def test_every_argument_of_a_public_function_is_documented(name):
    function = getattr(jfsdp, name)
    text = inspect.getdoc(function)
    parameters = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    written = [f"{stars.get(p.kind, '')}{p.name}:" for p in parameters]
    assert [argument for argument in written if f"\n    {argument}" not in text] == []
