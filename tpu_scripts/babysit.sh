# shellcheck shell=bash disable=SC2154
# Keeps a run going through preemptions: machines, installation, run, and all of it again.
# Part of tpu_scripts/launch, whose variables it uses.

# Sets `told` to what the hosts say of the run: running; finished (exit code 0); again (75, or 143 where the
# program had not begun, gone without a word as after a reboot, or not started on every host); stopped by
# launch stop; failed, with `exit_code`; idle; or silent, where they cannot be reached. Where one host was preempted
# the others may crash for want of it, so 75 comes before a failure; a failure at a stop is one.
ask_hosts() {
  local answer words
  if ! answer=$(host status 2> /dev/null) || [[ -z $answer ]]; then
    told=silent
    return
  fi
  words=" $(sed -n 's/^run [^ ]* //p' <<< "$answer" | sort -u | tr '\n' ' ')"
  exit_code=$(tr ' ' '\n' <<< "$words" | grep -m 1 -vxE '|0|75|143|[a-z]+' || true)
  case $words in
    *stopped*) [[ -n $exit_code ]] && told=failed || told=stopped ;;
    *' 75 '* | *' 143 '* | *lost*) told=again ;;
    *[1-9]*) told=failed ;;
    *' 0 '*) told=finished ;;
    *idle*running*) told=again ;;
    *running*) told=running ;;
    *) told=idle ;;
  esac
}

# Follows the run to its end. Sets `end`: finished, failed, stopped or deleted by another launch, again (start
# it on the same machines) or lost. A failure counts when it is seen twice: machines that are being taken away
# make runs crash first.
watch() {
  local failures=0 silences=0
  while :; do
    ask_hosts
    look
    case $told in
      finished | stopped) end=$told && return ;;
      failed) failures=$((failures + 1)) ;;
      silent) silences=$((silences + 1)) ;;
      *) failures=0 silences=0 ;;
    esac
    case $state in FAILED | SUSPENDED | SUSPENDING | DELETING | PREEMPTED | NONE) gone && return ;; esac
    [[ $told != again && $told != idle && $silences -lt 20 ]] || { end=again && return; }
    [[ $failures -lt 2 ]] || { end=failed && return; }
    pause
  done
}

# Sets `end` where the machines are not there any more.
gone() {
  case $state in
    DELETING | NONE) end=deleted ;;
    *) end=lost ;;
  esac
}

# One life of the machines. A run that goes on already is followed, not started again; nor is one that was
# stopped since this babysit began.
live() {
  look
  while [[ $state == DELETING ]]; do
    pause
    look
  done
  if [[ $state == NONE ]]; then
    ask_for_machines 3
  fi
  for _ in 1 2 3; do
    until_active || { gone && return; }
    ask_hosts
    [[ $told == silent ]] || break
    pause
  done
  if [[ $told == stopped && $restarts -gt 0 ]]; then
    end=stopped
    return
  fi
  if [[ $told != running ]]; then
    if ! { install_everywhere && host stop && host run "${start[@]}"; }; then
      look
      [[ $state != ACTIVE ]] || give_up "$name is there but the run does not start"
      gone
      [[ $state != UNKNOWN ]] || end=again
      return
    fi
  fi
  watch
}

leave() { [[ -z $delete_at_end ]] || retry 3 delete; }

# give_up WHY: ends with an error, and without the machines where that was asked for.
give_up() {
  [[ -z $delete_at_end ]] || ! leave || costs='its machines are deleted'
  fail "$1; $costs"
}

babysit() {
  local restarts=0 most=${max_restarts:-100}
  local costs="its machines cost money until: tpu_scripts/launch delete --name $name --zone $zone"
  prepare_request
  if [[ $dry_run == yes ]]; then
    create && look && install_everywhere && host stop && host run "${start[@]}" && host status && delete
    return
  fi
  while :; do
    live
    case $end in
      finished)
        say "the run is finished"
        leave || fail "$name cannot be deleted; $costs"
        return
        ;;
      failed)
        on_hosts 'tail -n 20 synthesizer_jax/run.log' >&2 || true
        give_up "the run failed with exit code $exit_code, see the log"
        ;;
      stopped) fail "the run was stopped and has saved; the same babysit goes on with it, and $costs" ;;
      deleted) fail "$name was deleted meanwhile; the same babysit begins again" ;;
    esac
    restarts=$((restarts + 1))
    ((restarts <= most)) || give_up "$name was interrupted more often than --max-restarts $most"
    say "$name is $state, the run was interrupted ($restarts of at most $most times)"
    if [[ $end == lost ]]; then
      retry 10 delete || fail "$name cannot be deleted; $costs"
    fi
    pause
  done
}
