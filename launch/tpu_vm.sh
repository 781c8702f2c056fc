#!/usr/bin/env bash
# TPU VMs by queued resources: v4, v5e, v5p, v6e, one host or many.
#
#   bash launch/tpu_vm.sh all --project=PROJECT --zone=ZONE --topology=v5e:4x4 --spot -- --config=configs/base.py --workdir=gs://BUCKET/base
#
# Verbs, exit codes and the order of things: launch/machines/command_line.sh. Options: --name, --project, --zone, --topology, --every (seconds between looks),
# --restarts, --spot, --reserved, --no-plan, --keep (do not delete at the end), --dry-run.
#
# Never run against the real service: written from the reference of gcloud (compute tpus queued-resources, compute tpus tpu-vm ssh and scp), and
# tested with commands that play it. Google develops this API no further; tpu7x is not in it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. launch/machines/command_line.sh
. launch/machines/hosts.sh

reserved=0
options="name project zone topology every restarts" switches="no-plan spot reserved keep dry-run"
read_command "plan create run watch stop delete all" "$@"
check_names
read_topology
plan_only
case $chip in # https://docs.cloud.google.com/tpu/docs/runtimes
  v4) version=tpu-ubuntu2204-base ;;
  v5e) version=v2-alpha-tpuv5-lite ;;
  v5p) version=v2-alpha-tpuv5 ;;
  v6e) version=v2-alpha-tpuv6e ;;
  *) fail 2 "--topology=$topology: TPU VMs have v4, v5e, v5p and v6e; take launch/gce.sh or launch/xpk.sh for $chip" ;;
esac
case $verb in run | all) check_workdir ;; esac
need_place
place=(--zone="$zone" --project="$project")

request_machine() {
  local tier=()
  if ((spot)); then tier=(--spot); elif ((reserved)); then tier=(--reserved); fi
  try gcloud compute tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$(accelerator_type)" \
    --runtime-version="$version" ${tier[@]+"${tier[@]}"} "${place[@]}"
}

machine_state() { # absent, waiting, ready or lost; in doubt, as when gcloud cannot ask, waiting
  local describe=(gcloud compute tpus queued-resources describe "$name" "${place[@]}" '--format=value(state.state)')
  if ((dry_run)); then
    show "${describe[@]}"
    return
  fi
  if ! try "${describe[@]}"; then
    if [ "$fault" = absent ]; then echo absent; else echo waiting; fi
    return
  fi
  case $(tail -n 1 <<<"$said") in
    ACTIVE) # of a node that is preempted the queue may hear later
      if try gcloud compute tpus tpu-vm describe "$name" "${place[@]}" '--format=value(state)'; then
        case $(tail -n 1 <<<"$said") in
          READY) echo ready ;;
          PREEMPTED | TERMINATED | STOPPED | DELETING) echo lost ;;
          *) echo waiting ;;
        esac
      elif [ "$fault" = absent ]; then echo lost; else echo waiting; fi
      ;;
    SUSPENDING | SUSPENDED | FAILED | DELETING) echo lost ;;
    *) echo waiting ;;
  esac
}

delete_machine() { try gcloud compute tpus queued-resources delete "$name" --force --quiet "${place[@]}"; }

on_hosts() { act gcloud compute tpus tpu-vm ssh "$name" --worker=all --command="$1" "${place[@]}"; }

copy_to_hosts() { act gcloud compute tpus tpu-vm scp "$1" "$name:convbert_jax.tar.gz" --worker=all "${place[@]}"; }

run_verb
