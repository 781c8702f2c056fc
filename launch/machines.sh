# shellcheck shell=bash
# Sourced, from the repository's root, by tpu_vm.sh, gce.sh, xpk.sh and slurm.sh: the grammar that they share, topologies of TPUs, what Google
# Cloud's faults mean, and, for those that reach their hosts by ssh (tpu_vm.sh, gce.sh), the way of a run over machines that are taken away:
#
#   SCRIPT VERB [--option=value …] [-- arguments of python -m convbert_jax.main]
#
#   plan     compile the program's step for the topology, on this machine: memory, time, network (docs/accelerators.md); asks no cloud
#   create   get the machine, wait for it, install the program on every host; a machine that is there is taken as it is
#   run      start the program on every host, follow it, start it again after exit code 75; Ctrl-C stops following, not the run
#   watch    follow a run that was started; delete   give the machine back
#   all      plan, and if it fits create and run, again when the machine is taken away, at most --restarts times; delete at the end, however it ends;
#            --no-plan asks for the machine at once
#
# --dry-run prints the exact commands and runs none. Exit codes: 0; 2 a wrong command line; 75 lost, the same line goes on; 1 else, or the run's own.
# A script names its `options` and `switches`, and defines the functions that it uses here: machine_state, request_machine, delete_machine,
# on_hosts COMMAND, copy_to_hosts FILE.

export CLOUDSDK_CORE_DISABLE_PROMPTS=1 # a question of gcloud would not be seen: what it says is kept, to be explained
verb='' arguments=() dry_run=0
name=convbert-jax project='' zone='' topology='' every=30 restarts=10
# shellcheck disable=SC2034 # the scripts read what theirs need
spot=0 keep=0 no_plan=0 reservation='' options='' switches=''

say() { echo "$(date +%H:%M:%S) $*" >&2; }

fail() { # CODE SENTENCE
  echo "error: $2" >&2
  exit "$1"
}

quote() { # words, as a shell reads them
  local word between=''
  for word; do
    if [[ ! $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then word="'${word//\'/\'\\\'\'}'"; fi
    printf '%s%s' "$between" "$word"
    between=' '
  done
}

show() { # a command, as it can be typed
  quote "$@"
  echo
}

act() { # runs a command, or, with --dry-run, prints it
  if ((dry_run)); then show "$@"; else "$@"; fi
}

read_command() { # the command line, into the variables above
  local verbs=$1 word field
  shift
  verb=${1:-}
  if [[ " $verbs " != *" $verb "* || -z $verb ]]; then
    fail 2 "'$verb' is none of: ${verbs// /, }; bash launch/${0##*/} all --dry-run shows what would be done, the head of launch/${0##*/} says the rest"
  fi
  shift
  while (($#)); do
    word=$1 field=${1%%=*} field=${field#--}
    shift
    if [ "$word" = -- ]; then
      arguments=("$@")
      return
    elif [[ $word == --*=* && " $options " == *" $field "* ]]; then
      printf -v "${field//-/_}" %s "${word#*=}"
    elif [[ $word == --* && $word != *=* && " $switches " == *" $field "* ]]; then
      printf -v "${field//-/_}" 1
    else
      fail 2 "$word is not understood; launch/${0##*/} has --${options// /=…, --}=…, --${switches// /, --}; what is for the program comes after a --"
    fi
  done
}

check_names() { # what every command line must have
  if [[ ! $name =~ ^[a-z]([-a-z0-9]{0,37}[a-z0-9])?$ ]]; then
    fail 2 "--name=$name: small letters, digits and dashes, a letter first, at most 39"
  fi
  if [[ ! $every =~ ^[0-9]+$ ]]; then fail 2 "--every=$every is not a number of seconds"; fi
  if [[ ! $restarts =~ ^[0-9]+$ ]]; then fail 2 "--restarts=$restarts is not a number"; fi
}

need_tool() { # NAME HINT
  if ! ((dry_run)) && ! command -v "$1" >/dev/null; then fail 1 "$1 is not installed here; $2"; fi
}

need_place() { # project and zone, from the command line or from gcloud's own settings
  need_tool gcloud "install the Google Cloud CLI and run: gcloud init"
  if ! ((dry_run)); then
    if [ -z "$project" ]; then project=$(gcloud config get-value project 2>/dev/null); fi
    if [ -z "$zone" ]; then zone=$(gcloud config get-value compute/zone 2>/dev/null); fi
  fi
  if [ -z "$project" ] || [ "$project" = "(unset)" ]; then fail 2 "no project; add --project=PROJECT or run: gcloud config set project PROJECT"; fi
  if [ -z "$zone" ] || [ "$zone" = "(unset)" ]; then fail 2 "no zone; add --zone=ZONE or run: gcloud config set compute/zone ZONE"; fi
  if [[ ! $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z0-9]+$ ]]; then fail 2 "--zone=$zone is not a zone, such as us-east5-a"; fi
}

# Topologies: v5e and v6e are flat, the others boxes. https://docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /v4, /tpu7x
FLAT="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"

read_topology() { # --topology=v5e:4x4: chip, shape, chips, hosts
  local sizes a b c
  chip=${topology%%:*} shape=${topology#*:}
  if [ -z "$topology" ]; then fail 2 "no topology; add --topology=v5e:4x4"; fi
  case $chip in
    v5e | v6e)
      if [[ " $FLAT " != *" $shape "* ]]; then fail 2 "--topology=$topology does not exist; $chip has ${FLAT// /, }"; fi
      ;;
    v4 | v5p | tpu7x)
      case $shape in
        2x2x1 | 2x2x2 | 2x2x4 | 2x4x4) ;;
        *)
          IFS=x read -r a b c <<<"$shape"
          if [[ ! $shape =~ ^[1-9][0-9]?x[1-9][0-9]?x[1-9][0-9]?$ ]] || ((a % 4 || b % 4 || c % 4 || a > b || b > c || c > 24)); then
            fail 2 "--topology=$topology does not exist; $chip has 2x2x1, 2x2x2, 2x2x4, 2x4x4 and boxes of multiples of 4 up to 24, the smaller first, such as 4x4x8"
          fi
          ;;
      esac
      ;;
    *) fail 2 "--topology=$topology: the chips are v4, v5e, v5p, v6e and tpu7x, as in v5e:4x4 or v5p:4x4x4" ;;
  esac
  sizes=${shape//x/ * }
  chips=$((sizes))
  hosts=$(((chips + 3) / 4))
  if [ "$shape" = 2x4 ]; then hosts=1; fi # one machine of eight chips
}

plan() { # what the run would take of the topology, before anything is asked for; by the Python that launch/environment.sh made, if none is active
  local python=${PYTHON:-python3}
  if [ -z "${PYTHON:-}${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
  act "$python" -m convbert_jax.main --mode=plan --topology="$topology" ${arguments[@]+"${arguments[@]}"}
}

plan_first() { # before `all` asks for anything
  if ((no_plan)); then return; fi
  if ! ((dry_run)); then say "The plan first, which takes minutes; --no-plan goes without."; fi
  plan || fail 1 "no plan that fits, as it says itself; nothing was asked of the cloud. --no-plan goes without one"
}

plan_only() { # the verb plan, which needs no place
  if [ "$verb" != plan ]; then return; fi
  plan
  exit
}

accelerator_type() { # as the TPU API and xpk call it: v4 and v5p count cores, two a chip
  case $chip in
    v5e) echo "v5litepod-$chips" ;;
    v6e) echo "v6e-$chips" ;;
    tpu7x) echo "tpu7x-$shape" ;;
    *) echo "$chip-$((2 * chips))" ;;
  esac
}

explain() { # TEXT of a command that failed: `fault`, one word, and `reason`, a sentence
  case $1 in
    *[Qq]uota*) fault=quota reason="the project's quota in $zone is used up or zero for this; ask for more on the console's page of quotas, or delete what is suspended or failed, which counts too" ;;
    *"no more capacity"* | *RESOURCE_POOL_EXHAUSTED* | *"does not have enough resources"* | *STOCKOUT*)
      fault=capacity reason="there is no capacity in $zone at the moment; another zone or topology may have some"
      ;;
    *ALREADY_EXISTS* | *"already exists"*) fault=exists reason="$name is there already" ;;
    *"gcloud auth login"* | *"active account"* | *UNAUTHENTICATED*) fault=login reason="gcloud knows no account; run: gcloud auth login" ;;
    *"Permission denied (publickey"*) fault=ssh reason="the host refuses the ssh key; run: gcloud compute config-ssh, and for several hosts: ssh-add ~/.ssh/google_compute_engine" ;;
    *"onnection timed out"* | *"onnection refused"* | *"onnection reset"* | *"No route to host"* | *"onnection closed"*)
      fault=unreachable reason="a host cannot be reached by ssh; does the network let port 22 in?"
      ;;
    *NOT_FOUND* | *"was not found"* | *"not found"*) fault=absent reason="$name is not there" ;;
    *PERMISSION_DENIED* | *"does not have permission"* | *"Required '"*) fault=permission reason="the account may not do this in $project; it needs the roles TPU Admin or Compute Instance Admin, and Service Account User" ;;
    *) fault=other reason=$(echo "$1" | grep -v '^ *$' | tail -n 1) ;;
  esac
}

try() { # a command of a cloud: its output in `said`; where it fails, `fault` and `reason`
  local code=0
  if ((dry_run)); then
    show "$@"
    said=''
    return
  fi
  said=$("$@" 2>&1) || code=$?
  if ((code != 0)); then explain "$said"; fi
  return "$code"
}

try_hosts() { # on_hosts or copy_to_hosts: a new host may not answer yet, and may be lost while it is asked: 75
  local tries
  for ((tries = 0; tries < 6; tries++)); do
    if try_once "$@"; then return; fi
    if [[ $fault != ssh && $fault != unreachable ]]; then fail 1 "$name: $reason"; fi
    case $(machine_state) in lost | absent) return 75 ;; esac
    sleep "$((every < 10 ? every : 10))"
  done
  fail 1 "$name: $reason"
}

try_once() {
  local code=0
  if ((dry_run)); then
    "$@"
    said=''
    return
  fi
  said=$("$@" 2>&1) || code=$?
  if ((code != 0)); then explain "$said"; fi
  return "$code"
}

# What the hosts are told. They keep the program in ~/convbert_jax, and of a run its process, log and exit code in ~/.convbert_jax.
install_text() { # libtpu is of the version that jax asks for, and not that of the lock
  # shellcheck disable=SC2016 # for the host to expand
  echo 'set -e; cd; mkdir -p convbert_jax; tar -xzf convbert_jax.tar.gz -C convbert_jax; cd convbert_jax;' \
    'PATH=$HOME/.local/bin:$PATH; command -v uv >/dev/null || python3 -m pip install --quiet --user uv;' \
    '[ -x .venv/bin/python ] || uv venv --quiet --python 3.12 .venv;' \
    'grep -v "^libtpu==" requirements-3.12.lock >.venv/versions;' \
    'VIRTUAL_ENV=$PWD/.venv uv pip install --quiet --constraint .venv/versions ".[tpu,buckets]"'
}

start_text() {
  local program
  program=$(quote .venv/bin/python -m convbert_jax.main "$@")
  # shellcheck disable=SC2016
  printf 'cd ~/convbert_jax || exit 1; mkdir -p ~/.convbert_jax; cd ~/.convbert_jax || exit 1; '
  # shellcheck disable=SC2016
  printf 'if [ -s process ] && kill -0 "$(cat process)" 2>/dev/null; then echo "a run is on this host already"; exit 0; fi; '
  # shellcheck disable=SC2016
  printf 'rm -f process exit; [ ! -e log ] || mv log log.before; cd ~/convbert_jax; nohup setsid bash -c %s </dev/null >/dev/null 2>&1 & ' \
    "$(quote "$program >~/.convbert_jax/log 2>&1 & echo \$! >~/.convbert_jax/process; wait \$!; echo \$? >~/.convbert_jax/exit")"
  printf 'for i in 1 2 3 4 5 6 7 8 9 10; do [ -s ~/.convbert_jax/process ] && break; sleep 0.2; done'
}

# A process that is gone without an exit code, as after a reboot, was lost, and one that a signal stopped, as before a machine is taken away, has
# saved and is not done: 75. The code is written a moment after the process is gone, so it is waited for, and looked for after the process.
# shellcheck disable=SC2016
state_text='cd ~/.convbert_jax 2>/dev/null || { echo "state=none"; exit 0; }; if [ ! -s exit ] && kill -0 "$(cat process)" 2>/dev/null; then echo "state=running"; else for i in 1 2 3 4 5 6 7 8 9 10; do [ -s exit ] && break; sleep 0.5; done; if [ ! -s exit ] || tail -n 20 log | grep -q "Stopped by SIG"; then echo "state=75"; else echo "state=$(cat exit)"; fi; fi; tail -n 1 log'
# shellcheck disable=SC2016
stop_text='cd ~/.convbert_jax 2>/dev/null || exit 0; kill -TERM "$(cat process)" 2>/dev/null; for i in $(seq 120); do [ -s exit ] && break; sleep 1; done'
log_text='tail -n 20 ~/.convbert_jax/log'

check_workdir() { # the disk of a machine that is taken away goes with it, and hosts must see one folder
  local word
  if [ "$verb" != all ] && ((hosts == 1)); then return; fi
  for word in ${arguments[@]+"${arguments[@]}"}; do
    case $word in --workdir=gs://* | --workdir=/*) return ;; esac
  done
  fail 2 "no --workdir that outlives the machine and that all hosts see; add -- --workdir=gs://BUCKET/RUN, or the path of a shared disk"
}

create() { # 75: it was taken away meanwhile
  local state archive code=0
  state=$(if ((dry_run)); then echo absent; else machine_state; fi)
  if [ "$state" = lost ]; then
    say "$name was taken away; what is left of it is deleted."
    delete_machine || fail 1 "$name: $reason"
    state=absent
  fi
  if [ "$state" = absent ]; then
    say "Asking for $name: $topology, $chips chips, $hosts hosts, in $zone."
    until request_machine || [ "$fault" = exists ]; do # capacity may come at any time; Ctrl-C ends the wait
      if [ "$fault" != capacity ]; then fail 1 "$name: $reason"; fi
      say "$reason; asking again in $every s."
      sleep "$every"
    done
  else
    say "$name is there already ($state); it is taken as it is."
  fi
  if ((dry_run)); then machine_state; fi
  while ! ((dry_run)); do
    state=$(machine_state)
    case $state in
      ready) break ;;
      waiting) sleep "$every" ;;
      *)
        say "$name: $state before it was ready."
        return 75
        ;;
    esac
  done
  say "Installing the program on $hosts hosts."
  if ((dry_run)); then
    archive=convbert_jax.tar.gz
    echo "git ls-files -z | tar --null -T - -czf $archive"
  else
    archive=$(mktemp "${TMPDIR:-/tmp}/convbert_jax.XXXXXX")
    if ! { git ls-files -z | tar --null -T - -czf "$archive"; }; then fail 1 "the program could not be packed; start this from a git checkout"; fi
  fi
  try_hosts copy_to_hosts "$archive" || code=$?
  if ! ((dry_run)); then rm -f "$archive"; fi
  if ((code != 0)); then return "$code"; fi
  try_hosts on_hosts "$(install_text)"
}

start() {
  local words=(${arguments[@]+"${arguments[@]}"})
  if ((hosts > 1)); then words+=(--multihost); fi
  say "Starting the program on $hosts hosts."
  try_hosts on_hosts "$(start_text "${words[@]}")"
}

follow() { # until it has ended; its exit code, or 75 when the machine was taken away
  local states code again shown='' line
  if ((dry_run)); then
    on_hosts "$state_text"
    return
  fi
  while :; do
    case $(machine_state) in
      lost | absent)
        say "$name was taken away."
        return 75
        ;;
    esac
    try_hosts on_hosts "$state_text" || return
    states=$(grep -o 'state=[a-z0-9]*' <<<"$said")
    line=$(grep -v "state=" <<<"$said" | tail -n 1)
    if [ "$line" != "$shown" ]; then say "$line"; fi
    shown=$line again=0
    if grep -q none <<<"$states"; then
      if [ "$verb" = watch ]; then fail 1 "$name: no run was started there; take the verb run"; fi
      say "$name: a host was made anew."
      return 75
    fi
    for code in ${states//[^0-9]/ }; do # an error of its own ends the run, a host that was lost does not
      if ((code == 75 || code > 128)); then again=1; elif ((code != 0)); then
        on_hosts "$log_text" >&2
        echo "error: $name: the program ended with exit code $code; its last lines are above." >&2
        return "$code"
      fi
    done
    if [ "$(wc -l <<<"$states")" -ge "$hosts" ] && ! grep -q running <<<"$states"; then
      if ((again)); then return 75; fi
      say "$name: the run has ended."
      return 0
    fi
    sleep "$every"
  done
}

go_on() { # FUNCTION: as often as --restarts says
  local code restarted
  for ((restarted = 0; ; restarted++)); do
    code=0
    "$1" || code=$?
    if ((code != 75)); then return "$code"; fi
    if ((restarted >= restarts)); then
      echo "error: $name was lost $((restarted + 1)) times, and --restarts=$restarts; the same line goes on from the last checkpoint." >&2
      return 75
    fi
    say "Going on from the last checkpoint, restart $((restarted + 1)) of $restarts."
    sleep "$every"
  done
}

start_and_follow() { start && follow; }

create_and_run() { create && start && follow; }

give_back() {
  trap '' INT TERM HUP
  if ! ((keep)) && ! delete_machine && [ "$fault" != absent ]; then
    echo "error: $name could not be deleted and may cost money: $reason; try: bash launch/${0##*/} delete --name=$name --project=$project --zone=$zone --topology=$topology" >&2
  fi
}

stop_and_give_back() { # Ctrl-C, and a terminal that is closed
  trap '' INT TERM HUP
  say "Stopping: the run saves first."
  try_once on_hosts "$stop_text" || true
  exit 130 # and give_back
}

run_verb() {
  case $verb in
    create) create ;;
    run)
      trap 'say "No longer followed; the run goes on. See it by the verb watch."; exit 130' INT
      go_on start_and_follow
      ;;
    watch) follow ;;
    delete)
      if delete_machine; then return; fi
      if [ "$fault" != absent ]; then fail 1 "$name: $reason"; fi
      say "$reason."
      ;;
    all)
      plan_first
      trap give_back EXIT
      trap stop_and_give_back INT TERM HUP
      go_on create_and_run
      ;;
  esac
}
