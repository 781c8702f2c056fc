# shellcheck shell=bash
# Sourced by the other scripts, from the repository's root: leaves `python` pointing at an environment that has requirements.txt and requirements-test.txt.
# An active virtual or conda environment is used as it is; otherwise .venv is made with $PYTHON (default: python3).

requirements_sum=$(cat requirements*.txt | cksum | cut -d' ' -f1)

if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    interpreter=${PYTHON:-python3}
    # It may not be there, be too old, or, as a shim of pyenv, be there and not run.
    if ! said=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1); then
      echo "error: $interpreter does not run (${said//$'\n'/ }); name Python 3.11 or newer with PYTHON=/path/to/python3.12" >&2
      exit 1
    fi
    if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: $interpreter is Python ${said##*$'\n'}, not 3.11 or newer; name one with PYTHON=/path/to/python3.12" >&2
      exit 1
    fi
    echo "Making the virtual environment .venv with $("$interpreter" --version)."
    "$interpreter" -m venv .venv
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi

environment=$(python -c 'import sys; print(sys.prefix)')
stamp="$environment/.convbert_jax_requirements"
if [ "$(cat "$stamp" 2>/dev/null)" != "$requirements_sum" ]; then
  echo "Installing requirements.txt and requirements-test.txt into $environment (a minute or two, once)."
  python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-test.txt
  echo "$requirements_sum" >"$stamp"
fi
