#!/usr/bin/env bash
# TPUs of Compute Engine: v5p, v6e, tpu7x; one VM, or a managed instance group with a topology.
#
#   bash launch/gce.sh all --project=PROJECT --zone=ZONE --topology=v6e:4x4 --spot -- --config=configs/base.py --workdir=gs://BUCKET/base
#
# Verbs, exit codes and the order of things: launch/machines/command_line.sh. Options: --name, --project, --zone, --topology, --every (seconds between looks),
# --restarts, --spot, --reservation=NAME, --no-plan, --keep (do not delete at the end), --dry-run.
#
# Never run against the real service: written from the pages on TPUs in Compute Engine (docs.cloud.google.com/compute/docs/tpus) and the reference
# of gcloud, of which it must be a version with --target-size-policy-mode, and tested with commands that play it. That jax finds the hosts of a
# group by itself, as on TPU VMs, is not confirmed: if --multihost says that not all processes came, that is the place to look.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. launch/machines/command_line.sh
. launch/machines/hosts.sh

options="name project zone topology every restarts reservation" switches="no-plan spot keep dry-run"
read_command "plan create run watch stop delete all" "$@"
check_names
read_topology
plan_only
per_host=4
if ((hosts == 1)); then per_host=$chips; fi
case $chip in
  v5p) machine=ct5p-hightpu-${per_host}t image=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
  v6e) machine=ct6e-standard-${per_host}t image=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
  tpu7x) machine=tpu7x-standard-${per_host}t image=ubuntu-accel-2404-amd64-tpu-tpu7x ;;
  *) fail 2 "--topology=$topology: Compute Engine has v5p, v6e and tpu7x; take launch/tpu_vm.sh for $chip" ;;
esac
case $verb in run | all) check_workdir ;; esac
need_place
place=(--zone="$zone" --project="$project")
region=${zone%-*}

template=(--machine-type="$machine" --maintenance-policy=TERMINATE --image-project=ubuntu-os-accelerator-images --image-family="$image"
  --boot-disk-size=200GB --scopes=cloud-platform)
if ((spot)); then
  template+=(--provisioning-model=SPOT --instance-termination-action=STOP)
elif [ -n "$reservation" ]; then
  template+=(--provisioning-model=RESERVATION_BOUND --reservation-affinity=specific --reservation="$reservation" --instance-termination-action=DELETE)
fi

request_machine() {
  if ((hosts == 1)); then
    try gcloud compute instances create "$name" "${template[@]}" "${place[@]}"
    return
  fi
  # What an earlier try left of a group is used: the policy and the template say the same, or delete was forgotten.
  try gcloud compute resource-policies create workload-policy "$name" --type=HIGH_THROUGHPUT --accelerator-topology="$shape" \
    --region="$region" --project="$project" || [ "$fault" = exists ] || return
  try gcloud compute instance-templates create "$name" "${template[@]}" --project="$project" || [ "$fault" = exists ] || return
  try gcloud compute instance-groups managed create "$name" --size="$hosts" --template="$name" --target-size-policy-mode=bulk \
    --default-action-on-vm-failure=do-nothing --workload-policy="projects/$project/regions/$region/resourcePolicies/$name" "${place[@]}"
}

instances() { # a line for each: its name, a comma, its status
  if ((hosts == 1)); then
    try gcloud compute instances describe "$name" "${place[@]}" '--format=csv[no-heading](name,status)'
  else
    try gcloud compute instance-groups managed list-instances "$name" "${place[@]}" '--format=csv[no-heading](instance.basename(),instanceStatus)'
  fi
}

machine_state() { # absent, waiting, ready or lost; in doubt, as when gcloud cannot ask, waiting
  local running
  if ((dry_run)); then
    instances
    return
  fi
  if ! instances; then
    if [ "$fault" = absent ]; then echo absent; else echo waiting; fi
    return
  fi
  # One VM that is gone takes the whole slice along.
  if grep -qE ',(STOPPING|STOPPED|TERMINATED|SUSPENDING|SUSPENDED|DEPROVISIONING)$' <<<"$said"; then
    echo lost
    return
  fi
  running=$(grep -c ',RUNNING$' <<<"$said")
  if ((running == hosts)); then echo ready; else echo waiting; fi
}

delete_machine() { # of a group all three parts, however many of them there are
  local code=0
  if ((hosts == 1)); then
    try gcloud compute instances delete "$name" --quiet "${place[@]}"
    return
  fi
  try gcloud compute instance-groups managed delete "$name" --quiet "${place[@]}" || [ "$fault" = absent ] || code=1
  try gcloud compute instance-templates delete "$name" --quiet --project="$project" || [ "$fault" = absent ] || code=1
  try gcloud compute resource-policies delete "$name" --quiet --region="$region" --project="$project" || [ "$fault" = absent ] || code=1
  return "$code"
}

host_names() {
  if ((dry_run)); then
    if ((hosts == 1)); then echo "$name"; else echo "EACH-OF-$hosts"; fi
  else
    if instances; then cut -d, -f1 <<<"$said"; else echo "$said" && return 1; fi
  fi
}

at_each_host() { # FUNCTION ARGUMENT: at all of them at once
  local host folder code=0 pids=() names
  names=$(host_names) || { echo "$names" && return 1; }
  folder=$(mktemp -d "${TMPDIR:-/tmp}/convbert_jax.XXXXXX")
  for host in $names; do
    "$1" "$host" "$2" >"$folder/$host" 2>&1 &
    pids+=($!)
  done
  for host in "${pids[@]}"; do wait "$host" || code=$?; done
  cat "$folder"/*
  rm -r "$folder"
  return "$code"
}

ssh_to() { act gcloud compute ssh "$1" --command="$2" "${place[@]}"; }

scp_to() { act gcloud compute scp "$2" "$1:convbert_jax.tar.gz" "${place[@]}"; }

on_hosts() { at_each_host ssh_to "$1"; }

copy_to_hosts() { at_each_host scp_to "$1"; }

run_verb
