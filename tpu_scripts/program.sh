# shellcheck shell=bash disable=SC2154
# Checks what follows `--` before it costs money, against this checkout: command, options, recipe, places; and
# where the program is installed, by it, the recipe's fields.
# Part of tpu_scripts/launch, whose variables it uses.

# check_run COMMAND WORD...: the program's command line. Sets nothing; ends with a sentence where it is wrong.
check_run() {
  local line known arguments=0 most=0 least=0 word first='' value given=' ' settings=()
  command_line "$@" || fail "synthesizer-jax has no command ${1:-}; it has: $(command_names)"
  shift "$words"
  for word in $known; do
    case $word in
      --*) ;;
      *...*) most=1000 ;;
      *) most=$((most + 1)) ;;
    esac
    case $word in --* | \[*) ;; *) least=$((least + 1)) ;; esac
  done
  while [[ $# -gt 0 ]]; do
    case $1 in
      --)
        arguments=$((arguments + $# - 1))
        break
        ;;
      -?*)
        check_option "$@"
        given+="${1%%=*} "
        case $1 in *=*) value=${1#*=} ;; *) value=${2:-} ;; esac
        case ${1%%=*}:$value in
          --workdir:* | --data-dir:*) check_place "${1%%=*}" "$value" ;;
          --set:vocabulary.path=*) check_place vocabulary.path "${value#*=}" ;;
        esac
        case $1 in --set* | --import*) settings+=("${1%%=*}" "$value") ;; esac
        [[ $1 == *=* || $known != *" ${1}="* ]] || shift
        ;;
      *)
        [[ $arguments -gt 0 ]] || first=$1
        arguments=$((arguments + 1))
        ;;
    esac
    shift
  done
  ((arguments >= least)) || fail "$line needs a $(grep -oE ' [a-z]+' <<< "$known" | tr -d ' ' | listed) after --"
  ((arguments <= most)) || fail "$line takes $most arguments besides its options, not $arguments"
  for word in $known; do
    [[ $word != --*=! || $given == *" ${word%=!} "* ]] || fail "$line needs ${word%=!}"
  done
  [[ $known != ' recipe '* ]] || check_recipe "$first" ${settings[@]+"${settings[@]}"}
}

# command_line WORD...: sets `words`, how many of them name the command, `line`, its name, and `known`, the
# arguments and options of tpu_scripts/commands.txt.
command_line() {
  for words in 2 1; do
    (($# >= words)) || continue
    line="${*:1:words}"
    known=$(grep -F -m 1 -e "$line:" "$here/commands.txt") || continue
    [[ ${known%%:*} == "$line" ]] || continue
    known="${known#*:} "
    return
  done
  return 1
}

command_names() { sed -n 's/^\([a-z ]*\): .*/\1/p' "$here/commands.txt" | listed; }

# listed: the lines of its input as "a, b, c".
listed() { tr '\n' ',' | sed 's/,$//;s/,/, /g'; }

# check_option OPTION [VALUE]...: one of the command's options, with its value.
check_option() {
  local name=${1%%=*}
  if [[ $known == *" $name="* ]]; then
    [[ $1 == *=* || $# -gt 1 ]] || fail "$name needs a value"
  else
    [[ $known == *" $name "* && $1 != *=* ]] ||
      fail "synthesizer-jax $line takes no $1; it takes $(grep -oE -e '--[a-z-]+' <<< "$known" | listed)"
  fi
}

# check_recipe FILE.py[:FUNCTION] or NAME[:FUNCTION], --set FIELD=VALUE...: whether the recipe is among what the
# run is given, and has the fields.
check_recipe() {
  local place=${1%%:*} function='' text names
  [[ $1 != *:* ]] || function=${1#*:}
  if [[ $place == *.py ]]; then
    case $action in
      jobset | xpk) return ;; # lies in the image
      slurm)
        text=$(cd "$here/.." && cat -- "$place" 2> /dev/null) || fail "there is no recipe file $place"
        ;;
      *)
        text=$(git -C "$code" show "HEAD:./$place" 2> /dev/null) ||
          fail "there is no $place among what is committed in $code, which is what the machines get"
        ;;
    esac
  else
    names=$(cd "$here/../configs" && printf '%s\n' [a-z]*.py)
    grep -qxF -e "$place.py" <<< "$names" ||
      fail "there is no recipe $place; those of the program are $(listed <<< "${names//.py/}")"
    text=$(< "$here/../configs/$place.py")
  fi
  [[ -z $function ]] || grep -qE "^(def )?$function *[(=:]" <<< "$text" || fail "$place has no recipe $function"
  if command -v synthesizer-jax > /dev/null; then
    (cd "$code" && synthesizer-jax recipes "$@" > /dev/null) || exit 2
  else
    say "the fields of $1 are not checked: synthesizer-jax is not installed here"
  fi
}

# check_place OPTION PATH: whether it outlives the machines; what is only read may also come with the code.
check_place() {
  local kept='bucket/… with --bucket, or gs://…'
  [[ $1 == --workdir ]] || ! git -C "$code" cat-file -e "HEAD:./$2" 2> /dev/null || return 0
  case $action:$1:$2 in
    slurm:* | *:gs://?* | xpk:*:/*) ;;
    jobset:--data-dir:/* | jobset:vocabulary.path:/*) ;; # lies in the image
    xpk:*) fail "$1 $2 is inside the container and lost with it; give the path of a mounted bucket, or gs://…" ;;
    *:../* | *:*/../* | *:*/..) fail "$1 $2 leads elsewhere; give $kept" ;;
    *:bucket/?* | *:./bucket/?*) ;;
    *) fail "$1 $2 is on disks that go away with the machines; give $kept" ;;
  esac
}
