# shellcheck shell=bash
# Sourced by the other scripts, from the repository's root: leaves `python` pointing at an environment that has requirements.txt and requirements-test.txt.
# An active virtual or conda environment is used as it is; otherwise .venv is made with $PYTHON (default: python3).

requirements_sum=$(cat requirements*.txt | cksum | cut -d' ' -f1)

need_python() { # COMMAND NAME ADVICE: it may not be there, be too old, or, as a shim of pyenv, be there and not run
  local said
  if ! said=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1); then
    echo "error: $2 does not run (${said//$'\n'/ }); $3" >&2
    exit 1
  fi
  if ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $2 is Python ${said##*$'\n'}, not 3.11 or newer; $3" >&2
    exit 1
  fi
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [ -n "$active" ]; then
  need_python python "python, with $active active," "deactivate that, or activate an environment of Python 3.11 or newer"
else
  # What a `python -m venv` that failed or was killed left has no activate; of one whose Python has been removed since, python is a dead link.
  if [ ! -x .venv/bin/python ] || [ ! -e .venv/bin/activate ]; then
    if [ ! -e .venv/pyvenv.cfg ] && [ -n "$(ls -A .venv 2>/dev/null)" ]; then
      echo "error: $PWD/.venv is there and is no virtual environment; move it away, or activate one" >&2
      exit 1
    fi
    interpreter=${PYTHON:-python3}
    need_python "$interpreter" "$interpreter" "name Python 3.11 or newer with PYTHON=/path/to/python3.12"
    echo "Making the virtual environment .venv with $("$interpreter" --version)."
    "$interpreter" -m venv --clear .venv
  fi
  # Not by its activate, which has the path where it was made: the checkout may have been moved.
  unset PYTHONHOME
  export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
  need_python python "$PWD/.venv/bin/python" "move .venv away, or name another Python"
fi

environment=$(python -c 'import sys; print(sys.prefix)')
stamp="$environment/.convbert_jax_requirements"
if [ "$(cat "$stamp" 2>/dev/null)" != "$requirements_sum" ]; then
  echo "Installing requirements.txt and requirements-test.txt into $environment (a minute or two, once)."
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-test.txt
  echo "$requirements_sum" >"$stamp"
fi
