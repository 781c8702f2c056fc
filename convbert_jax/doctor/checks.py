"""Checks for problems that would stop a run on this machine, in the order of `CHECKS`.

Nothing here imports jax at the top, because jax may be the problem. Package metadata is read
instead of importing packages, which also finds a jax that cannot be imported.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import pathlib
import platform
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from etils import epath
from packaging.requirements import Requirement

import convbert_jax
from convbert_jax import storage
from convbert_jax.config import Config, UserError
from convbert_jax.machine import (
    Accelerators,
    cgroup_limits,
    find_accelerators,
    free_memory,
    installed,
    unmet,
)

STATES = ("good", "warning", "wrong")

_threads: list[threading.Thread] = []


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of --mode=doctor.

    Attributes:
      name: subject of the check, for example "workdir".
      state: good | warning (a run can start but may be slow or unsafe) | wrong (it would fail).
      text: result, without a final period.
      fix: remedy, without a final period; "" if none is needed.
    """

    name: str
    state: str
    text: str
    fix: str = ""

    def __post_init__(self):
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r} must be one of {', '.join(STATES)}.")

    def __str__(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return " ".join(f"{self.state:<8}{self.name}: {self.text}{fix}.".splitlines())


def good(name: str, text: str) -> Finding:
    return Finding(name, "good", text)


def warning(name: str, text: str, fix: str) -> Finding:
    return Finding(name, "warning", text, fix)


def wrong(name: str, text: str, fix: str) -> Finding:
    return Finding(name, "wrong", text, fix)


@dataclasses.dataclass
class Subject:
    """Run and machine that the checks examine.

    Attributes:
      config: config of the run; None: skip the checks that need one.
      workdir: folder of the run; None: skip its checks.
      given: as in `recipes.start.read_start`.
      accelerators: those known to the operating system, which jax should find.
      completed: `config` with the values from vocabulary and weights, after the check "start".
      parameters: number of parameters of the model; 0 before the check "start".
    """

    config: Config | None
    workdir: epath.Path | None
    given: Collection[str] = ()
    accelerators: Accelerators = dataclasses.field(default_factory=find_accelerators)
    completed: Config | None = None
    parameters: int = 0


class Check(NamedTuple):
    """A check by name.

    Attributes:
      name: name of the finding if the check fails or times out.
      run: subject -> findings; none if it does not apply.
      limit: timeout in seconds; the check continues in a thread, which cannot be stopped.
      late: state of the finding for a timeout.
    """

    name: str
    run: Callable[[Subject], Sequence[Finding]]
    limit: float
    late: str = "wrong"


def run_check(check: Check, subject: Subject) -> list[Finding]:
    """Runs `check` and returns its findings, or a finding that it failed or timed out."""
    found: list[Finding] = []

    def call():
        try:
            found.extend(check.run(subject))
        except UserError as error:
            found.append(Finding(check.name, "wrong", str(error).rstrip(".")))
        except BaseException as error:
            what = (str(error).strip().splitlines() or ["no message"])[0][:200].rstrip(".")
            found.append(
                wrong(
                    check.name,
                    f"the check failed ({type(error).__name__}: {what})",
                    "resolve this first: a run would fail too",
                )
            )

    thread = threading.Thread(target=call, daemon=True)
    _threads.append(thread)
    thread.start()
    thread.join(check.limit)
    if thread.is_alive():
        text = f"no answer within {check.limit:.0f} s"
        return [Finding(check.name, check.late, text, "find the cause: a run would wait there too")]
    return found


def is_stuck() -> bool:
    """Returns whether a check is still running, which may prevent Python from exiting."""
    return any(thread.is_alive() for thread in _threads)


_REQUIREMENTS = pathlib.Path(convbert_jax.__file__).resolve().parents[1] / "requirements.txt"

# Libraries of jax -> extra of jax that declares the required version.
LIBRARIES = {
    "jaxlib": "",
    "libtpu": "tpu",
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda13-plugin": "cuda13",
}


def check_versions(*, tpu_here: bool) -> list[Finding]:
    """Checks Python, the requirements of this package, and jax with its libraries.

    Args:
      tpu_here: whether the machine has a TPU; if not, an incompatible libtpu is only a warning.
    """
    python = platform.python_version()
    findings = [good("Python", f"{python}, convbert_jax {convbert_jax.__version__}")]
    missing = unmet(_requirements(), "")
    if missing:
        text = "; ".join(f"{wanted} is required, {found} is installed" for wanted, found in missing)
        names = " ".join(f"'{wanted}'" for wanted, _ in missing)
        findings.append(wrong("packages", text, f"pip install {names}"))
    else:
        findings.append(good("packages", "all requirements of requirements.txt are met"))
    return [*findings, *_check_jax(tpu_here)]


def fault_of_jax() -> Finding | None:
    """Imports jax; returns a finding if this fails."""
    try:
        importlib.import_module("jax")
    except Exception as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return wrong(
            "jax",
            f"cannot import jax ({what})",
            "pip install -U 'jax[tpu]', 'jax[cuda12]' or jax, depending on the machine",
        )
    return None


def _check_jax(tpu_here: bool) -> list[Finding]:
    jax = installed("jax")
    if jax is None:
        return []  # reported by the finding on packages
    there = {name: installed(name) for name in LIBRARIES}
    findings = []
    for name, extra in LIBRARIES.items():
        if there[name] is None:
            continue
        asked = (text for text in importlib.metadata.requires("jax") or () if _is_of(text, name))
        for wanted, found in unmet(asked, extra):
            text = f"jax {jax} requires {wanted}, {found} is installed"
            fix = f"pip install -U 'jax{f'[{extra}]' if extra else ''}=={jax}'"
            idle = name == "libtpu" and not tpu_here
            findings.append((warning if idle else wrong)("jax", text, fix))
    if not findings:
        have = [f"{name} {version}" for name, version in there.items() if version]
        findings = [good("jax", f"jax {jax} and {', '.join(have)} are compatible")]
    return findings


def _requirements() -> list[str]:
    """Returns the requirements of this package, from a checkout or an installed package."""
    if _REQUIREMENTS.is_file():
        lines = (line.partition("#")[0].strip() for line in _REQUIREMENTS.open(encoding="utf-8"))
        return [line for line in lines if line]
    return importlib.metadata.requires("convbert_jax") or []


def _is_of(requirement: str, name: str) -> bool:
    return Requirement(requirement).name.replace("_", "-").lower() == name


_ROOT = pathlib.Path("/")

_LEAST_MEMORY = 4 * 2**30  # bytes for Python, jax and the compiler, without a model

_LEAST_CPUS = 2  # one prepares batches while the other dispatches steps


def check_host(parameters: int, workers: int, root: pathlib.Path = _ROOT) -> list[Finding]:
    """Checks that memory and CPUs are sufficient.

    Args:
      parameters: number of parameters of the model, 0 if unknown. Parameters and moments are in
        host memory while a checkpoint is read, and permanently on a CPU.
      workers: `config.data.workers`.
      root: root of the file system.
    """
    limit, cpus = cgroup_limits(root)
    memory = free_memory(root)
    text = f"{memory / 2**30:.1f} GiB free"
    if limit:
        text += f" (container limit: {limit / 2**30:.1f} GiB)"
    need = _LEAST_MEMORY + 3 * 4 * parameters
    if memory < need:
        fix = f"a run needs {need / 2**30:.1f} GiB; stop other programs or increase the limit"
        findings = [warning("memory", text, fix)]
    else:
        findings = [good("memory", text)]
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = min(there, cpus or there)
    text = f"{usable:g} available"
    if cpus and cpus < there:
        text += f" of {there} (container limit)"
    if usable < _LEAST_CPUS:
        fix = f"provide {_LEAST_CPUS} or more, or the device waits for batches"
        return [*findings, warning("CPUs", text, fix)]
    if workers > usable:
        fix = "set config.data.workers=0, which uses one per CPU"
        return [*findings, warning("CPUs", f"{text}, config.data.workers={workers}", fix)]
    return [*findings, good("CPUs", text)]


LIBTPU_LOCK = "tmp/libtpu_lockfile"

_LEAST_DRIVER = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}  # requirements of CUDA 12, 13


def check_accelerators(
    found: Accelerators, root: pathlib.Path = pathlib.Path("/")
) -> list[Finding]:
    """Checks that jax can use the accelerators and that no other process uses a TPU."""
    findings = []
    if found.chips:
        findings.append(_check_tpu(found.chips, root))
    if found.driver:
        findings.append(_check_driver(found.driver))
    return findings or [good("accelerators", "no TPU and no NVIDIA driver on this machine")]


def find_holders(paths: Collection[pathlib.Path], root: pathlib.Path) -> dict[int, str]:
    """Returns {pid: name} of the other processes that have one of these files open.

    Only processes that this user may inspect are found.
    """
    wanted, found = {str(path) for path in paths}, {}
    for folder in root.glob("proc/[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid() and _opened(folder / "fd") & wanted:
            with contextlib.suppress(OSError):  # the process has exited
                found[pid] = (folder / "comm").read_text().strip()
    return found


def _opened(folder: pathlib.Path) -> set[str]:
    """Returns the open files of a process; empty if it has exited or belongs to another user."""
    opened = set()
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                opened.add(os.readlink(link))
    return opened


def _check_tpu(chips: Collection[pathlib.Path], root: pathlib.Path) -> Finding:
    lock = root / LIBTPU_LOCK
    text = f"{len(chips)} chips"
    if held := find_holders((*chips, lock), root):
        who = " and ".join(f"process {pid} ({name})" for pid, name in sorted(held.items()))
        pids = " ".join(map(str, sorted(held)))
        return wrong("TPU", f"{text}, in use by {who}", f"wait, or stop it: kill {pids}")
    if installed("libtpu") is None:
        return wrong("TPU", f"{text}, but libtpu is not installed", "pip install '.[tpu]'")
    if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
        owner = lock.stat().st_uid
        fix = f"sudo rm {lock}, when no process of that user uses the TPU"
        return wrong("TPU", f"{text}; {lock} belongs to user {owner} and cannot be opened", fix)
    return good("TPU", f"{text}, not in use by any visible process")


def _check_driver(driver: str) -> Finding:
    plugins = {name: installed(name) for name in _LEAST_DRIVER}
    if not any(plugins.values()):
        extra = "cuda13" if int(driver.partition(".")[0]) >= 580 else "cuda12"
        text = f"driver {driver}, but no CUDA plugin of jax is installed, so jax uses the CPU"
        return warning("NVIDIA", text, f"pip install '.[{extra}]'")
    for name, version in plugins.items():
        least = _LEAST_DRIVER[name]
        if version and int(driver.partition(".")[0]) < least:
            text = f"driver {driver} is too old for {name} {version}, which needs {least}"
            older = ", or use '.[cuda12]'" if least > 525 else ""
            return wrong("NVIDIA", text, f"install a newer driver{older}")
    have = ", ".join(f"{name} {version}" for name, version in plugins.items() if version)
    return good("NVIDIA", f"driver {driver}, {have}")


_MOMENTS = 3  # arrays in a checkpoint: the parameters and two moments

_BYTES = 4  # per float32


@contextlib.contextmanager
def created(folder: epath.Path) -> Iterator[None]:
    """Creates `folder` with its parents, if possible, and removes the created folders at exit."""
    absent: list[epath.Path] = []
    if not storage.is_remote(folder):
        place = folder
        while not place.exists() and place != place.parent:
            absent.append(place)
            place = place.parent
    new = []
    try:
        with contextlib.suppress(OSError):  # the check in the block reports the problem
            for place in reversed(absent):
                place.mkdir()
                new.append(place)
        yield
    finally:
        for place in reversed(new):
            with contextlib.suppress(OSError):  # no longer empty
                place.rmdir()


def check_workdir(workdir: epath.Path) -> list[Finding]:
    """Checks write access and locks of the workdir; leaves no files there."""
    with created(workdir):
        if fault := _fault_of_writing(workdir):
            fix = "choose another --workdir, or grant this user write permission"
            return [wrong("workdir", f"cannot write to {workdir} ({fault})", fix)]
        findings = [good("workdir", f"{workdir} is writable")]
        if storage.is_remote(workdir):
            text = "a bucket has no locks; a run writes heartbeats, which a second start checks"
            return [*findings, good("locks", text)]
        return [*findings, _check_locks(workdir)]


def check_space(workdir: epath.Path, config: Config, parameters: int) -> list[Finding]:
    """Checks that the disk of the workdir has enough space for the checkpoints.

    Args:
      parameters: number of parameters of the model.
    """
    if storage.is_remote(workdir):
        return []
    need = max(0, checkpoint_bytes(config, parameters) - _bytes_of_checkpoints(workdir))
    place = workdir
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free, the run's checkpoints need {need / 2**30:.1f} GiB more"
    if free < need:
        fix = f"free disk space, choose another --workdir, or {config.spec.less_disk}"
        return [wrong("space", text, fix)]
    return [good("space", text)]


def _bytes_of_checkpoints(workdir: epath.Path) -> int:
    """Returns the size of the existing checkpoints, which a running process may be removing."""
    size = 0
    for path in workdir.rglob("checkpoints/**/*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """Returns the maximum size of the checkpoints of a run in bytes."""
    states, models = config.spec.count_checkpoints(config)
    return parameters * _BYTES * (states * _MOMENTS + models)


def check_compile_cache(name: str) -> list[Finding]:
    """Checks that compiled functions can be cached.

    Args:
      name: `config.train.compile_cache`; JAX_COMPILATION_CACHE_DIR takes precedence, as in jax.
    """
    name = os.environ.get("JAX_COMPILATION_CACHE_DIR") or name
    if not name:
        text = "off: each start compiles everything again"
        return [warning("compile cache", text, "set config.train.compile_cache to a folder")]
    folder = storage.to_path(name)
    with created(folder):
        if fault := _fault_of_writing(folder):
            fix = "set config.train.compile_cache to another folder"
            return [warning("compile cache", f"cannot write to {folder} ({fault})", fix)]
    return [good("compile cache", f"{folder} is writable")]


@contextlib.contextmanager
def probe(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields a path in `folder` for a temporary file, which is removed at exit."""
    path = folder / f".doctor-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fault_of_writing(folder: epath.Path) -> str:
    """Writes, syncs and reads a file; returns the problem, or "" on success."""
    text = os.urandom(16).hex()
    try:
        with probe(folder) as path:
            storage.write_text(path, text)
            read = path.read_text()
    except (OSError, ImportError) as error:  # ImportError: no library for the bucket
        return getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return "" if read == text else "a file had other content than was written"


def _check_locks(folder: epath.Path) -> Finding:
    fix = "run only one process at a time in this folder; nothing prevents a second one"
    with probe(folder) as path, path.open("w") as first, path.open("w") as second:
        try:
            taken = storage.try_lock(first, f"{folder} has no locks.")
            again = storage.try_lock(second, f"{folder} has no locks.")
        except OSError as error:
            return wrong(
                "locks",
                f"{folder} cannot be locked ({error.strerror})",
                "choose a --workdir on another file system",
            )
    if taken and not again:
        return good("locks", "file locks work: two runs cannot use the same folder")
    return warning("locks", f"file locks do not work in {folder}", fix)


def check_start(subject: Subject) -> Sequence[Finding]:
    """Reads vocabulary and weights; raises the UserErrors of a start."""
    if subject.config is None:
        return ()
    from convbert_jax import recipes
    from convbert_jax.doctor import run_checks

    subject.completed = recipes.complete(subject.config, subject.workdir, subject.given)
    subject.parameters, found = run_checks.check_start(subject.completed)
    return found


def check_data(subject: Subject) -> Sequence[Finding]:
    """Checks that the data exists, if `check_start` completed the config."""
    if subject.config is None:
        return ()
    from convbert_jax.doctor import run_checks

    return run_checks.check_data(subject.completed or subject.config, subject.workdir)


def _check_devices(subject: Subject) -> Sequence[Finding]:
    from convbert_jax.doctor import run_checks

    return run_checks.check_devices(subject.config, subject.accelerators)


def _check_host(subject: Subject) -> Sequence[Finding]:
    return check_host(subject.parameters, subject.config.data.workers if subject.config else 0)


def _check_workdir(subject: Subject) -> Sequence[Finding]:
    return () if subject.workdir is None else check_workdir(subject.workdir)


def _check_space(subject: Subject) -> Sequence[Finding]:
    if not subject.parameters:
        return ()
    return check_space(subject.workdir, subject.config, subject.parameters)


def _check_compile_cache(subject: Subject) -> Sequence[Finding]:
    return check_compile_cache(subject.config.train.compile_cache) if subject.config else ()


# Earlier findings explain later ones. The time limits keep the total below a minute if one check
# hangs. Without problems, all checks take one or two seconds, except for devices: a TPU may take
# half a minute.
CHECKS = (
    Check("versions", lambda s: check_versions(tpu_here=bool(s.accelerators.chips)), 10.0),
    Check("accelerators", lambda s: check_accelerators(s.accelerators), 10.0),
    Check("devices", _check_devices, 40.0),
    Check("start", check_start, 20.0),
    Check("data", check_data, 20.0, late="warning"),
    Check("host", _check_host, 10.0),
    Check("workdir", _check_workdir, 15.0),
    Check("space", _check_space, 15.0),
    Check("compile cache", _check_compile_cache, 15.0, late="warning"),
)
_WITHOUT_JAX = ("versions", "accelerators", "host")


def examine(
    config: Config | None, workdir: epath.Path | None, given: Collection[str] = ()
) -> Iterator[Finding]:
    """Yields the findings on this machine one by one, then the findings on all processes.

    With several processes, process 0 yields both; the others yield only the findings on all
    processes, which include the problems that each process found.

    Args:
      config: config of the run; None: skip the checks that need one.
      workdir: folder of the run; None: skip its checks.
      given: as in `recipes.start.read_start`.
    """
    if fault := fault_of_jax():
        for check in CHECKS:
            if check.name in _WITHOUT_JAX:
                yield from run_check(check, Subject(None, None))
        yield fault
        return
    from convbert_jax.training import distributed

    subject = Subject(config, workdir, given)
    index, count = distributed.place()
    if count == 1:
        for check in CHECKS:
            yield from run_check(check, subject)
        return
    from convbert_jax.doctor import run_checks

    with contextlib.ExitStack() as stack:
        # Process 0 creates and removes the folder, so that on shared storage no other process
        # does.
        if workdir is not None and index == 0:
            stack.enter_context(created(workdir))
        distributed.broadcast("", run_checks.LIMIT)
        own = []
        for check in CHECKS:
            found = run_check(check, subject)
            own += found
            if index == 0:
                yield from found
        yield from run_checks.compare_processes(own, config, workdir)
