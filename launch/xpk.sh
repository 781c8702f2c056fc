#!/usr/bin/env bash
# TPUs of Google Kubernetes Engine by xpk: v4, v5e, v5p, v6e, tpu7x, one slice or several; the cluster starts the run again by itself.
#
#   bash launch/xpk.sh all --project=PROJECT --zone=ZONE --topology=v5p:4x4x4 --spot -- --config=configs/base.py --workdir=gs://BUCKET/base
#
# Verbs and exit codes: launch/machines.sh. `create` makes a cluster, `delete` takes it away with the run; with --cluster=NAME the cluster is one that
# is there, and both leave it alone. Options: --name, --project, --zone, --topology, --slices, --cluster, --restarts, --spot, --reservation=NAME,
# --image (a container with the program; default: python:3.12, to which xpk adds this folder, installed when it starts), --no-plan, --keep, --dry-run.
#
# Never run against the real service: written from xpk's own parser and pages (github.com/AI-Hypercomputer/xpk), and tested with a command that
# plays it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. launch/machines.sh

cluster='' slices=1 image=''
options="name project zone topology slices cluster restarts reservation image" switches="no-plan spot keep dry-run"
read_command "plan create run watch delete all" "$@"
check_names
read_topology
plan_only
if [[ ! $slices =~ ^[1-9][0-9]*$ ]]; then fail 2 "--slices=$slices is not a number of slices"; fi
hosts=$((hosts * slices))
case $verb in run) hosts=2 check_workdir ;; all) check_workdir ;; esac # a container's disk never outlives it
need_place
need_tool xpk "pip install xpk"
ours=1
if [ -n "$cluster" ]; then ours=0; else cluster=$name; fi
place=(--cluster="$cluster" --zone="$zone" --project="$project")
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
  program=$(quote python -m convbert_jax.main ${arguments[@]+"${arguments[@]}"} --multihost)
  # A node that is taken away sends TERM: the program saves and ends well, and yet the run is not done.
  program="stopped=; trap 'stopped=1; kill -TERM \$program' TERM; $program & program=\$!; code=0; wait \$program || code=\$?"
  program+="; while kill -0 \$program 2>/dev/null; do code=0; wait \$program || code=\$?; done; [ -z \"\$stopped\" ] || code=75; exit \$code"
  # xpk starts again after 127 to 255 as it is, and saves take longer than the 30 seconds that a container gets.
  if ! try xpk workload create --workload="$name" "${place[@]}" "${size[@]}" "${from[@]}" --max-restarts="$restarts" \
    --restart-on-exit-codes=75 --termination-grace-period-seconds=120 --command="$install$program"; then
    if [ "$fault" = exists ]; then reason="a run of this name is in the cluster; follow it by the verb watch, or delete it"; fi
    fail 1 "$name: $reason"
  fi
  if ! ((dry_run)); then say "$name is in the queue of $cluster; Ctrl-C stops following, not the run."; fi
}

follow_workload() { # xpk: 0 done, 125 it failed, 124 a week has passed
  local code=0 list=(xpk workload list "${place[@]}" --wait-for-job-completion="$name")
  if ((dry_run)); then
    show "${list[@]}"
    return
  fi
  "${list[@]}" || code=$?
  case $code in
    0) say "$name: the run has ended." ;;
    125)
      echo "error: $name: the run failed, after $restarts restarts if they could help; its log is in the cluster's, or: kubectl logs -l jobset.sigs.k8s.io/jobset-name=$name" >&2
      return 1
      ;;
    *)
      echo "error: $name: xpk cannot follow it (exit code $code); the run goes on, follow it by the verb watch." >&2
      return 1
      ;;
  esac
}

delete_all() {
  local code=0
  try xpk workload delete --workload="$name" "${place[@]}" --force || [ "$fault" = absent ] || code=1
  if ((ours)); then try xpk cluster delete "${place[@]}" --quiet || [ "$fault" = absent ] || code=1; fi
  if ((code)); then echo "error: $name could not be deleted and may cost money: $reason" >&2; fi
  return "$code"
}

case $verb in
  create) request_cluster ;;
  run) submit && follow_workload ;;
  watch) follow_workload ;;
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
