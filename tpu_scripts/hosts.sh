# shellcheck shell=bash disable=SC2154
# What happens on the machines, on every host of every slice at once; tpu_scripts/host does it there.
# Part of tpu_scripts/launch, whose variables it uses.

# to_all COMMAND...: fails where a host was not reached, of which gcloud only speaks and then ends well.
to_all() {
  local words code=0
  words=$(mktemp)
  { call "$@" 2>&1 >&3 3>&- | tee "$words" >&2; } 3>&1 || code=$?
  ! grep -q 'Could not prepare all' "$words" || code=1
  rm -f "$words"
  return "$code"
}

on_hosts() {
  to_all "${queue[@]}" ssh "$name" "${hosts_at[@]}" --node=all --worker=all --command="$1"
}

host() { on_hosts "$(quoted synthesizer_jax/tpu_scripts/host "$@")"; }

# send DIRECTORY INTO: copies what is committed in DIRECTORY to every host; adds to `unpack` what unpacks it
# there into INTO.
send() {
  local from=$1 into=$2 sent=yes
  local copy=${into//\//_}.tar.gz archive=${TMPDIR:-/tmp}/synthesizer_jax.$$.tar.gz
  [[ $dry_run == yes ]] || git -C "$from" diff --quiet HEAD -- . ||
    say "what is not committed in $from stays here"
  call git -C "$from" archive --format=tar.gz --output="$archive" HEAD || return 1
  retry 10 to_all "${queue[@]}" scp "$archive" "$name:$copy" "${hosts_at[@]}" \
    --node=all --worker=all || sent=no
  call rm -f "$archive"
  unpack+="mkdir -p $into && tar -xzf $copy -C $into && "
  [[ $sent == yes ]]
}

# Installs what is committed, on every host from the same constraints.txt. With --code that code lies where
# this checkout would, and this checkout, unless the program is a release, in .program below it.
install_everywhere() {
  local own=${here%/*} unpack='rm -rf synthesizer_jax/.program && '
  local what=(setup ${bucket:+--bucket "$bucket"} ${release:+--release "$release"})
  if [[ ! $code -ef $own ]]; then
    what+=(--code)
    send "$code" synthesizer_jax || return 1
    [[ -n $release ]] || send "$own" synthesizer_jax/.program || return 1
    send "$own/tpu_scripts" synthesizer_jax/tpu_scripts || return 1
  elif [[ -n $release ]]; then
    send "$own/tpu_scripts" synthesizer_jax/tpu_scripts || return 1
  else
    send "$own" synthesizer_jax || return 1
  fi
  retry 3 on_hosts "$unpack$(quoted synthesizer_jax/tpu_scripts/host "${what[@]}")"
}

setup() {
  install_everywhere || fail "the hosts of $name were not set up; launch status says whether they are" \
    "there, ssh to several hosts needs: ssh-add ~/.ssh/google_compute_engine${bucket:+, and their account}" \
    ${bucket:+"a role on gs://$bucket"}
}

train() { run; }

run() {
  host run "${start[@]}" ||
    fail "the run was not started on every host; launch status says where, launch stop ends the others"
}

status() {
  look
  [[ $dry_run == yes ]] || echo "$name $state"
  [[ $state != ACTIVE ]] || host status
}

logs() {
  call "${queue[@]}" ssh "$name" "${hosts_at[@]}" --node="$slice" --worker="$worker" \
    --command="tail -n 100 -F synthesizer_jax/run.log"
}

stop() { host stop; }
