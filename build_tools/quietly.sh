#!/usr/bin/env bash
# Runs a command whose output matters only if it fails: quietly.sh WHAT COMMAND...
#
# Prints WHAT and the seconds it took. A terminal shows the running seconds and the count of compiler
# steps, if any. If the command fails, prints the end of its output, and where all of it is.
set -u
what=$1
shift
log=$(mktemp)
begin=$SECONDS

show() {  # replaces the current line
  printf '\r== %s: %d s%s\e[K' "$what" $((SECONDS - begin)) "${1:+ $1}"
}

if [[ -t 1 ]]; then
  "$@" >"$log" 2>&1 </dev/null &
  command=$!
  trap 'kill $command 2>/dev/null; echo; exit 130' INT TERM
  while kill -0 $command 2>/dev/null; do
    show "$(grep -aoE '^ *\[[0-9]+/[0-9]+\]' "$log" | tail -n 1)"
    sleep 0.2
  done
  wait $command && status=0 || status=$?
  show
  echo
else
  printf '== %s: ' "$what"
  "$@" >"$log" 2>&1 </dev/null && status=0 || status=$?
  echo "$((SECONDS - begin)) s"
fi
if [[ $status -ne 0 ]]; then
  tail -n 60 "$log"
  echo "quietly.sh: $what: '$1' ended with status $status; all of its output: $log" >&2
else
  rm -f "$log"
fi
exit "$status"
