# shellcheck shell=bash
# Sourced, from the repository's root, by tpu_vm.sh, gce.sh, xpk.sh and slurm.sh: the grammar that they share, topologies of TPUs, plans, and what
# Google Cloud's faults mean. launch/machines/hosts.sh is the way of a run of those that reach their hosts by ssh.
#
#   SCRIPT VERB [--option=value …] [-- arguments of python -m convbert_jax.main]
#
#   plan     compile the program's step for the topology, on this machine: memory, time, network (docs/accelerators.md); asks no cloud
#   create   plan, and if it fits get the machine, wait for it, install the program on every host; a machine that is there is taken as it is
#   run      start the program on every host, follow it, start it again after exit code 75; Ctrl-C stops following, not the run
#   watch    follow a run that was started
#   stop     SIGTERM to the program on every host, and wait until it has saved; the machine stays, and run goes on
#   delete   stop, and give the machine back
#   all      create and run, again when the machine is taken away, at most --restarts times; delete at the end, however it ends
#
# --no-plan asks for the machine at once. --dry-run prints the exact commands and runs none. Exit codes: 0; 2 a wrong command line; 75 lost or
# stopped, the same line goes on; 1 else, or the run's own. Of several codes of hosts an error's own counts before 75, so it is not tried again.
# A script names its `options` and `switches`.

export CLOUDSDK_CORE_DISABLE_PROMPTS=1 # a question of gcloud would not be seen: what it says is kept, to be explained
verb='' arguments=() dry_run=0
name=convbert-jax project='' zone='' topology='' every=30 restarts=10
# shellcheck disable=SC2034 # the scripts read what theirs need
slices=1 spot=0 keep=0 no_plan=0 reservation='' options='' switches=''

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
    fail 2 "'$verb' is none of: ${verbs// /, }; bash launch/${0##*/} run --dry-run shows what would be done, the head of launch/${0##*/} says the rest"
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
    *) fail 2 "--topology=$topology: the chips are v4, v5e, v5p, v6e and tpu7x, as in v5e:4x4 or v5p:4x4x4; several slices are --slices of launch/xpk.sh" ;;
  esac
  sizes=${shape//x/ * }
  chips=$((sizes))
  hosts=$(((chips + 3) / 4))
  if [ "$shape" = 2x4 ]; then hosts=1; fi # one machine of eight chips
}

plan() { # what the run would take of the topology, before anything is asked for; by the Python that launch/environment.sh made, if none is active
  local python=${PYTHON:-python3} planned=$topology
  if ((slices > 1)); then planned=${slices}x$topology; fi
  if [ -z "${PYTHON:-}${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
  act "$python" -m convbert_jax.main --mode=plan --topology="$planned" ${arguments[@]+"${arguments[@]}"}
}

plan_first() { # before anything is asked for
  if ((no_plan)); then return; fi
  if ((${#arguments[@]} == 0)); then fail 2 "no run to plan the machine for; add -- --config=FILE and what else the run gets, or --no-plan"; fi
  if ! ((dry_run)); then say "The plan first, which takes minutes; --no-plan goes without."; fi
  plan || fail 1 "no plan that fits, as it says itself; nothing was asked for. --no-plan goes without one"
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

# shellcheck disable=SC2034 # slurm.sh asks for neither
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

check_workdir() { # the disk of a machine that is taken away goes with it, and hosts must see one folder
  local word
  if [ "$verb" != all ] && ((hosts == 1)); then return; fi
  for word in ${arguments[@]+"${arguments[@]}"}; do
    case $word in --workdir=gs://* | --workdir=/*) return ;; esac
  done
  fail 2 "no --workdir that outlives the machine and that all hosts see; add -- --workdir=gs://BUCKET/RUN, or the path of a shared disk"
}
