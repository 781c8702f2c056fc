# shellcheck shell=bash
# Sourced by tpu_vm.sh and gce.sh after launch/machines/command_line.sh: the way of a run over machines that are reached by ssh and taken away.
# A script defines what this asks of its cloud: machine_state, request_machine, delete_machine, on_hosts COMMAND, copy_to_hosts FILE.

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
install_text() { # libtpu is of the version that jax asks for, and not that of the lock. pip of Ubuntu 24.04 has to be told that uv may lie there
  # shellcheck disable=SC2016 # for the host to expand
  echo 'set -e; cd; mkdir -p convbert_jax; tar -xzf convbert_jax.tar.gz -C convbert_jax; cd convbert_jax;' \
    'PATH=$HOME/.local/bin:$PATH; command -v uv >/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv;' \
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
  printf 'rm -f process exit stopped; [ ! -e log ] || mv log log.before; cd ~/convbert_jax; nohup setsid bash -c %s </dev/null >/dev/null 2>&1 & ' \
    "$(quote "$program >~/.convbert_jax/log 2>&1 & echo \$! >~/.convbert_jax/process; wait \$!; echo \$? >~/.convbert_jax/exit")"
  printf 'for i in 1 2 3 4 5 6 7 8 9 10; do [ -s ~/.convbert_jax/process ] && break; sleep 0.2; done'
}

# A process that is gone without an exit code, as after a reboot, was lost: 75. The code is written a moment after the process is gone, so it is
# waited for, and looked for after the process.
# shellcheck disable=SC2016
state_text='cd ~/.convbert_jax 2>/dev/null || { echo "state=none"; exit 0; }; if [ ! -s exit ] && kill -0 "$(cat process)" 2>/dev/null; then echo "state=running"; else for i in 1 2 3 4 5 6 7 8 9 10; do [ -s exit ] && break; sleep 0.5; done; code=$(cat exit 2>/dev/null); if [ -e stopped ] && [ "$code" = 75 ]; then echo "state=stopped"; else echo "state=${code:-75}"; fi; fi; tail -n 1 log'
patience=300 # seconds for the program to save
# It is told once: a second SIGTERM would end it without saving.
# shellcheck disable=SC2016
stop_text='cd ~/.convbert_jax 2>/dev/null || exit 0; is_running() { [ ! -s exit ] && kill -0 "$(cat process)"; } 2>/dev/null; if is_running && [ ! -e stopped ]; then touch stopped; kill -TERM "$(cat process)"; fi; for i in $(seq '$patience'); do is_running || break; sleep 1; done'
log_text='tail -n 20 ~/.convbert_jax/log'

check_checkout() { # the hosts get what git lists; said before anything is asked for. What lies elsewhere they may see or not
  local word file
  if ((dry_run)); then return; fi
  if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    fail 1 "$PWD is no git checkout, by which the program is packed for the hosts; clone the repository, or: git init && git add ."
  fi
  for word in ${arguments[@]+"${arguments[@]}"}; do
    file=${word#*=}
    case $word in
      --config=*) file=${file%%:*} ;;
      --config.init_from=* | --config.tokenizer.path=* | --config.parallel.target_vocabulary=* | --config.distillation.teacher=*) ;;
      *) continue ;;
    esac
    if [[ $file != /* && -e $file ]] && ! git ls-files --error-unmatch -- "$file" >/dev/null 2>&1; then
      fail 2 "$word: git does not list $file, so the hosts would not get it; git add $file first, or name a path that they see"
    fi
  done
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
  local states code again shown='' line seen=0 unseen=0 looks=60
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
    if ! ((seen)); then
      try_hosts on_hosts "$state_text" || return
    elif ! try_once on_hosts "$state_text"; then # it goes on whether it is seen or not: a network here that is down ends nothing there
      if ((++unseen > looks)); then fail 1 "$name: $looks looks at it in a row have failed: $reason"; fi
      say "$name cannot be seen now: $reason"
      sleep "$every"
      continue
    fi
    seen=1 unseen=0
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
      if grep -q stopped <<<"$states"; then fail 75 "$name: the run was stopped; the verb run goes on from its last checkpoint"; fi
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

stop() { # SIGTERM to the program on every host; when it has not saved, `reason` says why
  local states
  try_once on_hosts "$stop_text" && try_once on_hosts "$state_text" || return
  states=$(grep -o 'state=[a-z0-9]*' <<<"$said")
  case $states in
    *running*) reason="the program goes on after $patience s" ;;
    *=75* | *=137*) reason="the program was lost before it could save" ;;
    *) return 0 ;;
  esac
  return 1
}

is_ready() { # whether there are hosts to talk to
  if ((dry_run)); then machine_state; else [ "$(machine_state)" = ready ]; fi
}

stop_if_ready() { # before the machine goes
  if is_ready; then
    say "Stopping the program on $hosts hosts: it saves first."
    stop || say "What was learned since the last checkpoint is lost: $reason."
  fi
}

give_back() { # at the end of `all`
  local code=$?
  trap '' INT TERM HUP
  if ((code)); then stop_if_ready; fi # it may still run
  if ! ((keep)) && ! delete_machine && [ "$fault" != absent ]; then
    echo "error: $name could not be deleted and may cost money: $reason; try: bash launch/${0##*/} delete --name=$name --project=$project --zone=$zone --topology=$topology" >&2
  fi
}

run_verb() {
  case $verb in create | all) check_checkout ;; esac
  case $verb in
    create)
      plan_first
      create
      ;;
    run)
      trap 'say "No longer followed; the run goes on. See it by the verb watch."; exit 130' INT
      go_on start_and_follow
      ;;
    watch) follow ;;
    stop)
      if ! is_ready; then fail 1 "$name is not there, or not ready: nothing runs there that could be stopped"; fi
      stop || fail 1 "$name: $reason; what was saved before stays"
      if ! ((dry_run)); then say "$name: nothing runs there any more; the verb run goes on from the last checkpoint."; fi
      ;;
    delete)
      stop_if_ready
      if delete_machine; then return; fi
      if [ "$fault" != absent ]; then fail 1 "$name: $reason"; fi
      say "$reason."
      ;;
    all)
      plan_first
      trap give_back EXIT
      trap 'exit 130' INT TERM HUP # and give_back
      go_on create_and_run
      ;;
  esac
}
