# shellcheck shell=bash
# Sourced by the other scripts in the root of the repository. Afterwards `python` has the packages of requirements.txt and requirements-test.txt.
# Uses the active virtual or conda environment, or else creates .venv with $PYTHON (default: python3).

requirements_sum=$(cat requirements*.txt | cksum | cut -d' ' -f1)

need_python() { # COMMAND NAME FIX: exits unless the command runs and is Python 3.11 or newer
  local output
  if ! output=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1); then
    echo "error: $2 does not run: ${output//$'\n'/ }. $3" >&2
    exit 1
  fi
  if ! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $2 is Python ${output##*$'\n'}, but 3.11 or newer is required. $3" >&2
    exit 1
  fi
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [ -n "$active" ]; then
  need_python python "The python of $active" "Deactivate this environment, or activate one with Python 3.11 or newer."
else
  # A failed `python -m venv` leaves no activate; if its Python was removed since, .venv/bin/python is a dead link.
  if [ ! -x .venv/bin/python ] || [ ! -e .venv/bin/activate ]; then
    if [ ! -e .venv/pyvenv.cfg ] && [ -n "$(ls -A .venv 2>/dev/null)" ]; then
      echo "error: $PWD/.venv exists but is not a virtual environment. Move it away, or activate an environment." >&2
      exit 1
    fi
    interpreter=${PYTHON:-python3}
    need_python "$interpreter" "$interpreter" "Set PYTHON to Python 3.11 or newer: PYTHON=/path/to/python3.12"
    echo "Creating the virtual environment .venv with $("$interpreter" --version)."
    "$interpreter" -m venv --clear .venv
  fi
  # Its activate script has the path where it was created, but the checkout may have been moved.
  unset PYTHONHOME
  export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
  need_python python "$PWD/.venv/bin/python" "Move .venv away, or set PYTHON to another Python."
fi

stamp="$(python -c 'import sys; print(sys.prefix)')/.convbert_jax_requirements"
if [ "$(cat "$stamp" 2>/dev/null)" != "$requirements_sum" ]; then
  echo "Installing requirements.txt and requirements-test.txt into ${stamp%/*} (a minute or two, once)."
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-test.txt
  echo "$requirements_sum" >"$stamp"
fi
