#!/usr/bin/env bash
# A cluster of machines with Slurm, GPUs or CPUs: the same program on every node, put back into the queue before its time is up.
#
#   bash launch/slurm.sh run --nodes=4 --sbatch="--gpus-per-node=8 --time=24:00:00" -- --config=configs/base.py --workdir=/shared/base
#
# Verbs and exit codes: launch/machines/command_line.sh. `create` installs the program beside this script, on the disk that all nodes see; `run`
# submits it and follows (Ctrl-C stops following, not the run), with --topology=gpu:h100x32, all nodes together, after a plan; `stop` and `delete`
# let it save and end the job, `delete` also one that does not. Slurm starts it again by itself: after exit code 75, two minutes before the end of
# --time, after preemption and after a lost node. Options: --name, --nodes, --topology, --sbatch (more words for sbatch), --restarts, --every
# (seconds between looks), --dry-run.
#
# Never run against a real Slurm: written from its manual (slurm.schedmd.com), and tested with commands that play it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. launch/machines/command_line.sh

nodes=1 sbatch=''
options="name nodes topology sbatch restarts every" switches="dry-run"
read_command "plan create run watch stop delete" "$@"
check_names
if [[ ! $nodes =~ ^[1-9][0-9]*$ ]]; then fail 2 "--nodes=$nodes is not a number of nodes"; fi
if [[ $sbatch == *[\"\']* ]]; then fail 2 "--sbatch=$sbatch: its words are told apart by blanks; leave quotation marks out"; fi
read -r -d '' -a more <<<"$sbatch" || true # lines too
for word in ${more[@]+"${more[@]}"}; do # what is set below: sbatch takes the last of two, and several nodes without --multihost are several runs
  case $word in
    --nodes | --nodes=* | -N*) fail 2 "--sbatch: $word is --nodes=N of launch/slurm.sh; say it there" ;;
    --job-name | --job-name=* | -J*) fail 2 "--sbatch: $word is --name=NAME of launch/slurm.sh; say it there" ;;
    --ntasks* | -n* | --output | --output=* | -o* | --open-mode* | --signal | --signal=* | --requeue | --no-requeue | --array | --array=* | -a* | --wrap*)
      fail 2 "--sbatch: $word is set by launch/slurm.sh itself; leave it out"
      ;;
  esac
done
log=runs/slurm-$name.log

job_text() { # what the first node runs, by sh. Slurm's own TERM goes to the program too; USR1: the time is almost up; USR2: the verb
  # stop. The program is told once: a second SIGTERM would end it without saving.
  # shellcheck disable=SC2016
  printf 'told= stopped=; tell="[ -n \\"\\$told\\" ] || scancel --signal=TERM $SLURM_JOB_ID; told=1"; trap : TERM; trap "$tell" USR1; trap "stopped=1; $tell" USR2\n'
  # shellcheck disable=SC2016
  printf 'before=$(wc -l <%s); srun --kill-on-bad-exit=0 --ntasks-per-node=1 %s & step=$!\n' "$log" "$(quote "$@")"
  # shellcheck disable=SC2016
  printf 'code=0; wait $step || code=$?; while kill -0 $step 2>/dev/null; do code=0; wait $step || code=$?; done\n'
  # A signal to this script ends a wait with its own number, also where the step has just ended; 127: that was the code of the step.
  # shellcheck disable=SC2016
  printf 'if [ $code -gt 128 ]; then last=0; wait $step 2>/dev/null || last=$?; [ $last = 127 ] || code=$last; fi\n'
  # srun ends with the highest code, and says each: an error of one's own is not tried again, however the others have ended.
  # shellcheck disable=SC2016
  printf 'for one in $(tail -n +$((before + 1)) %s | sed -n "s/^srun: error: .*: Exited with exit code //p"); do\n' "$log"
  # shellcheck disable=SC2016
  printf '  [ $one = 75 ] || [ $one -gt 128 ] || code=$one\ndone\n'
  # A job that was cancelled, or that Slurm puts back itself, no longer runs by Slurm's books.
  # shellcheck disable=SC2016
  printf 'if [ -z "$stopped" ] && { [ $code = 75 ] || [ $code -gt 128 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt %s ] &&\n' "$restarts"
  # shellcheck disable=SC2016
  printf '  [ "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%%T)" = RUNNING ]; then\n'
  # shellcheck disable=SC2016
  printf '  scontrol requeue $SLURM_JOB_ID && sleep 60\nfi\nexit $code\n'
}

submit() {
  local program=(python -m convbert_jax.main ${arguments[@]+"${arguments[@]}"})
  need_tool sbatch "start this on a login node of the cluster"
  if [ -x .venv/bin/python ]; then program[0]=$PWD/.venv/bin/python; fi
  if ((nodes > 1)); then program+=(--multihost); fi
  if ! ((dry_run)) && [ -n "$(job_id)" ]; then fail 1 "$name is in the queue already; follow it by the verb watch, or delete it"; fi
  if ! ((dry_run)); then mkdir -p runs; fi
  if ! try sbatch --parsable --job-name="$name" --nodes="$nodes" --ntasks-per-node=1 --requeue --signal=B:USR1@120 --output="$log" \
    --open-mode=append ${more[@]+"${more[@]}"} --wrap="$(job_text "${program[@]}")"; then
    fail 1 "sbatch: $(tail -n 1 <<<"$said")"
  fi
  job=${said%%;*}
  if ! ((dry_run)); then say "Job $job is in the queue; its log: $log"; fi
}

job_id() { squeue --noheader --me --name="$name" --format=%A | head -n 1; }

follow_job() {
  local state before='' line shown='' fields=State,ExitCode
  if ((dry_run)); then
    show sacct --noheader --parsable2 --allocations --jobs=JOB --format="$fields"
    return
  fi
  need_tool sacct "start this on a login node of the cluster"
  if [ -z "$job" ]; then job=$(job_id); fi
  if [ -z "$job" ]; then fail 1 "no job $name is in the queue; sacct --name=$name says how it ended"; fi
  while :; do
    state=$(sacct --noheader --parsable2 --allocations --jobs="$job" --format="$fields" | tail -n 1)
    if [ "${state%% *}" != "$before" ]; then say "Job $job: ${state:-not accounted yet}"; fi
    before=${state%% *} line=$(tail -n 1 "$log" 2>/dev/null)
    if [ "$line" != "$shown" ]; then say "$line"; fi
    shown=$line
    if [ -n "$(job_id)" ]; then state=''; fi # what is in the queue has not ended: Slurm puts a job of a lost node back
    case $state in
      COMPLETED*) return 0 ;;
      FAILED* | CANCELLED* | TIMEOUT* | OUT_OF_MEMORY* | NODE_FAIL* | BOOT_FAIL* | DEADLINE* | PREEMPTED*)
        tail -n 20 "$log" >&2
        echo "error: job $job of $name ended as ${state%%|*}; its last lines are above, the same command goes on from its last checkpoint." >&2
        state=${state##*|} state=${state%%:*}
        return "$((state > 0 ? state : 1))"
        ;;
    esac
    sleep "$every"
  done
}

install() {
  if ((dry_run)); then
    echo ". launch/environment.sh"
  else
    set -e
    . launch/environment.sh
  fi
}

stop() { # fails where it has not ended in time
  local waited patience=300
  act scancel --state=PENDING --me --name="$name" && act scancel --batch --signal=USR2 --state=RUNNING --me --name="$name" || return
  if ((dry_run)); then return; fi
  for ((waited = 0; waited < patience; waited += 2)); do # the time that the program has to save
    if [ -z "$(job_id)" ]; then return; fi
    sleep 2
  done
  return 1
}

if [ "$verb" = plan ] && [ -z "$topology" ]; then fail 2 "no topology; add --topology=gpu:h100x8"; fi
plan_only
job=''
case $verb in
  create) install ;;
  run)
    if [ -n "$topology" ]; then plan_first; fi
    submit && follow_job
    ;;
  watch) follow_job ;;
  stop | delete)
    need_tool scancel "start this on a login node of the cluster"
    stop && exit
    if [ "$verb" = stop ]; then fail 1 "$name could not be stopped; the verb delete ends it at once"; fi
    say "What was learned since the last checkpoint is lost: the program does not end."
    act scancel --me --name="$name"
    ;;
esac
