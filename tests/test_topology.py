"""Devices that are not here: their names, what they need installed, their figures."""

import importlib
import importlib.resources
import importlib.util
import os
import subprocess
import sys
import tomllib
import types
from collections import Counter
from typing import Any

import jax
import pytest
from helpers import make_mesh
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp import _compat
from jfsdp.inspect.topology import compiler_options, find_target, is_absent, target_of

module = importlib.import_module("jfsdp.inspect.topology")
TARGETS = tomllib.loads(
    importlib.resources.files("jfsdp").joinpath("inspect/targets.toml").read_text()
)

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs jfsdp[tpu-aot]"
)
needs_gpu_compiler = pytest.mark.skipif(
    not all(here for _, here in module._gpu_compiler()), reason="needs jfsdp[gpu-aot]"
)


def tpu(*values: Any) -> Any:
    return pytest.param(*values, marks=needs_tpu_compiler, id=values[0])


def gpu(*values: Any) -> Any:
    return pytest.param(*values, marks=needs_gpu_compiler, id=values[0])


def mesh_of_absent(name: str, axis_type: AxisType = AxisType.Explicit) -> Mesh:
    """A mesh as `jax.make_mesh` makes it."""
    devices = jfsdp.topology(name)
    return jax.make_mesh((len(devices),), ("fsdp",), devices=devices, axis_types=(axis_type,))


# --------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    "name, count, hosts, kind",
    [
        tpu("v4:2x2x2", 8, 2, "TPU v4"),
        tpu("v5e:1x1", 1, 1, "TPU v5 lite"),
        tpu("v5e:2x4", 8, 2, "TPU v5 lite"),
        tpu("v5e:16x16", 256, 64, "TPU v5 lite"),
        tpu("v5p:4x4x4", 64, 16, "TPU v5"),
        tpu("v5p:8x8x8", 512, 128, "TPU v5"),
        tpu("v6e:16x16", 256, 64, "TPU v6 lite"),
        gpu("a100:8", 8, 1, "NVIDIA A100-SXM4-80GB"),
        gpu("h100:1", 1, 1, "NVIDIA H100 80GB HBM3"),
        gpu("h100:8", 8, 1, "NVIDIA H100 80GB HBM3"),
        gpu("h100:64", 64, 8, "NVIDIA H100 80GB HBM3"),
        gpu("h200:8", 8, 1, "NVIDIA H200"),
        gpu("b200:8", 8, 1, "NVIDIA B200"),
    ],
)
def test_a_name_makes_that_many_devices_of_that_kind(name, count, hosts, kind):
    devices = jfsdp.topology(name)
    assert {device.device_kind for device in devices} == {kind}
    assert len(set(devices)) == len(devices) == count
    assert len({device.process_index for device in devices}) == hosts
    mesh = jax.make_mesh((count,), ("fsdp",), devices=devices)
    assert is_absent(mesh) and is_absent(devices[0])
    target = target_of(mesh)
    assert target == find_target(devices[0])
    assert target is not None
    assert (target.name, target.chips) == (name.partition(":")[0], count)


@needs_tpu_compiler
def test_two_slices_in_one_process():
    small, large = jfsdp.topology("v5e:2x4"), jfsdp.topology("v5p:4x4x4")
    assert (len(small), len(large), len(jfsdp.topology("v5e:2x4"))) == (8, 64, 8)


@pytest.mark.parametrize(
    "name, slices, each, hosts",
    [tpu("2xv5p:2x2x2", 2, 8, 2), tpu("4xv5e:2x4", 4, 8, 2), tpu("2xv4:2x2x2", 2, 8, 2)],
)
def test_several_slices_are_told_apart_by_their_index(name, slices, each, hosts):
    devices = jfsdp.topology(name)
    assert Counter(device.slice_index for device in devices) == dict.fromkeys(range(slices), each)
    assert len({device.process_index for device in devices}) == slices * hosts
    grid = create_hybrid_device_mesh(
        (1, each), (slices, 1), devices=devices, allow_split_physical_axes=True
    )
    mesh = Mesh(grid, ("slice", "chip"))
    target = target_of(mesh)
    assert is_absent(mesh)
    assert target is not None and (target.platform, target.chips) == ("tpu", slices * each)


@needs_tpu_compiler
def test_one_slice_may_be_counted():
    counted, plain = jfsdp.topology("1xv5e:2x4"), jfsdp.topology("v5e:2x4")
    assert [device.id for device in counted] == [device.id for device in plain]


def test_gpus_have_no_slices():
    with pytest.raises(ValueError, match=r"only TPUs come in slices.*'h100:16' for two"):
        jfsdp.topology("2xh100:8")


@pytest.mark.parametrize("name", ["0xv5e:2x4", "2x:2x4", "xv5e:2x4", "2xv9:2x4", "02xv5e:2x4"])
def test_a_misspelled_number_of_slices_is_refused(name):
    with pytest.raises(ValueError, match=r"no such target.*'2xv5p:4x4x4'"):
        jfsdp.topology(name)


def test_each_of_several_slices_is_one_that_there_is():
    with pytest.raises(ValueError, match="v5e has no slice 3x5"):
        jfsdp.topology("2xv5e:3x5")


@pytest.mark.parametrize("name", ["v9:2x4", "", "h100x8", "V5E:2x4"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        jfsdp.topology(name)
    for known in (*TARGETS, "'v5e:2x4'", "'h100:64'", repr(name)):
        assert known in str(error.value)


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match=r"such as 'v5e:2x4'.* got int"):
        jfsdp.topology(8)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shape", ["3x5", "", "4x2", "2x4x1", "16x32", "8", "0x0"])
def test_a_slice_that_v5e_does_not_have_is_refused_with_those_it_has(shape):
    with pytest.raises(ValueError, match=r"v5e has no slice .* 1x1, 2x2, 2x4, .*, 16x16\.$"):
        jfsdp.topology(f"v5e:{shape}")


@pytest.mark.parametrize(
    "shape", ["4x4", "4x4x6", "8x4x4", "3x4x4", "0x4x4", "04x4x4", "-4x4x4", "64x64x64", "axbxc"]
)
def test_a_slice_that_v5p_does_not_have_is_refused_with_the_rule(shape):
    with pytest.raises(ValueError, match=r"2x2x1, .*multiples of 4.*4x4x8.*8960 chips"):
        jfsdp.topology(f"v5p:{shape}")


@pytest.mark.parametrize("count", ["0", "12", "-8", "", "eight", "8.0", "2x4"])
def test_a_number_of_gpus_that_fills_no_hosts_is_refused(count):
    with pytest.raises(ValueError, match=r"1 to 8 .*multiple of 8.*'h100:8', 'h100:64'"):
        jfsdp.topology(f"h100:{count}")


# --------------------------------------------------------------------------------------------------
# What is installed, and the environment


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ImportError, match=r"libtpu(.|\n)*pip install 'jfsdp\[tpu-aot\]'"):
        jfsdp.topology("v5e:2x4")


def test_without_the_cuda_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_cuda12_plugin", None)
    monkeypatch.setitem(sys.modules, "jax_cuda13_plugin", None)
    monkeypatch.setattr(module, "_has_ptxas", lambda: True)
    with pytest.raises(ImportError, match=r"CUDA plugin, not(.|\n)*install 'jfsdp\[gpu-aot\]'"):
        jfsdp.topology("h100:8")


def test_without_ptxas_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module, "_has_ptxas", lambda: False)
    with pytest.raises(ImportError, match=r"ptxas(.|\n)*pip install 'jfsdp\[gpu-aot\]'"):
        jfsdp.topology("h100:8")


def test_ptxas_is_looked_for_in_its_package_on_path_and_in_toolkits(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").touch()
    assert module._has_ptxas()


@needs_tpu_compiler
def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "mine")
    before = dict(os.environ)
    with module._environment_of_libtpu():
        assert os.environ["TPU_ACCELERATOR_TYPE"] == "mine"
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert dict(os.environ) == before


def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own; None takes a variable out of its environment."""
    merged = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={key: value for key, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )


HOLD = """
import jfsdp, subprocess, sys
try: jfsdp.topology("v5e:2x4")
except RuntimeError as error: print(error)
if len(sys.argv) == 1: subprocess.run([sys.executable, *sys.orig_argv[1:], "second"])
"""


@pytest.mark.slow
@needs_tpu_compiler
def test_another_process_that_holds_libtpu_is_named_with_the_remedy():
    told = run(HOLD, ALLOW_MULTIPLE_LIBTPU_LOAD="0").stdout
    assert "another process has loaded libtpu and holds its lock file" in told
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD=1" in told


@pytest.mark.slow
@needs_tpu_compiler
def test_two_processes_share_libtpu_unless_told_otherwise():
    done = run(HOLD, ALLOW_MULTIPLE_LIBTPU_LOAD=None)
    assert (done.returncode, done.stdout) == (0, "")


UNSET = """
import jax, jfsdp
from jfsdp.inspect.topology import compiler_options
{before}
mesh = jax.make_mesh((8,), ("x",), devices=jfsdp.topology("h100:8"))
print(jax.devices()[0].platform)
x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(mesh, jax.P("x")))
key = jax.eval_shape(lambda: jax.random.key(0))
lowered = jax.jit(lambda x, key: x.sum() + jax.random.normal(key)).lower(x, key)
print(lowered.compile(compiler_options=compiler_options(mesh)).memory_analysis() is not None)
"""


GPU_WITHOUT_LIBRARIES = """
import jax._src.hardware_utils
jax._src.hardware_utils.has_visible_nvidia_gpu = lambda: True
"""


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    "before",
    ["", "print(jax.devices())", GPU_WITHOUT_LIBRARIES],
    ids=["topology first", "jax.devices() first", "GPU without libraries"],
)
def test_gpus_are_compiled_for_where_jax_platforms_is_unset(before):
    done = run(UNSET.format(before=before), JAX_PLATFORMS=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["cpu", "True"]
    assert before or "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------
# Private JAX: when one of these fails, that part of jfsdp/_compat.py is no longer needed


@needs_gpu_compiler
def test_jax_still_refuses_to_lower_for_gpus_that_are_not_here():
    _compat.let_gpus_be_absent()
    patched: Any = importlib.import_module("jax._src.xla_bridge").canonicalize_platform
    with pytest.raises(RuntimeError, match="Unknown backend"):
        patched._jfsdp_original("gpu")
    assert patched("gpu") == "cuda"
    _compat.let_gpus_be_absent()
    assert importlib.import_module("jax._src.xla_bridge").canonicalize_platform is patched
    with pytest.raises(RuntimeError):
        jax.devices("gpu")


@needs_gpu_compiler
def test_jax_still_gives_the_cuda_plugin_up_without_cuda_libraries():
    done = run(
        "from jax.experimental import topologies\n"
        "try: topologies.get_topology_desc(platform='cuda', topology_name='cuda')\n"
        "except NotImplementedError as error: print(error)\n",
        JAX_PLATFORMS=None,
    )
    if "jax_plugins.xla_cuda" not in done.stderr:
        pytest.skip("CUDA's libraries are here")
    assert done.stdout == "topology not implemented for cuda\n"


# --------------------------------------------------------------------------------------------------
# Figures


FIGURES = {"memory", "usable_memory", "peak_flops", "link_bandwidth", "links", "torus_dims",
           "network_bandwidth", "kinds"}  # fmt: skip
SOURCES = {"memory", "usable_memory", "peak_flops", "interconnect", "network_bandwidth"}
OF_PLATFORM = {
    "tpu": ({"shapes"}, {"shapes"}),
    "gpu": ({"devices_per_host", "xla", "xla_memory"}, {"xla"}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_figure_is_there_and_has_a_source(name):
    known = TARGETS[name]
    figures, sources = OF_PLATFORM[known["platform"]]
    assert all(known[figure] or figure == "torus_dims" for figure in FIGURES | figures)
    optional = {"host_memory"} & set(known)
    assert set(known["sources"]) == SOURCES | sources | optional
    assert all(len(text) > 20 for key, text in known["sources"].items() if key != "shapes")


@pytest.mark.parametrize("name", TARGETS)
def test_figures_are_of_the_right_order(name):
    known = TARGETS[name]
    assert 0.75 < known["usable_memory"] / known["memory"] < 1
    assert 1e14 < known["peak_flops"] < 1e16
    assert 1e9 < known["network_bandwidth"] < known["link_bandwidth"] * known["links"] < 2e12
    assert known["links"] == max(1, 2 * known["torus_dims"])
    if known["platform"] == "gpu":
        assert known["usable_memory"] == int(0.8 * known["xla_memory"])


@pytest.mark.parametrize("name", [n for n in TARGETS if TARGETS[n]["platform"] == "tpu"])
@needs_tpu_compiler
def test_usable_memory_of_a_tpu_is_what_the_compiler_has(name):
    mesh = mesh_of_absent(f"{name}:{TARGETS[name]['shapes'][1]}")

    def compile_with(size: int) -> None:
        x = jax.ShapeDtypeStruct(
            (mesh.size, size // 2**18, 2**16), "float32", sharding=NamedSharding(mesh, P("fsdp"))
        )
        jax.jit(lambda x: 2 * x, donate_argnums=0).lower(x).compile()

    usable = TARGETS[name]["usable_memory"]
    compile_with(usable)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_with(int(1.001 * usable))


@pytest.mark.parametrize(
    "kind, name",
    [("TPU v5 lite", "v5e"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")],
)
def test_devices_that_are_here_have_a_target(kind, name):
    device = types.SimpleNamespace(
        device_kind=kind, client=types.SimpleNamespace(device_count=lambda: 4)
    )
    target = find_target(device)
    assert target is not None
    assert (target.name, target.chips, "datasheet" in target.source) == (name, 4, name[0] == "h")


def test_cpus_and_abstract_meshes_are_no_target_and_not_absent():
    nothing = AbstractMesh((8,), ("fsdp",))
    assert (
        find_target(jax.devices()[0]) is target_of(make_mesh(fsdp=8)) is target_of(nothing) is None
    )
    assert not is_absent(jax.devices()[0])
    assert not is_absent(make_mesh(fsdp=8)) and not is_absent(nothing)


# --------------------------------------------------------------------------------------------------
# Options of the compiler


def test_devices_that_are_here_and_tpus_need_no_options():
    assert compiler_options(make_mesh(fsdp=8)) == compiler_options(jax.devices()[0]) == {}
    assert compiler_options(AbstractMesh((8,), ("fsdp",))) == {}


@needs_tpu_compiler
def test_tpus_need_no_options():
    assert compiler_options(mesh_of_absent("v5e:2x4")) == {}


@needs_gpu_compiler
def test_absent_gpus_are_not_autotuned():
    assert compiler_options(mesh_of_absent("h100:8")) == {"xla_gpu_autotune_level": 0}


@needs_gpu_compiler
def test_an_option_that_xla_does_not_know_is_left_out_with_a_warning(monkeypatch):
    monkeypatch.setattr(module, "GPU_OPTIONS", {"xla_gpu_no_such_option": 0})
    module._gpu_options.cache_clear()
    with pytest.warns(UserWarning, match="xla_gpu_no_such_option"):
        assert compiler_options(mesh_of_absent("h100:8")) == {}
    module._gpu_options.cache_clear()
