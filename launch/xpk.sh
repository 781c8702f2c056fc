#!/usr/bin/env bash
# TPUs of Google Kubernetes Engine by xpk: v4, v5e, v5p, v6e, tpu7x, one slice or several; the cluster starts the run again by itself.
#
#   bash launch/xpk.sh all --project=PROJECT --zone=ZONE --topology=v5p:4x4x4 --spot -- --config=configs/base.py --workdir=gs://BUCKET/base
#
# Verbs and exit codes: launch/machines/command_line.sh. `create` makes a cluster, `stop` takes the run out of it, which saves first, `delete` takes
# away both; with --cluster=NAME the cluster is one that is there, and stays. Options: --name, --project, --zone, --topology, --slices (of that
# topology), --cluster, --every (seconds between looks after one has failed), --restarts, --spot, --reservation=NAME,
# --image (a container with the program; default: python:3.12, to which xpk adds this folder, installed when it starts), --no-plan, --keep, --dry-run.
#
# Never run against the real service: written from xpk's own parser and pages (github.com/AI-Hypercomputer/xpk), and tested with a command that
# plays it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. launch/machines/command_line.sh

cluster='' image=''
options="name project zone topology slices cluster every restarts reservation image" switches="no-plan spot keep dry-run"
read_command "plan create run watch stop delete all" "$@"
check_names
read_topology
if [[ ! $slices =~ ^[1-9][0-9]*$ ]]; then fail 2 "--slices=$slices is not a number of slices"; fi
plan_only
hosts=$((hosts * slices))
case $verb in run) hosts=2 check_workdir ;; all) check_workdir ;; esac # a container's disk never outlives it
need_place
need_tool xpk "pip install xpk"
ours=1
if [ -n "$cluster" ]; then ours=0; else cluster=$name; fi
place=(--cluster="$cluster" --zone="$zone" --project="$project")
grace=120 # seconds for the program to save
size=(--tpu-type="$(accelerator_type)" --num-slices="$slices")

request_cluster() {
  local capacity=(--on-demand)
  if ((spot)); then capacity=(--spot); elif [ -n "$reservation" ]; then capacity=(--reservation="$reservation"); fi
  if ! ((ours)); then
    say "The cluster $cluster is taken as it is."
  elif ! try xpk cluster create "${place[@]}" "${size[@]}" "${capacity[@]}" && [ "$fault" != exists ]; then
    fail 1 "$cluster: $reason"
  fi
}

submit() {
  local program from=(--docker-image="$image") install=''
  if [ -z "$image" ]; then
    from=(--base-docker-image=python:3.12 --script-dir=.)
    install="grep -v '^libtpu==' requirements-3.12.lock >versions && pip install --quiet --constraint versions '.[tpu,buckets]' || exit; "
  fi
  # In place of the shell, so that the TERM of a node that is taken away comes to the program, and its exit code to the cluster.
  program="exec $(quote python -m convbert_jax.main ${arguments[@]+"${arguments[@]}"} --multihost)"
  # xpk starts again after 127 to 255 as it is, and saves take longer than the 30 seconds that a container gets. Of several codes the first counts:
  # the program ends on all hosts with that of the one that has erred.
  if ! try xpk workload create --workload="$name" "${place[@]}" "${size[@]}" "${from[@]}" --max-restarts="$restarts" \
    --restart-on-exit-codes=75 --termination-grace-period-seconds="$grace" --command="$install$program"; then
    if [ "$fault" = exists ]; then reason="a run of this name is in the cluster; follow it by the verb watch, or delete it"; fi
    fail 1 "$name: $reason"
  fi
  if ! ((dry_run)); then say "$name is in the queue of $cluster; Ctrl-C stops following, not the run."; fi
}

follow_workload() { # xpk: 0 done, 125 it failed, 124 a week has passed; else it cannot tell, and what was just submitted goes on all the same
  local code looks=60 tries=0 list=(xpk workload list "${place[@]}" --wait-for-job-completion="$name")
  if ((dry_run)); then
    show "${list[@]}"
    return
  fi
  while :; do
    code=0
    "${list[@]}" || code=$?
    case $code in
      0)
        say "$name: the run has ended."
        return
        ;;
      124) tries=0 ;;
      125)
        echo "error: $name: the run failed, after $restarts restarts if they could help; its log is in the cluster's, or: kubectl logs -l jobset.sigs.k8s.io/jobset-name=$name" >&2
        return 1
        ;;
      *)
        if [ "$verb" = watch ] || ((++tries >= looks)); then
          echo "error: $name: xpk cannot follow it (exit code $code)." >&2
          return 1
        fi
        say "$name cannot be seen now (exit code $code of xpk)."
        sleep "$every"
        ;;
    esac
  done
}

take_out() { try xpk workload delete --workload="$name" "${place[@]}" --force; }

wait_for_end() { # of what was taken out: it is told by TERM, and has its time to save
  try kubectl wait --for=delete pods --selector="jobset.sigs.k8s.io/jobset-name=$name" --timeout="$((grace + 60))s" ||
    [[ $said == *"no matching resources"* ]]
}

delete_all() {
  local code=0
  if take_out; then
    wait_for_end || say "What was learned since the last checkpoint may be lost: $reason."
  elif [ "$fault" != absent ]; then
    code=1
  fi
  if ((ours)); then try xpk cluster delete "${place[@]}" --quiet || [ "$fault" = absent ] || code=1; fi
  if ((code)); then echo "error: $name could not be deleted and may cost money: $reason" >&2; fi
  return "$code"
}

case $verb in
  create)
    plan_first
    request_cluster
    ;;
  run) submit && follow_workload ;;
  watch) follow_workload ;;
  stop)
    { take_out && wait_for_end; } || fail 1 "$name could not be stopped: $reason"
    if ! ((dry_run)); then say "$name: nothing runs there any more; the verb run goes on from the last checkpoint."; fi
    ;;
  delete) delete_all ;;
  all)
    plan_first
    if ! ((keep)); then
      trap 'trap "" INT TERM; delete_all' EXIT
      trap 'exit 130' INT TERM
    fi
    request_cluster && submit && follow_workload
    ;;
esac
