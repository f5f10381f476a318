#!/bin/sh
# The device tests on a machine that has a card but no Rust.
#
#   crates/cuda/gpu-check.sh pack          here: builds the tests and puts stripped binaries into target/gpu
#   crates/cuda/gpu-check.sh run [quick]   there, at the root of a copy of the repository that has target/gpu
#   crates/cuda/gpu-check.sh time [NAME]   there, too: times of kernels whose name holds this; of all, and of whole steps
#
# `run` goes through single kernels, conformance, goldens and a hundred thousand tokens, then through some small cases under
# compute-sanitizer, and prints a table last. `quick` leaves the sanitizer out.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$root/target/gpu
tests="conformance demo drafter golden soak"
benches="kernels steps"

pack() {
  cd "$root" || exit 1
  rm -rf "$folder" && mkdir -p "$folder"
  for test in $tests; do
    binary=$(cargo test -q -p carat-cuda --release --no-run --test "$test" --message-format=json |
      sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
    [ -n "$binary" ] || exit 1
    strip -o "$folder/$test" "$binary" || exit 1
  done
  for bench in $benches; do
    binary=$(cargo bench -q -p carat-cuda --no-run --bench "$bench" --message-format=json |
      sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
    [ -n "$binary" ] || exit 1
    strip -o "$folder/bench-$bench" "$binary" || exit 1
  done
  binary=$(cargo test -q -p carat-cuda --release --no-run --lib --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
  [ -n "$binary" ] && strip -o "$folder/kernels" "$binary" || exit 1
  du -sh "$folder"
}

table=
failed=0
# check NAME SECONDS COMMAND...
check() {
  name=$1 limit=$2
  shift 2
  log=$folder/log.txt
  started=$(date +%s)
  timeout "$limit" "$@" >"$log" 2>&1
  status=$?
  seconds=$(($(date +%s) - started))
  if grep -q '^test result: ok. 0 passed' "$log"; then
    verdict="FAILED (nothing ran)"
    failed=1
  elif [ $status -eq 0 ]; then
    verdict=ok
  else
    verdict="FAILED ($status)"
    failed=1
    echo "---- $name"
    grep -v '\.\.\. ok$' "$log" | tail -60
  fi
  counts=$(sed -n 's/^test result: [a-zA-Z]*\. \(.* failed\);.*/\1/p' "$log" | tail -1)
  errors=$(sed -n 's/^=* *\(ERROR SUMMARY.*\|RACECHECK SUMMARY.*\)/\1/p' "$log" | tail -1)
  table="$table$(printf '%-42s %-14s %4ss  %s %s' "$name" "$verdict" "$seconds" "$counts" "$errors")
"
}

run() {
  cd "$root" || exit 1
  export GPU_REQUIRED=1
  chmod +x "$folder"/*
  check "kernels" 240 "$folder/kernels" --ignored --test-threads 1
  check "conformance" 240 "$folder/conformance"
  check "goldens" 240 "$folder/golden"
  check "demo model" 120 "$folder/demo"
  check "drafters" 240 "$folder/drafter"
  check "soak" 90 "$folder/soak"
  if [ "${1:-}" != quick ]; then
    if command -v compute-sanitizer >/dev/null; then
      sanitizer=compute-sanitizer
    else
      sanitizer=/usr/local/cuda/bin/compute-sanitizer
    fi
    for case in fixture/e2b-like-q4_0/best/16 fixture/moe-like-q8_0/portable/whole exact/e2b-like-q4_0/portable; do
      check "memcheck $case" 60 "$sanitizer" --tool memcheck --error-exitcode 9 "$folder/golden" --exact "$case"
    done
    for case in fixture/e2b-like-q4_0/portable/16 fixture/moe-like-q8_0/best/1; do
      check "racecheck $case" 60 "$sanitizer" --tool racecheck --error-exitcode 9 "$folder/golden" --exact "$case"
    done
  fi
  nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2>/dev/null
  printf '%s' "$table"
  exit $failed
}

time_kernels() {
  cd "$root" || exit 1
  export GPU_REQUIRED=1
  chmod +x "$folder"/*
  "$folder/bench-kernels" "$@" || exit 1
  [ $# -gt 0 ] || "$folder/bench-steps"
}

case ${1:-} in
pack) pack ;;
run) run "${2:-}" ;;
time)
  shift
  time_kernels "$@"
  ;;
*)
  sed -n '2,10p' "$0"
  exit 2
  ;;
esac
