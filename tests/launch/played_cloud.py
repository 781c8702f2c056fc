"""A cloud that is played: `gcloud` and `xpk` on PATH that note what they are asked for, keep a
machine of hosts, which are folders, run there what ssh is given, and fail as they are told to.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import time

from tests.launch.hearing import hear

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
# What real commands say, shortened.
QUOTA = "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota 'TPUV5sPreemptibleLitepod' exhausted. Limit 0"
CAPACITY = "ERROR: (gcloud) There is no more capacity in the zone 'us-east5-a'"
EXISTS = "ERROR: (gcloud) ALREADY_EXISTS: Resource 'projects/p/x/convbert-jax' already exists"
NOT_FOUND = "ERROR: (gcloud) NOT_FOUND: Resource 'convbert-jax' was not found"
DENIED = "ERROR: (gcloud) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied"
SSH = "me@34.1.2.3: Permission denied (publickey).\nERROR: (gcloud) [255] exited"
UNREACHABLE = "ssh: connect to host 34.1.2.3 port 22: Connection timed out"
LOGIN = "ERROR: (gcloud) You do not currently have an active account selected. gcloud auth login"

# Plans of everything, that it fits.
PLANNER = "#!/bin/bash\n[[ $* == *--mode=plan* ]]\n"

# `told NAME` is the first line of a file, taken off it: what the next command of this kind does.
GCLOUD = r"""#!/bin/bash
here={folder}
echo "${{*%% --command=*}}" >>"$here/asked"
told() {{ # a fault, printed and ended with; or a word
  local line
  line=$(head -n 1 "$here/told-$1" 2>/dev/null)
  [ -z "$line" ] || sed -i 1d "$here/told-$1"
  case $line in *ERROR*|*ssh:*|*denied*) echo "$line" >&2; exit 1;; esac
  echo "${{line:-$2}}"
}}
is_there() {{ [ -e "$here/machine" ] || {{ echo "{not_found}" >&2; exit 1; }}; }}
take_away() {{
  for process in "$here"/host-*/.convbert_jax/process; do
    kill -KILL -- "-$(ps -o pgid= -p "$(cat "$process")" | tr -d ' ')"
  done 2>/dev/null
  rm -rf "$here"/host-*
}}
state() {{ # WORD: prints it and ends where the machine has been taken away
  if [ "$(cat "$here/machine")" = lost ]; then take_away; echo "$1"; exit; fi
}}
for word; do case $word in --command=*) command=${{word#*=}};; esac; done
case "$*" in
  "config get-value project") cat "$here/project" 2>/dev/null;;
  "config get-value compute/zone") cat "$here/zone" 2>/dev/null;;
  *"queued-resources create"*|*"managed create"*|*"instances create"*)
    line=$(told create) || exit 1
    echo up >"$here/machine"
    for i in $(seq {hosts}); do
      mkdir -p "$here/host-$i/.local/bin"
      cp "$here/uv" "$here/host-$i/.local/bin"
    done;;
  *"workload-policy"*|*"instance-templates create"*) line=$(told parts) || exit 1;;
  *"queued-resources describe"*) is_there; told queue ACTIVE;;
  *"tpu-vm describe"*) is_there; state PREEMPTED; told node READY;;
  *"instances describe"*|*list-instances*)
    is_there
    line=$(told list) || exit 1
    for i in $(seq {hosts}); do echo "host-$i,$(state STOPPED; told node RUNNING)"; done;;
  *" delete "*)
    line=$(told delete) || exit 1
    case "$*" in
      *queued-resources*|*"managed delete"*|*"instances delete"*)
        is_there
        take_away
        rm "$here/machine";;
    esac;;
  *scp*)
    is_there
    line=$(told ssh) || exit 1
    for host in "$here"/host-*; do
      case "$*" in *tpu-vm*|*"${{host##*/}}:"*|*convbert-jax:*)
        for word; do [ ! -f "$word" ] || cp "$word" "$host/convbert_jax.tar.gz"; done;;
      esac
    done;;
  *ssh*)
    is_there
    line=$(told ssh) || exit 1
    for host in "$here"/host-*; do
      case "$*" in *tpu-vm*|*" ${{host##*/}} "*|*"ssh convbert-jax "*)
        HOME=$host PATH=/usr/bin:/bin bash -c "$command" || exit 1;;
      esac
    done;;
  *) echo "ERROR: what is $*" >&2; exit 1;;
esac
"""
# Makes the Python of a host, which does the next line of the file `program` beside all hosts.
UV = r"""#!/bin/bash
echo "uv $*" >>"$HOME/uv-asked"
[ "$1" = venv ] || exit 0
mkdir -p .venv/bin
cat >.venv/bin/python <<'END'
#!/bin/bash
echo "$*" >>"$HOME/../started"
number=${{HOME##*-}}
line=$(head -n 1 "$HOME/../program-$number")
sed -i 1d "$HOME/../program-$number"
eval "${{line:-exit 0}}"
END
chmod +x .venv/bin/python
"""


class Cloud:
    """A folder with the scripts, as a checkout, and the commands that play."""

    def __init__(self, folder: pathlib.Path, hosts: int = 2, tools=("gcloud",)):
        self.folder, self.checkout, self.hosts = folder / "cloud", folder / "checkout", hosts
        self.folder.mkdir()
        shutil.copytree(LAUNCH, self.checkout / "launch")
        (self.checkout / "requirements-3.12.lock").write_text("jax==1\nlibtpu==2\n")
        for command in (["init", "--quiet"], ["add", "."]):
            subprocess.run(["git", *command], cwd=self.checkout, check=True)
        names = {"folder": self.folder, "hosts": hosts, "not_found": NOT_FOUND}
        (self.folder / "bin").mkdir()
        for tool in tools:
            self._write(self.folder / "bin" / tool, GCLOUD.format(**names))
        self._write(self.folder / "uv", UV.format())
        self._write(self.folder / "bin" / "python3", PLANNER)

    def _write(self, file: pathlib.Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o755)

    def tell(self, what: str, *lines: str) -> None:
        """What the next commands of a kind answer: an error, a state; "" is the usual."""
        one = (line.replace("\n", " ") or "-" for line in lines)
        (self.folder / f"told-{what}").write_text("".join(f"{line}\n" for line in one))

    def program(self, host: int, *lines: str) -> None:
        """What the program does on a host (from 1), start by start."""
        (self.folder / f"program-{host}").write_text("".join(f"{line}\n" for line in lines))

    def set(self, **values: str) -> None:
        """Files that the commands read: the settings of gcloud."""
        for name, value in values.items():
            (self.folder / name).write_text(value)

    def start(self, script: str, *arguments: str) -> subprocess.Popen:
        path = f"{self.folder}/bin:/usr/bin:/bin"
        if not (self.folder / "bin" / "gcloud").exists():
            path = self._path_without_clouds()
        return subprocess.Popen(
            ["/bin/bash", f"launch/{script}", *arguments],
            cwd=self.checkout,
            env={"PATH": path, "HOME": str(self.folder), "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear,
        )

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments)
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()) from None
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def _path_without_clouds(self) -> str:
        tools = self.folder / "tools"
        tools.mkdir()
        for tool in ("date", "dirname", "sed", "grep", "tail", "mkdir", "git", "tar"):
            (tools / tool).symlink_to(shutil.which(tool))
        return f"{self.folder}/bin:{tools}"

    def asked(self) -> list[str]:
        """The commands so far, without what ssh was to do."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def count(self, words: str) -> int:
        return sum(words in line for line in self.asked())

    @property
    def started(self) -> list[str]:
        """The command lines of the program, of all hosts and starts."""
        file = self.folder / "started"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def is_there(self) -> bool:
        return (self.folder / "machine").exists()

    def wait_for(self, what, process) -> None:
        limit = time.monotonic() + 60
        while not what():
            if process.poll() is not None or time.monotonic() > limit:
                process.send_signal(signal.SIGKILL)
                raise AssertionError(process.communicate())
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
