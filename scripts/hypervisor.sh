#!/bin/sh
# The micro-hypervisor and the guest that attacks it, beside the program: scripts/hypervisor.sh; `hypervisor.sh check`: format and lints.
#
# A workspace of its own, in bin/exitless-hv: what runs on no operating system is linked otherwise than programs
# (bin/exitless-hv/.cargo/config.toml, which flags in the environment would override).
set -eu
unset RUSTFLAGS CARGO_BUILD_RUSTFLAGS CARGO_BUILD_TARGET CARGO_ENCODED_RUSTFLAGS || true
root=$(cd "$(dirname "$0")/.." && pwd)
export CARGO_TARGET_DIR="$root/target/exitless-hv"
cd "$root/bin/exitless-hv"
if [ "${1-}" = check ]; then
    cargo fmt --all --check
    cargo clippy --release --quiet --workspace -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --quiet
    exit 0
fi
cargo build --release --quiet
mkdir -p "$root/target/release"
for image in exitless-hv eli-attacks; do
    built="$CARGO_TARGET_DIR/x86_64-unknown-linux-gnu/release/$image"
    cmp -s "$built" "$root/target/release/$image" || cp "$built" "$root/target/release/$image"
done
