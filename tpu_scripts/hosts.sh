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
  to_all "${queue[@]}" ssh "$name" "${place[@]}" --node=all --worker=all --command="$1"
}

host() { on_hosts "$(quoted synthesizer_jax/tpu_scripts/host "$@")"; }

# Installs what is committed, on every host from the same constraints.txt.
install_everywhere() {
  local archive=${TMPDIR:-/tmp}/synthesizer_jax.$$.tar.gz unpack sent=yes
  [[ $dry_run == yes ]] || git -C "$here/.." diff --quiet HEAD || say "what is not committed stays here"
  call git -C "$here/.." archive --format=tar.gz --output="$archive" HEAD || return 1
  retry 10 to_all "${queue[@]}" scp "$archive" "$name:synthesizer_jax.tar.gz" "${place[@]}" \
    --node=all --worker=all || sent=no
  call rm -f "$archive"
  [[ $sent == yes ]] || return 1
  unpack='mkdir -p synthesizer_jax && tar -xzf synthesizer_jax.tar.gz -C synthesizer_jax'
  retry 3 on_hosts "$unpack && $(quoted synthesizer_jax/tpu_scripts/host setup ${bucket:+"$bucket"})"
}

setup() {
  install_everywhere || fail "the hosts of $name were not set up; launch status says whether they are" \
    "there, ssh to several hosts needs: ssh-add ~/.ssh/google_compute_engine${bucket:+, and their account}" \
    ${bucket:+"a role on gs://$bucket"}
}

train() {
  host train "${start[@]}" ||
    fail "the run was not started on every host; launch status says where, launch stop ends the others"
}

status() {
  look
  [[ $dry_run == yes ]] || echo "$name $state"
  [[ $state != ACTIVE ]] || host status
}

logs() {
  call "${queue[@]}" ssh "$name" "${place[@]}" --node="$slice" --worker="$worker" \
    --command="tail -n 100 -F synthesizer_jax/train.log"
}

stop() { host stop; }
