#!/bin/sh
# Builds a program of an old commit, for a measuring command to run beside today's: `old.sh vtd-case`, the measuring program
# of bench/vtd with today's source over that commit's crates, or `old.sh exitless`. target/old/COMMIT/ holds that commit's
# tree and what was built. Prints the program's path, or nothing and why, where this is no clone with that history.
set -eu
commit=5898c32
program=$1
cd "$(dirname "$0")/.."
tree=target/old/$commit
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
    echo "old.sh: commit $commit is not in this tree's history: its ratios are left out" >&2
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
(cd "$tree" && CARGO_TARGET_DIR=target cargo build --release --quiet --locked --bin "$program") >&2
echo "$PWD/$tree/target/release/$program"
