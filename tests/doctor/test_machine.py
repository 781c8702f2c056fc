"""Findings, versions, container limits and accelerators, with folders in place of system files."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import Config, ConfigError
from convbert_jax.doctor import checks, run_checks
from convbert_jax.machine import Accelerators, cgroup_limits, find_accelerators, multiplies_bfloat16

GIB = 2**30
NOTHING = checks.Subject(None, None)


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def installed(monkeypatch, **changed: str | None):
    """Fakes versions of installed packages; None: missing. "_" in a name stands for "-"."""
    changed = {name.replace("_", "-"): version for name, version in changed.items()}
    real = importlib.metadata.version

    def version(name):
        if name.replace("_", "-") not in changed:
            return real(name)
        if found := changed[name.replace("_", "-")]:
            return found
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


# Findings


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("by zero\nsecond line"), SystemExit(3), KeyboardInterrupt(), OSError()],
)
def test_a_check_that_raises_is_a_finding(error):
    def check(subject):
        raise error

    (found,) = checks.run_check(checks.Check("sums", check, 5), NOTHING)
    assert (found.name, found.state) == ("sums", "wrong")
    assert type(error).__name__ in found.text
    assert "second line" not in str(found)


def test_an_error_that_the_user_can_fix_is_printed_unchanged():
    def check(subject):
        raise ConfigError("config.seed=x must be a number.")

    (found,) = checks.run_check(checks.Check("start", check, 5), NOTHING)
    assert str(found) == "wrong   start: config.seed=x must be a number."


@pytest.mark.parametrize("late", ["wrong", "warning"])
def test_a_check_that_hangs_is_a_finding(late):
    gate = threading.Event()
    check = checks.Check("devices", lambda subject: gate.wait(), 0.05, late)
    (found,) = checks.run_check(check, NOTHING)
    assert (found.name, found.state) == ("devices", late)
    assert checks.is_stuck()
    gate.set()
    for thread in checks._threads:
        thread.join(5)
    assert not checks.is_stuck()


@settings(max_examples=30)
@given(*[st.text(max_size=20)] * 3, st.sampled_from(checks.STATES))
def test_a_finding_is_one_line(name, text, fix, state):
    said = str(checks.Finding(name, state, text, fix))
    assert len(said.splitlines()) == 1
    assert said.split()[0] == state


# Versions


def test_what_is_installed_here_can_run():
    found = {f.name: f for f in checks.check_versions(tpu_here=False)}
    assert [f for f in found.values() if f.state == "wrong"] == []
    assert found["Python"].text.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert found["packages"].state == "good"


def test_versions_that_do_not_fit_are_named_with_a_fix(monkeypatch):
    def check(name, tpu_here=False, **changed):
        with monkeypatch.context() as patch:
            installed(patch, **changed)
            (found,) = [f for f in checks.check_versions(tpu_here=tpu_here) if f.name == name]
        return found

    found = check("jax", jaxlib="0.4.1", libtpu=None)
    assert found.state == "wrong"
    assert f"jax {jax.__version__}" in found.text
    assert "0.4.1" in found.text
    assert found.fix.endswith(f"'jax=={jax.__version__}'")
    for tpu_here, state in ((True, "wrong"), (False, "warning")):
        found = check("jax", tpu_here, libtpu="0.0.1", jax_cuda12_plugin=None)
        assert found.state == state
        assert "libtpu" in found.text
        assert "jax[tpu]==" in found.fix
    found = check("packages", optax="0.1.0", scikit_learn=None)
    assert found.state == "wrong"
    for mention in ("optax>=0.2.8", "0.1.0", "scikit-learn>=1.7"):
        assert mention in found.text
    assert "'optax>=0.2.8'" in found.fix


def test_requirements_of_other_pythons_and_extras_do_not_count():
    asked = ["flax>=99; python_version < '3'", "libtpu==9; extra == 'tpu'", "numpy<1"]
    assert [wanted for wanted, _ in checks.unmet(asked, "")] == ["numpy<1"]
    assert [wanted for wanted, _ in checks.unmet(asked, "tpu")] == ["libtpu==9", "numpy<1"]


def test_a_jax_that_cannot_be_loaded_is_a_finding(monkeypatch):
    assert checks.fault_of_jax() is None

    def refuse(name):
        raise RuntimeError("jaxlib is version 0.4.1, but this version of jax requires >= 0.10.")

    monkeypatch.setattr(checks.importlib, "import_module", refuse)
    assert "jaxlib is version 0.4.1" in checks.fault_of_jax().text


def test_the_doctor_itself_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None; import convbert_jax.doctor, convbert_jax.main"
    subprocess.run([sys.executable, "-c", code], check=True)


# Limits of containers


def test_limits_of_both_versions_of_cgroups(tmp_path):
    second = write(
        tmp_path / "2",
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "max 100000\n",
        },
    )
    assert cgroup_limits(second) == (8 * GIB, 1.5)
    first = write(
        tmp_path / "1",
        {
            # In a container the path is the host's, and the mounted root is the process's own
            # group.
            "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n1:cpu:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup_limits(first) == (2 * GIB, 4.0)
    free = write(
        tmp_path / "0",
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup_limits(free) == (None, None)
    assert cgroup_limits(tmp_path / "nothing") == (None, None)


@settings(max_examples=30)
@given(st.lists(st.none() | st.integers(1, 10**12), max_size=5))
def test_the_tightest_group_decides(tmp_path_factory, limits):
    root = tmp_path_factory.mktemp("root")
    path = "".join(f"/g{i}" for i in range(len(limits)))
    write(root, {"proc/self/cgroup": f"0::{path or '/'}\n"})
    folder = "sys/fs/cgroup"
    for i, limit in enumerate(limits):
        folder += f"/g{i}"
        write(root, {f"{folder}/memory.max": f"{limit or 'max'}\n"})
    assert cgroup_limits(root)[0] == min(filter(None, limits), default=None)


def machine(tmp_path, *, free: int, limit: int | str = "max", cpus: str = "max 100000"):
    return write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {free // 1024} kB\nMemAvailable:   {free // 1024} kB\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{limit}\n",
            "sys/fs/cgroup/cpu.max": f"{cpus}\n",
        },
    )


def test_a_container_with_too_little_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    root = machine(tmp_path / "a", free=64 * GIB, limit=3 * GIB, cpus="100000 100000")
    memory, cpus = checks.check_host(0, 0, root)
    assert (memory.name, memory.state) == ("memory", "warning")
    assert memory.text.count("3.0 GiB") == 2  # free memory and the container's limit
    assert (cpus.name, cpus.state) == ("CPUs", "warning")
    assert [int(n) for n in re.findall(r"\d+", cpus.text)] == [1, 16]
    root = machine(tmp_path / "b", free=64 * GIB)
    assert [f.state for f in checks.check_host(10**9, 16, root)] == ["good", "good"]
    assert [f.state for f in checks.check_host(6 * 10**9, 17, root)] == ["warning", "warning"]


# Accelerators


def tpu(tmp_path) -> pathlib.Path:
    return write(tmp_path, {"dev/accel0": "", "dev/accel1": "", "tmp/libtpu_lockfile": ""})


def test_a_machine_without_any(tmp_path):
    found = find_accelerators(tmp_path)
    assert found == Accelerators((), "")
    (said,) = checks.check_accelerators(found, tmp_path)
    assert said.state == "good"


def test_who_holds_the_tpu_is_named(tmp_path, monkeypatch):
    installed(monkeypatch, libtpu="0.0.42")
    root = tpu(tmp_path)
    (said,) = checks.check_accelerators(find_accelerators(root), root)
    assert (said.name, said.state) == ("TPU", "good")
    for pid, path in (
        (4321, root / "dev/accel1"),
        (77, root / "elsewhere"),
        (os.getpid(), root / "dev/accel0"),
    ):
        write(root, {f"proc/{pid}/comm": "python3\n", f"proc/{pid}/fd/keep": ""})
        (root / f"proc/{pid}/fd/7").symlink_to(path)
    (said,) = checks.check_accelerators(find_accelerators(root), root)
    assert said.state == "wrong"
    assert "4321 (python3)" in said.text
    assert "kill 4321" in said.fix
    assert "77" not in said.text


def test_a_real_process_that_has_a_file_open_is_found(tmp_path):
    file = tmp_path / "lock"
    file.write_text("")
    code = "import sys, time; f = open(sys.argv[1]); print('open', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert process.pid in checks.find_holders([file], pathlib.Path("/"))
    finally:
        process.kill()
        process.wait()
    with file.open():  # this process is not counted
        assert checks.find_holders([file], pathlib.Path("/")) == {}


def test_a_tpu_without_libtpu_is_told(tmp_path, monkeypatch):
    installed(monkeypatch, libtpu=None)
    root = tpu(tmp_path)
    (said,) = checks.check_accelerators(find_accelerators(root), root)
    assert (said.state, said.fix) == ("wrong", "pip install '.[tpu]'")


def test_a_device_of_vfio_is_a_tpu_only_if_one_is_on_the_bus(tmp_path):
    """0x0042 is a network card of the same vendor."""
    bus = "sys/bus/pci/devices/0000:00:05.0"
    for device, chips in (("0x0063", 1), ("0x0042", 0)):
        ids = {f"{bus}/vendor": "0x1ae0\n", f"{bus}/device": device}
        root = write(tmp_path / device, {"dev/vfio/0": "", "dev/vfio/vfio": "", **ids})
        assert len(find_accelerators(root).chips) == chips


def test_drivers_of_nvidia(tmp_path, monkeypatch):
    none = {"jax_cuda12_plugin": None, "jax_cuda13_plugin": None}
    for driver, plugin, state in (
        ("535.104.05", None, "warning"),
        ("470.82.01", "jax_cuda12_plugin", "wrong"),
        ("560.35.03", "jax_cuda13_plugin", "wrong"),
        ("580.65.06", "jax_cuda13_plugin", "good"),
        ("535.104.05", "jax_cuda12_plugin", "good"),
    ):
        version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Aug 19 2023\nGCC"
        root = write(tmp_path / f"{driver}{plugin}", {"proc/driver/nvidia/version": version})
        with monkeypatch.context() as patch:
            installed(patch, **none | ({plugin: "0.10.2"} if plugin else {}))
            found = find_accelerators(root)
            assert found.driver == driver
            (said,) = checks.check_accelerators(found, root)
        assert (said.name, said.state) == ("NVIDIA", state)
        assert driver in said.text


def test_devices_compute_and_fulfil_the_platform():
    here = Accelerators((), "")
    found = run_checks.check_devices(Config(), here)
    assert [f.state for f in found] == ["good", "good"]
    assert f"{jax.local_device_count()} x " in found[0].text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a machine with CPUs alone")
def test_devices_that_are_not_what_was_meant():
    config = Config(platform="tpu")
    chips = Accelerators((pathlib.Path("/dev/accel0"),), "")
    found = run_checks.check_devices(config, chips)
    assert [(f.name, f.state) for f in found[1:]] == [("TPU", "wrong"), ("platform", "wrong")]
    driver = Accelerators((), "535.1")
    found = run_checks.check_devices(None, driver)
    assert [(f.name, f.state) for f in found[1:]] == [("NVIDIA", "warning")]


def test_a_device_that_computes_wrong_numbers_is_told(monkeypatch):
    monkeypatch.setattr(run_checks.jax, "jit", lambda f: lambda x: 139.0)
    (found,) = run_checks.check_devices(None, Accelerators((), ""))
    assert found.state == "wrong"
    assert "= 139.0" in found.text


def test_the_matrix_unit_is_among_the_flags_of_the_processor(tmp_path):
    core = "processor\t: {}\nvendor_id\t: GenuineIntel\nflags\t\t: fpu {} sse2\n\n"
    assert not multiplies_bfloat16(tmp_path / "absent")
    for index, (text, found) in enumerate((
        (core.format(0, "avx512_bf16 amx_bf16 amx_tile") * 2, True),
        (core.format(0, "avx512_bf16 amx_tile"), False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),  # ARM uses other names
        ("", False),
    )):  # fmt: skip
        path = tmp_path / str(index)
        path.write_text(text)
        assert multiplies_bfloat16(path) == found
