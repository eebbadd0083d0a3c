#!/bin/bash
# Proves that address, lines, iova, dma-map, eli, elvis, virtqueue and vtd-spec need no std: scripts/no-std.sh
#
# 1. A library without std that has a panic handler of its own is linked against them, for this machine. std has a
#    panic handler too, and there can be but one: if any of them, or anything they depend on, linked std, the compiler
#    would refuse. That it does refuse is tried first, with a program that uses std as well.
# 2. They are checked for x86_64-unknown-none, which has no std at all, where that target is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

crates=(address lines iova dma-map eli elvis virtqueue vtd-spec)
target=x86_64-unknown-none
build=${CARGO_TARGET_DIR:-target}/no-std
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

packages=()
for crate in "${crates[@]}"; do
    packages+=(-p "$crate")
done
CARGO_TARGET_DIR=$build cargo build --quiet --release "${packages[@]}"

externs=(-L "dependency=$build/release/deps")
for crate in "${crates[@]}"; do
    name=${crate//-/_}
    externs+=(--extern "$name=$build/release/lib$name.rlib")
done

link() { # with a line of its own
    rustc --edition 2024 --crate-type staticlib -C panic=abort -C opt-level=1 "${externs[@]}" \
        -o "$out/libproof.a" - 2>"$out/why" <<RUST
#![no_std]
$1
use core::alloc::{GlobalAlloc, Layout};
struct None;
unsafe impl GlobalAlloc for None {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 { core::ptr::null_mut() }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
#[global_allocator]
static ALLOCATOR: None = None;
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! { loop {} }

/// Maps and unmaps, so that the code of all four is there.
#[unsafe(no_mangle)]
pub extern "C" fn proof(phys: u64) -> u64 {
    use dma_map::table::{HostMemory, IoPageTable, LeafSizes, TableConfig, VtdSecondLevel};
    let Ok(aperture) = iova::Aperture::of_bits(39) else { return 1 };
    let Ok(allocator) = iova::ChunkAllocator::new(aperture, 2) else { return 2 };
    let config = TableConfig { levels: 3, leaves: LeafSizes::FOUR_K };
    let Ok(table) = IoPageTable::<VtdSecondLevel, _>::new(HostMemory::new(), config) else { return 3 };
    let domain = dma_map::Domain {
        allocator,
        table,
        invalidator: dma_map::invalidate::NullInvalidator,
        clock: dma_map::ManualClock::new(),
    };
    let limits = dma_map::DeviceLimits::of_bits(32);
    let Ok(mapper) = dma_map::DmaMapper::new(domain, dma_map::Policy::DEFERRED, limits) else { return 4 };
    let Ok(mut core) = mapper.core(iova::CoreId(0)) else { return 5 };
    let segment = dma_map::Segment::new(address::PhysAddr::new(phys), 4096);
    let Ok(mapping) = core.map(&[segment], dma_map::Direction::ToDevice) else { return 6 };
    let lock = lines::Lock::new(mapping.iova().raw());
    let at = *lock.lock();
    if core.unmap(mapping).is_err() { return 7 }
    at
}
RUST
}

if link "extern crate std;"; then
    echo "no-std: a program with std was accepted: this check finds nothing" >&2
    exit 1
fi
grep -q "panic_impl" "$out/why" || {
    echo "no-std: a program with std was refused for another reason:" >&2
    cat "$out/why" >&2
    exit 1
}
link "" || {
    echo "no-std: something links std:" >&2
    cat "$out/why" >&2
    exit 1
}
echo "no-std: ${crates[*]}: linked without std"

if [ -n "$(find "$(rustc --print target-libdir --target $target)" -name 'libcore-*' 2>/dev/null)" ]; then
    CARGO_TARGET_DIR=$build cargo check --quiet --release --target $target "${packages[@]}"
    echo "no-std: ${crates[*]}: checked for $target"
else
    echo "no-std: skipped the check for $target: not installed (rustup target add $target)"
fi
