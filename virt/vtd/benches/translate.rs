//! The unit's two hot paths, without a virtual machine.
//!
//! * `translate/hit/4k`: one IOTLB hit with permission check, and lease begin and end.
//! * `translate/hit_only/4k`, `translate/lease_only`: its two halves.
//! * `translate/hit/64k`: sixteen of them, the pieces of one 64 KiB request.
//! * `translate/miss/4k`: four levels walked (context cached), lease begin and end.
//! * `drain/psi/N`: a queue of N descriptors, the last of them a wait with status; 0 leases in flight.
//! * `drain/psi_leases/N`: the same with 64 leases in flight on unchanged pages.
//! * `sweep/nothing`: a `shared` sweep that finds nothing.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;

use common::{DISK, Guest, Machine, Mode, RW, STATUS, iotlb_domain, iotlb_pages, wait_status};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use guest_mem::test_utils::ArrayMem;
use guest_mem::{Gpa, Iommu, Iova, Perm};
use vtd::front::Shared;
use vtd::spec::registers as reg;
use vtd::{AccessLen, Config};

const BASE: u64 = 0xffff_0000;
const PAGES: u64 = 16;

fn machine() -> Machine<ArrayMem> {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    for page in 0..PAGES {
        guest.map(
            table,
            4,
            BASE + page * 0x1000,
            (0x80_0000 + page * 0x2000) | RW,
        );
    }
    let mut machine = Machine::new(Mode::Trap, Config::default(), guest.mem);
    machine.boot();
    machine
}

/// What `View::lease` and `View::release` do with the unit.
#[inline]
fn access(machine: &mut Machine<ArrayMem>, iova: u64) {
    let iova = Iova::new(iova);
    let unit = &mut machine.unit;
    let run = unit
        .translate(&machine.mem, black_box(DISK), black_box(iova), Perm::Write)
        .expect("mapped");
    let len = run.len.min(4096) as u32;
    let lease = unit
        .lease_begin(DISK, iova, run.gpa, len, Perm::Write)
        .expect("room");
    unit.lease_end(black_box(lease));
}

fn translate(c: &mut Criterion) {
    let mut group = c.benchmark_group("translate");
    let mut machine = machine();
    group.bench_function("hit/4k", |b| b.iter(|| access(&mut machine, BASE)));
    group.bench_function("hit_only/4k", |b| {
        b.iter(|| {
            let iova = black_box(Iova::new(BASE));
            let unit = &mut machine.unit;
            unit.translate(&machine.mem, black_box(DISK), iova, Perm::Write)
                .expect("mapped")
        });
    });
    group.bench_function("lease_only", |b| {
        b.iter(|| {
            let iova = black_box(Iova::new(BASE));
            let unit = &mut machine.unit;
            let lease = unit
                .lease_begin(DISK, iova, Gpa::new(0x80_0000), 4096, Perm::Write)
                .expect("room");
            unit.lease_end(black_box(lease));
        });
    });
    group.throughput(Throughput::Elements(PAGES));
    group.bench_function("hit/64k", |b| {
        b.iter(|| (0..PAGES).for_each(|page| access(&mut machine, BASE + page * 0x1000)));
    });
    group.throughput(Throughput::Elements(1));
    group.bench_function("miss/4k", |b| {
        // Sixteen misses after each flush; the flush is outside the measured time.
        b.iter_custom(|iterations| {
            let mut spent = std::time::Duration::ZERO;
            let mut done = 0;
            while done < iterations {
                machine.submit(&[iotlb_domain(1)]);
                let start = std::time::Instant::now();
                (0..PAGES).for_each(|page| access(&mut machine, BASE + page * 0x1000));
                spent += start.elapsed();
                done += PAGES;
            }
            spent.mul_f64(iterations as f64 / done as f64)
        });
    });
    group.finish();
}

fn drain(c: &mut Criterion) {
    let mut group = c.benchmark_group("drain");
    for (name, leases) in [("psi", 0u64), ("psi_leases", 64)] {
        for count in [1usize, 16, 256] {
            let mut machine = machine();
            for lease in 0..leases {
                machine.begin(DISK, BASE + lease % PAGES * 0x1000, 4096, Perm::Read);
            }
            // The ring holds 256 entries of which one stays free, so 256 go in two halves.
            let mut batch = vec![iotlb_pages(1, BASE, 0); count - 1];
            batch.push(wait_status(STATUS, 2));
            group.throughput(Throughput::Elements(count as u64));
            group.bench_with_input(BenchmarkId::new(name, count), &batch, |b, batch| {
                b.iter_custom(|iterations| {
                    let mut spent = std::time::Duration::ZERO;
                    for _ in 0..iterations {
                        for chunk in batch.chunks(128) {
                            machine.fill(chunk);
                            let tail = machine.tail;
                            let start = std::time::Instant::now();
                            machine.unit.write(reg::IQT, AccessLen::B4, tail);
                            black_box(machine.unit.step(&machine.mem, 0, &mut machine.out));
                            spent += start.elapsed();
                        }
                    }
                    spent
                });
            });
        }
    }
    group.finish();
}

fn sweep(c: &mut Criterion) {
    let mut group = c.benchmark_group("sweep");
    let mut machine = machine();
    let mut shared = Shared::enter(&mut machine.unit, &machine.page);
    group.bench_function("nothing", |b| {
        b.iter(|| {
            let Machine {
                unit,
                page,
                mem,
                out,
                ..
            } = &mut machine;
            black_box(shared.sweep(unit, page, mem, 0, out))
        });
    });
    group.bench_function("iqt_changed", |b| {
        b.iter(|| black_box(shared.iqt_changed(&machine.page)));
    });
    group.finish();
}

criterion_group!(benches, translate, drain, sweep);
criterion_main!(benches);
