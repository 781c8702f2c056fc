#!/usr/bin/env bash
# Runs the program as N processes on this machine, as N hosts would: bash launch/local_cluster.sh 2 --config=configs/tiny.py
# One prepares what is to be learned from, then all begin. They compute on the CPU and speak by gloo. Process 0 is seen on the terminal, the others write into files in LOCAL_CLUSTER_LOGS (default: a new
# temporary folder), whose last lines are shown when they fail. Ctrl-C and SIGTERM go to all; when one ends with an error, the others get 60
# seconds to end too. The exit code is that of the run: that of its error, before all others; 75 if it was stopped or a process was lost, start
# again and it goes on; 130 after Ctrl-C; 0.
set -euo pipefail
cd "$(dirname "$0")/.."

count=${1:-}
if [[ ! $count =~ ^[1-9][0-9]?$ ]]; then
  echo "error: '$count' is not a number of processes from 1 to 99; bash launch/local_cluster.sh 2 --config=configs/tiny.py" >&2
  exit 2
fi
shift
. launch/environment.sh

patience=60 # seconds for the others to end after one of them has
port=$(python -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
logs=${LOCAL_CLUSTER_LOGS:-$(mktemp -d "${TMPDIR:-/tmp}/convbert_jax.XXXXXX")}
mkdir -p "$logs"
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo

guard=() # where the system has it: a process ends, saving, also when this script is killed and can tell nobody
if command -v setpriv >/dev/null; then guard=(setpriv --pdeathsig TERM --); fi

if [[ " $* " != *" --mode="* || " $* " == *" --mode=train "* ]]; then # none of several prepares while the others wait
  ${guard[@]+"${guard[@]}"} python -m convbert_jax.main "$@" --mode=prepare </dev/null || exit
fi

pids=() codes=()
end_all() { # SIGNAL: to all that run
  local pid
  for pid in "${pids[@]}"; do kill "-$1" "$pid" 2>/dev/null || true; done
}
told=
trap 'end_all KILL' EXIT
trap 'told=INT; end_all INT' INT
trap 'told=TERM; end_all TERM' TERM HUP

echo "Starting $count processes at localhost:$port; what all but process 0 say: $logs" >&2
set -m # a group for each process: a terminal's Ctrl-C comes to this script alone, which hands it on
for ((index = 0; index < count; index++)); do
  command=(${guard[@]+"${guard[@]}"} python -m convbert_jax.main "$@" "--coordinator=localhost:$port" "--processes=$count" "--process=$index")
  if ((index == 0)); then
    "${command[@]}" </dev/null &
  else
    "${command[@]}" </dev/null >"$logs/process-$index.log" 2>&1 &
  fi
  pids+=($!)
done

deadline=
while :; do
  running=0
  for ((index = 0; index < count; index++)); do
    if [ -n "${codes[index]:-}" ]; then continue; fi
    if kill -0 "${pids[index]}" 2>/dev/null; then
      running=$((running + 1))
      continue
    fi
    code=0
    wait "${pids[index]}" 2>/dev/null || code=$?
    codes[index]=$code
    if ((code != 0)) && [ -z "$deadline" ]; then deadline=$((SECONDS + patience)); fi
  done
  if ((running == 0)); then break; fi
  if [ -n "$deadline" ] && ((SECONDS > deadline)); then
    echo "error: $running of $count processes go on $patience s after another has ended; they are killed." >&2
    end_all KILL
    deadline=$((SECONDS + patience))
  fi
  sleep 0.2 || true # a signal may end it
done
trap - EXIT

result=0 lost=
for ((index = 0; index < count; index++)); do
  code=${codes[index]}
  if ((code == 0)); then continue; fi
  if [ -n "$told" ] && ((code == 75 || code == 130)); then # as it was told to
    lost=1
    continue
  fi
  if ((index > 0)); then
    echo "--- process $index ended with exit code $code; the last lines of $logs/process-$index.log:" >&2
    tail -n 5 "$logs/process-$index.log" >&2
  else
    echo "--- process 0 ended with exit code $code; what it said is above." >&2
  fi
  if ((code == 75 || code > 128)); then lost=1; elif ((result == 0)); then result=$code; fi
done
if ((result == 0)) && [ -n "$lost" ]; then
  result=75
  if [ -z "$told" ]; then
    echo "error: a process was lost; start the same command again, the run goes on from its last checkpoint." >&2
  elif [ "$told" = INT ]; then
    result=130
  fi
fi
exit "$result"
