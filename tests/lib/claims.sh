# shellcheck shell=bash
# What a demo is made of: times, and claims that are checked. Sourced, not run; $torpor is the command line.

table=()
# timed LABEL COMMAND...: runs it and keeps how long it took.
timed() {
  local label=$1 from to; shift
  from=$(date +%s%N); "$@"; to=$(date +%s%N)
  table+=("$(printf '%-44s %8.2f s' "$label" "$(((to - from) / 1000000))e-3")")
}
checked=0
# claim TEXT COMMAND...: the command must succeed.
claim() {
  local text=$1; shift
  if "$@"; then printf '  ok    %s\n' "$text"; checked=$((checked + 1)); else printf '  FALSE %s\n' "$text"; exit 1; fi
}
not() { ! "$@"; }
same() { [ "$1" = "$2" ] || { printf '        got %s, expected %s\n' "$1" "$2"; return 1; }; }
field() { "$torpor" get "$1" -o json | jq -r "$2"; }
sh_in() { local name=$1; shift; "$torpor" exec "$name" -- sh -c "$*"; }
alive() { [ -r "/proc/$1/stat" ] && ! grep -q ') [ZX] ' "/proc/$1/stat"; }
