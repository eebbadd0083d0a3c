#!/usr/bin/env bash
# All tests, suite by suite: how many seconds each took, and what it may take.
#
#   scripts/suites.sh [TEXT]       only suites whose name contains TEXT; it fails where there is none
#
# A suite is a test binary of the workspace, the examples in its documentation, or one of the commands below. What it
# may take stands in suites.budget, in seconds of *processor* time, its children's among them: that changes little when
# a machine is busy, where the seconds on a clock double. A suite that outgrew its budget fails: make it cheaper, or
# raise the budget and say why.
#
# Suites that the file marks `beside` only compute, or wait for locks: they run side by side. All others
# run one after the other, since many measure time.
set -euo pipefail
cd "$(dirname "$0")/.."
only=${1:-}
budgets=scripts/suites.budget
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# budget NAME: its line's seconds, else those of `default`.
budget() { awk -v name="$1" '$1 == name || ($1 == "default" && s == "") { s = $2 } END { print s }' "$budgets"; }
is_beside() { grep -q "^$1 .* beside$" "$budgets"; }

# suite NAME COMMAND…: runs it and says what it took. What it printed is shown if it failed, or counts by itself (selftest, eli).
suite() {
    local name=$1 log=$scratch/${1//\//,} verdict=ok real user system cpu may
    shift
    echo "$name" >>"$scratch/names"
    [[ $name == *"$only"* ]] || return 0
    echo "$name" >>"$scratch/chosen"
    may=$(budget "$name")
    TIMEFORMAT='%R %U %S'
    { time "$@" >"$log" 2>&1 || verdict=FAILED; } 2>"$log.time"
    read -r real user system <"$log.time"
    cpu=$(awk "BEGIN { print $user + $system }")
    if [ $verdict = ok ] && awk "BEGIN { exit !($cpu > $may) }"; then
        verdict="FAILED: it outgrew its budget ($budgets):"
    fi
    [ "$verdict" = ok ] && [[ $name != @(selftest|eli) ]] || cat "$log"
    printf '%s %s: %.0f s, processor %.1f of %d s\n' "$verdict" "$name" "$real" "$cpu" "$may"
    [ "$verdict" = ok ] || echo "$name" >>"$scratch/failed"
}

# binary DIRECTORY KIND NAME FILE: a test binary, in the directory of its crate. A hang-up is not ignored, even under
# `nohup make test`: what is started to ignore it does so, as `exitless` does on purpose.
binary() {
    local name=${1#"$PWD"/}/$2/$3
    suite "$name" env -C "$1" --default-signal=HUP CARGO_MANIFEST_DIR="$1" EXITLESS_LAB=1 "$4" --quiet
}

start=$SECONDS
# Not built here: examples, what others' allocators and policies are compared with (dma-bench, dma-peers), the long run of ours
# (dma-soak) and what fuzz targets found, which take longer to build than to test (make check has them).
crates=(--workspace --exclude dma-bench --exclude dma-peers --exclude dma-soak --exclude fuzz)
cargo test --release "${crates[@]}" --tests --no-run --message-format=json 2>"$scratch/build" >"$scratch/json" ||
    { cat "$scratch/build"; exit 1; }
# One line for each test binary: its crate's directory, kind, name and file.
sed -n 's/.*"reason":"compiler-artifact".*"manifest_path":"\([^"]*\)\/Cargo.toml".*"kind":\["\([^"]*\)"\].*"name":"\([^"]*\)","src_path".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*/\1 \2 \3 \4/p' \
    "$scratch/json" >"$scratch/binaries"
[ -s "$scratch/binaries" ] || { echo "suites: found no test binary"; exit 1; }
echo "built in $((SECONDS - start)) s"

export -f suite binary budget
export scratch budgets only
while read -r line; do
    read -r dir kind name _ <<<"$line"
    if is_beside "${dir#"$PWD"/}/$kind/$name"; then echo "$line"; fi
done <"$scratch/binaries" >"$scratch/beside"
xargs -r -P "$(nproc)" -L 1 bash -c 'binary "$@"' binary <"$scratch/beside"
while read -r -u 3 dir kind name file; do
    is_beside "${dir#"$PWD"/}/$kind/$name" || binary "$dir" "$kind" "$name" "$file"
done 3<"$scratch/binaries"
suite doc cargo test --release "${crates[@]}" --doc --quiet
suite selftest target/release/exitless-lab selftest
scripts/hypervisor.sh
suite eli target/release/exitless-lab eli --quick --report target/report/eli-quick.json

if [ ! -e "$scratch/chosen" ]; then
    echo "suites: no suite's name contains '$only'; there are" >&2
    sort "$scratch/names" | sed 's/^/  /' >&2
    exit 2
fi
echo "all suites: $((SECONDS - start)) s, load $(cut -d' ' -f1 /proc/loadavg)"
if [ -e "$scratch/failed" ]; then
    echo "failed: $(tr '\n' ' ' <"$scratch/failed")"
    exit 1
fi
