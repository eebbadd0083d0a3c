#!/bin/sh
# Builds the measuring program of bench/vtd over the crates of an old commit, for `make bench-vtd` to run beside the new one:
# target/old/COMMIT/ holds that commit's tree, with today's measuring source, and what was built. Prints the program's path,
# or nothing and why, where this is no clone with that history.
set -eu
commit=5898c32
cd "$(dirname "$0")/.."
tree=target/old/$commit
program=$tree/target/release/vtd-case
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
    echo "old-vtd: commit $commit is not in this tree's history: its ratios are left out" >&2
    exit 0
fi
if [ ! -e "$tree/Cargo.toml" ]; then
    rm -rf "$tree"
    mkdir -p "$tree"
    git archive "$commit" | tar -x -C "$tree"
fi
mkdir -p "$tree/bench/vtd/src/bin"
for file in cases.rs guest.rs bin/vtd-case.rs; do
    cmp -s "bench/vtd/src/$file" "$tree/bench/vtd/src/$file" || cp "bench/vtd/src/$file" "$tree/bench/vtd/src/$file"
done
(cd "$tree" && CARGO_TARGET_DIR=target cargo build --release --quiet --locked -p vtd-bench --bin vtd-case) >&2
echo "$program"
