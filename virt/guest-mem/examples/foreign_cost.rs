//! Benchmark of accesses to the memory of another process:
//! `cargo run --release -p guest-mem --example foreign_cost`.
//!
//! Cases: `run/hit`, `run/miss` (two regions in turn), `lease`, `lease+check` (with
//! `keeps_mapped`), `read` and `write` through a `View<DirectMap, ForeignRam>` beside a `memcpy` of
//! the same size in the same memory pattern, a watched word. Prints nanoseconds per operation, the
//! best of 9 rounds; no test: a shared machine's times say little.

use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use guest_mem::{
    DirectMap, Dma, ForeignRam, ForeignRegion, Gpa, GuestRam, Iova, Perm, PhysMem, SourceId, View,
    keeps_mapped,
};

const MIB: u64 = 1 << 20;
const ROUNDS: usize = 9;
const TIMES: u64 = 200_000;

fn measure(name: &str, mut step: impl FnMut(u64)) {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for number in 0..TIMES {
            step(number);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / TIMES as f64);
    }
    println!("{name:<24} {best:8.2} ns");
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vmm = GuestRam::new(&[(Gpa::new(0), 64 * MIB)])?;
    let file = Arc::new(vmm.memfd().expect("a file").try_clone_to_owned()?);
    let region = |gpa, offset| ForeignRegion {
        gpa: Gpa::new(gpa),
        len: 32 * MIB,
        file: file.clone(),
        offset,
    };
    let ram = ForeignRam::empty().with_regions(&[region(0, 0), region(4096 * MIB, 32 * MIB)])?;
    let keep = ram.keep_alive();
    let mut direct = DirectMap::new();
    let source = SourceId::new(0, 1, 0);
    let refused = |stop| io::Error::other(format!("{stop:?}"));

    measure("run/hit", |number| {
        let _ = black_box(ram.run(Gpa::new(black_box(number & 0xff_ffff))));
    });
    measure("run/miss", |number| {
        let _ = black_box(ram.run(Gpa::new(black_box((number & 1) * 4096 * MIB))));
    });
    measure("lease", |number| {
        let mut view = View::new(&mut direct, &ram, source);
        let at = Iova::new(black_box(number & 0xff_f000));
        if let Ok(lease) = view.lease(at, 4096, Perm::Read) {
            view.release(black_box(lease).id);
        }
    });
    measure("lease+check", |number| {
        let mut view = View::new(&mut direct, &ram, source);
        let at = Iova::new(black_box(number & 0xff_f000));
        if let Ok(lease) = view.lease(at, 4096, Perm::Read) {
            black_box(keeps_mapped(&keep, lease.hva, u64::from(lease.len)));
            view.release(black_box(lease).id);
        }
    });
    measure("is_lost", |_| {
        black_box(ram.is_lost());
    });
    let mut view = View::new(&mut direct, &ram, source);
    let window = view.window(Iova::new(0), 64, Perm::Read).map_err(refused)?;
    let watch = window.watch_u16(2);
    measure("watch/load", |_| {
        black_box(watch.load_relaxed());
    });

    // 256 places of a 16 MiB stretch, one after the other, so that the second-level cache does
    // not help; and one place repeatedly.
    for len in [16usize, 64, 128, 256, 512, 1024, 4096, 16384, 65536] {
        let mut buf = vec![1u8; len];
        let mut plain = vec![1u8; 16 << 20];
        ram.write(Gpa::new(0), &plain).map_err(refused)?;
        for (pattern, mask) in [("hot", 0), ("16M", 0xff_0000u64)] {
            if pattern == "16M" && len > 16384 {
                continue;
            }
            let place = |number: u64| black_box((number.wrapping_mul(0x9e37) << 8) & mask);
            measure(&format!("memcpy out/{pattern}/{len}"), |number| {
                let at = place(number) as usize;
                buf.copy_from_slice(&plain[at..at + len]);
                black_box(&mut buf);
            });
            measure(&format!("read/{pattern}/{len}"), |number| {
                let _ = black_box(view.read(Iova::new(place(number)), black_box(&mut buf)));
            });
            measure(&format!("memcpy in/{pattern}/{len}"), |number| {
                let at = place(number) as usize;
                plain[at..at + len].copy_from_slice(black_box(&buf));
                black_box(&mut plain);
            });
            measure(&format!("write/{pattern}/{len}"), |number| {
                let _ = black_box(view.write(Iova::new(place(number)), black_box(&buf)));
            });
        }
    }
    Ok(())
}
