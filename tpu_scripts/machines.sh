# shellcheck shell=bash disable=SC2154
# Cloud TPU machines as queued resources: ask for them, look at them, give them back.
# Part of tpu_scripts/launch, whose variables it uses.

queue=(gcloud compute tpus queued-resources)
place=(--zone="$zone")
[[ -z $project ]] || place+=(--project="$project")
# shellcheck disable=SC2034 # where ssh and scp find the hosts, and how they reach them
hosts_at=("${place[@]}")
if [[ $tunnel_through_iap == yes ]]; then
  hosts_at+=(--tunnel-through-iap)
elif [[ $internal_ips == yes ]]; then
  hosts_at+=(--internal-ip)
fi

version_for() {
  case $1 in
    v5e) echo v2-alpha-tpuv5-lite ;;
    v5p) echo v2-alpha-tpuv5 ;;
    v6e) echo v2-alpha-tpuv6e ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

# at_most_a_week TIME: a number and s, m, h or d.
at_most_a_week() {
  local seconds=${1%?}
  case $1 in
    *m) seconds=$((60 * seconds)) ;;
    *h) seconds=$((3600 * seconds)) ;;
    *d) seconds=$((86400 * seconds)) ;;
  esac
  ((seconds <= 604800))
}

# Sets `request`, the command that asks for the machines, and ends with a sentence where none can.
prepare_request() {
  local given="$spot$reserved${reservation:+yes}${flex_start:+yes}" option variable
  [[ $chip != tpu7x ]] || fail "TPU7x (Ironwood) exists on GKE only; use launch jobset or launch xpk"
  [[ $given == '' || $given == yes ]] ||
    fail "take one of --spot, --reserved, --reservation and --flex-start"
  [[ -z $flex_start ]] || { [[ $flex_start =~ ^[1-9][0-9]{0,5}[smhd]$ ]] && at_most_a_week "$flex_start"; } ||
    fail "--flex-start is $flex_start; it is the longest life of the machines, such as 10h, at most 7d"
  case $chip:$slices in
    v2:1 | v3:1) ;;
    v2:* | v3:*) fail "--slices needs TPU v4 or later, not $type" ;;
  esac
  request=("${queue[@]}")
  [[ -z $flex_start$reservation ]] || request=(gcloud alpha "${queue[@]:1}") # flags that only alpha has
  request+=(create "$name" "${place[@]}")
  case $usual in
    usual) request+=(--accelerator-type="$type") ;;
    *) request+=(--type="${type%-*}" --topology="$topology") ;;
  esac
  request+=(--runtime-version="${version:-$(version_for "$chip")}")
  case $slices in
    1) request+=(--node-id="$name") ;;
    *) request+=(--node-count="$slices" --node-prefix="$name") ;;
  esac
  [[ -z $spot ]] || request+=(--spot)
  [[ -z $reserved ]] || request+=(--reserved)
  [[ -z $flex_start ]] || request+=(--provisioning-model=flex-start --max-run-duration="$flex_start")
  for option in reservation network subnetwork service-account labels; do
    variable=${option//-/_}
    [[ -z ${!variable} ]] || request+=(--"$option=${!variable}")
  done
  [[ -z $internal_ips ]] || request+=(--internal-ips)
}

refused() {
  fail "gcloud refused to create $name; if it speaks of quota, ask for more under IAM & Admin, Quotas," \
    "or take another --zone, --type or --spot"
}

# ask_for_machines TIMES: sends `request`.
ask_for_machines() {
  retry "$1" call "${request[@]}" || refused
  asked=yes
}

create() {
  prepare_request
  ask_for_machines 1
}

looked='' asked=''

# Sets `state`: that of the queued resource; PREEMPTED where one of its machines was taken although the
# resource still counts as active; NONE where there is none; UNKNOWN where gcloud does not tell, which at the
# first look is an error: no account, no permission, no such zone.
look() {
  local question=("${queue[@]}" describe "$name" "${place[@]}" "--format=value(state.state)") answer
  local machines=(gcloud compute tpus tpu-vm list "${place[@]}"
    "--filter=name~\"/nodes/$name(-[0-9]+)?\$\"" "--format=value(state)") # unquoted, ( groups filters
  if [[ $dry_run == yes ]]; then
    state=ACTIVE
    call "${question[@]}"
    call "${machines[@]}"
    return
  fi
  if answer=$("${question[@]}" 2>&1); then
    state=${answer##*$'\n'}
  elif [[ $answer == *NOT_FOUND* ]]; then
    state=NONE
  else
    state=UNKNOWN
    say "$answer"
    [[ -n $looked ]] || fail "gcloud does not tell whether there is $name; what it said stands above"
  fi
  looked=yes
  [[ $state == ACTIVE ]] || return 0
  answer=$("${machines[@]}" 2> /dev/null) || return 0
  case $answer in *PREEMPTED* | *TERMINATED* | *STOPP*) state=PREEMPTED ;; esac
}

# Looks until the machines are there; fails where they will never be. What was only just asked for may not be
# seen at once.
until_active() {
  local before=''
  while :; do
    look
    [[ $state == "$before" || $dry_run == yes ]] || say "$name is $state"
    case $state:$before:$asked in
      ACTIVE:*) return 0 ;;
      NONE::yes) ;;
      FAILED:* | SUSPENDED:* | SUSPENDING:* | DELETING:* | PREEMPTED:* | NONE:*) return 1 ;;
    esac
    before=$state
    pause
  done
}

wait_for_machines() {
  until_active || case $state in
    NONE) fail "there is no $name in $zone; launch create asks for it" ;;
    *) fail "$name is $state and will not come back; launch delete removes it, launch create asks anew" ;;
  esac
}

delete() { call "${queue[@]}" delete "$name" "${place[@]}" --force --quiet; }
