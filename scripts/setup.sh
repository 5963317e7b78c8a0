#!/usr/bin/env bash
# Everything that `make demo` and `make test` need, from a fresh machine: uv, Debian packages, the locked environment.
# Safe to run again; takes a minute the first time (about 10 GB: stock sglang) and a second after that.
set -euo pipefail
cd "$(dirname "$0")/.."

debian=(libibverbs1 libnuma1)
missing=()
for package in "${debian[@]}"; do
  ldconfig -p | grep -q "${package%1}.so.1" || missing+=("$package")
done
if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "error: Mooncake needs the system packages ${missing[*]}; install them as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
fi

if ! command -v uv >/dev/null; then
  python3 -m pip install --quiet --root-user-action=ignore uv ||
    { echo "error: uv is missing and pip could not install it; see https://docs.astral.sh/uv/" >&2; exit 1; }
fi

# Compiled files make engines start in half the time.
unset PYTHONDONTWRITEBYTECODE
stamp=.venv/.synced
if [[ ! -f $stamp || uv.lock -nt $stamp || pyproject.toml -nt $stamp ]]; then
  uv sync --frozen --extra operator --extra sender --quiet
  touch "$stamp"
fi
