"""What is installed: the version, the type marker, and the names that a user sees."""

import importlib.resources
import pathlib
import tomllib
import types

import jfsdp


def test_version_is_that_of_pyproject():
    pyproject = tomllib.loads(
        pathlib.Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    )
    assert jfsdp.__version__ == pyproject["project"]["version"], "install jfsdp again"


def test_package_is_marked_as_typed():
    assert importlib.resources.files("jfsdp").joinpath("py.typed").is_file()


def test_every_name_in_all_exists():
    assert [name for name in jfsdp.__all__ if not hasattr(jfsdp, name)] == []


def test_every_public_name_is_in_all():
    """Python sets each imported submodule as an attribute: those alone may be left out."""
    exposed = {name for name in vars(jfsdp) if not name.startswith("_")}
    submodules = {
        name
        for name in exposed
        if isinstance(value := getattr(jfsdp, name), types.ModuleType)
        and value.__name__ == f"jfsdp.{name}"
    }
    assert exposed - submodules <= set(jfsdp.__all__)
