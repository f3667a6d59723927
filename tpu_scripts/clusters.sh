# shellcheck shell=bash disable=SC2154
# Clusters that start a run again by themselves: GKE by a JobSet or by xpk, and SLURM.
# Part of tpu_scripts/launch, whose variables it uses.

# literal TEXT: a JSON string, which is YAML too; Kubernetes leaves its $(…) alone.
literal() {
  # shellcheck disable=SC2016 # not for this shell
  local text=$1 open='$(' closed='$$('
  [[ $text != *[[:cntrl:]]* ]] || fail "the argument $(printf '%q' "$text") holds a control character"
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//"$open"/"$closed"}
  printf '"%s"' "$text"
}

literals() {
  local one all=''
  for one in "$@"; do all+=", $(literal "$one")"; done
  echo "[${all#, }]"
}

accelerator() {
  case $1 in
    v4) echo tpu-v4-podslice ;;
    v5e) echo tpu-v5-lite-podslice ;;
    v5p) echo tpu-v5p-slice ;;
    v6e) echo tpu-v6e-slice ;;
    tpu7x) echo tpu7x ;;
    *) fail "GKE has no $1; --type is v4, v5e, v5p, v6e or tpu7x" ;;
  esac
}

# Sets `hosts` and `chips`, the chips of a host.
divide_slice() {
  chips=${chips_per_host:-$((size < 4 ? size : 4))}
  ((size % chips == 0)) ||
    fail "--topology $topology has $size chips, which --chips-per-host $chips does not divide"
  hosts=$((size / chips))
}

# manifest WORD VALUE...: jobset.yaml with the words filled in.
manifest() {
  local text option
  local edits=()
  for option in spot bucket service_account; do
    [[ -n ${!option} ]] || edits+=(-e "/# with --${option//_/-}\$/d")
  done
  edits+=(-e 's/ # with --[a-z-]*$//')
  text=$(sed "${edits[@]}" "$here/jobset.yaml")
  while [[ $# -gt 0 ]]; do
    text=${text//"@$1@"/"$2"}
    shift 2
  done
  echo "$text"
}

jobset() {
  local label text image_text bucket_text account_text arguments_text
  label=$(accelerator "$chip")
  divide_slice
  image_text=$(literal "$image")
  bucket_text=$(literal "$bucket")
  account_text=$(literal "$service_account")
  arguments_text=$(literals "${start[@]}")
  # The arguments come last: nothing is filled in inside them.
  text=$(manifest NAME "$name" MAX_RESTARTS "${max_restarts:-10}" SLICES "$slices" HOSTS "$hosts" \
    CHIPS "$chips" ACCELERATOR "$label" TOPOLOGY "$topology" SERVICE_ACCOUNT "$account_text" \
    BUCKET "$bucket_text" IMAGE "$image_text" ARGUMENTS "$arguments_text")
  if [[ $dry_run == yes ]]; then
    printf '%s\n' "kubectl apply --filename=- << 'END'" "$text" END
  else
    kubectl apply --filename=- <<< "$text"
  fi
}

xpk() {
  local request=(command xpk workload create --workload "$name" --cluster "$cluster" --zone "$zone")
  [[ $dry_run != yes ]] || request=("${request[@]:1}") # `command` tells the program from this function
  [[ -z $project ]] || request+=(--project "$project")
  [[ $usual == usual ]] || type=${type%-*}-$topology
  request+=(--tpu-type "$type" --num-slices "$slices" --docker-image "$image")
  request+=(--max-restarts "${max_restarts:-100}" --restart-on-exit-codes 75)
  request+=(--termination-grace-period-seconds 300)
  call "${request[@]}" --command "$(quoted tpu_scripts/start "${start[@]}")"
}

slurm() {
  local size=(--nodes="$nodes" --gpus-per-node="$gpus_per_node" --ntasks-per-node="$gpus_per_node")
  call sbatch --chdir="$(dirname "$here")" --job-name="$name" "${size[@]}" \
    "$here/slurm.sbatch" "${start[@]}"
}
