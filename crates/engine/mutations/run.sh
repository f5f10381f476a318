#!/bin/sh
# Mistakes made on purpose: each patch here is one, and names the test that must fail with it.
#
#   crates/engine/mutations/run.sh [part of a name]
#
# Applies each in turn to a clean tree, runs its test and takes it back. Prints caught or NOT CAUGHT; fails if any is not caught.
set -u
root=$(cd "$(dirname "$0")/../../.." && pwd)
cd "$root" || exit 1
if ! git diff --quiet; then
  echo "the working tree has changes; commit or stash them first" >&2
  exit 2
fi

applied=
log=$(mktemp)
undo() {
  [ -z "$applied" ] || git apply -R "$applied"
  applied=
  rm -f "$log"
}
trap undo EXIT
trap 'exit 130' INT TERM

missed=0
for patch in crates/engine/mutations/*"${1:-}"*.patch; do
  name=$(basename "$patch" .patch)
  test=$(sed -n 's/^Test: //p' "$patch")
  if ! git apply "$patch"; then
    echo "NOT APPLIED  $name"
    missed=1
    continue
  fi
  applied=$patch
  # Splitting into words is meant: the line holds arguments. A mistake may as well be one that never ends.
  # shellcheck disable=SC2086
  timeout 900 cargo test -q $test >"$log" 2>&1
  if grep -q '^test result: FAILED' "$log"; then
    echo "caught       $name"
  else
    echo "NOT CAUGHT   $name ($test)"
    tail -5 "$log"
    missed=1
  fi
  git apply -R "$patch"
  applied=
done
exit $missed
