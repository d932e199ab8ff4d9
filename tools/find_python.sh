#!/usr/bin/env bash
# Prints the path of a Python that can make perslot's .venv; if there is none, says what is missing.
set -euo pipefail

# Prints where an interpreter lies, if it runs and can make a virtual environment. It has to be run:
# a pyenv shim is on PATH even for a version that pyenv then refuses to start.
usable() {
  "$1" -c '
import sys
if sys.version_info < (3, 12):
    sys.exit("Python %d.%d is older than 3.12" % sys.version_info[:2])
import ensurepip, venv
print(sys.executable)'
}

# 3.12 comes first, as the version perslot is tested with.
candidates() {
  type -ap python3.12 python3.13 python3 || true
  local versions=${PYENV_ROOT:-~/.pyenv}/versions
  printf '%s\n' "$versions"/3.12*/bin/python "$versions"/3.13*/bin/python "$versions"/*/bin/python
}

if [[ -n "${PYTHON:-}" ]]; then
  usable "$PYTHON" && exit
  echo "perslot: PYTHON=$PYTHON is not a working Python >= 3.12 with venv and ensurepip." >&2
  exit 1
fi

while read -r candidate; do
  usable "$candidate" 2>/dev/null && exit
done < <(candidates)

cat >&2 <<'END'
perslot: no Python >= 3.12 found.
Looked for python3.12, python3.13 and python3 on PATH, then in pyenv's versions folder.
Install Python 3.12 with its venv module (on Debian or Ubuntu, the package python3.12-venv), or name
an interpreter: make setup PYTHON=/path/to/python3.12
END
exit 1
