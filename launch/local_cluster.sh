#!/usr/bin/env bash
# Trains with N processes on this machine, as N hosts would: bash launch/local_cluster.sh 2 --config=configs/tiny.py
# One process prepares the data, then all start; they compute on the CPU and communicate by gloo. Process 0 writes to the terminal, the others to
# log files in LOCAL_CLUSTER_LOGS (default: a new temporary folder). Ctrl-C and SIGTERM go to all of them. After one has failed, the others have
# 60 seconds to exit. Exit code: that of an error; else 75 if a process was stopped or lost (run it again to continue), 130 after Ctrl-C, or 0.
set -euo pipefail
cd "$(dirname "$0")/.."

count=${1:-}
if [[ ! $count =~ ^[1-9][0-9]?$ ]]; then
  echo "error: The number of processes must be from 1 to 99: '$count'. Example: bash launch/local_cluster.sh 2 --config=configs/tiny.py" >&2
  exit 2
fi
shift
. launch/environment.sh

patience=60 # seconds
port=$(python -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
logs=${LOCAL_CLUSTER_LOGS:-$(mktemp -d "${TMPDIR:-/tmp}/convbert_jax.XXXXXX")}
mkdir -p "$logs"
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
program=(python -m convbert_jax.main "$@")
# Where setpriv exists, a process receives SIGTERM and saves when this script is killed.
if command -v setpriv >/dev/null; then program=(setpriv --pdeathsig TERM -- "${program[@]}"); fi
if [[ " $* " != *" --mode="* || " $* " == *" --mode=train "* ]]; then
  "${program[@]}" --mode=prepare </dev/null || exit
fi

pids=() codes=() told=''
signal_all() { kill "-$1" ${pids[@]+"${pids[@]}"} 2>/dev/null || true; }
trap 'signal_all KILL' EXIT
trap 'told=INT; signal_all INT' INT
trap 'told=TERM; signal_all TERM' TERM HUP

echo "Starting $count processes at localhost:$port; logs of processes 1 to $((count - 1)): $logs" >&2
set -m # each process in its own group: Ctrl-C reaches this script alone, which forwards it once
for ((index = 0; index < count; index++)); do
  command=("${program[@]}" "--coordinator=localhost:$port" "--processes=$count" "--process=$index")
  if ((index == 0)); then
    "${command[@]}" </dev/null &
  else
    "${command[@]}" </dev/null >"$logs/process-$index.log" 2>&1 &
  fi
  pids+=($!)
done

deadline=0 running=$count
until ((running == 0)); do
  sleep 0.2 || true # a signal may interrupt it
  running=0
  for index in "${!pids[@]}"; do
    if [ -n "${codes[index]:-}" ]; then continue; fi
    if kill -0 "${pids[index]}" 2>/dev/null; then
      running=$((running + 1))
      continue
    fi
    codes[index]=0
    wait "${pids[index]}" 2>/dev/null || codes[index]=$?
    if ((codes[index] && !deadline)); then deadline=$((SECONDS + patience)); fi
  done
  if ((running && deadline && SECONDS > deadline)); then
    echo "error: Killing $running of $count processes, which still run $patience s after one has failed." >&2
    signal_all KILL
    deadline=$((SECONDS + patience))
  fi
done
trap - EXIT

error=0 lost=0
for index in "${!codes[@]}"; do
  code=${codes[index]}
  if ((code == 0)); then continue; fi
  if ((code == 75 || code > 128)); then lost=1; elif ((error == 0)); then error=$code; fi
  if [ -n "$told" ] && ((code == 75 || code == 130)); then continue; fi
  echo "--- Process $index exited with code $code." >&2
  if ((index > 0)); then tail -n 5 "$logs/process-$index.log" >&2; fi
done
if ((error || !lost)); then exit "$error"; fi
if [ "$told" = INT ]; then exit 130; fi
if [ -z "$told" ]; then echo "error: A process was lost. Run the same command again to continue from the last checkpoint." >&2; fi
exit 75
