//! Cost of a ring to the device per request:
//! `cargo run --release -p vio --example ring_cost [NAME]`.
//!
//! Cases `layout/shape/batch`: has_available, peek, advance and stage of each of `batch` chains,
//! then one publish; shape is `direct3` (header, data, status, as a block device has them) or
//! `indirect3` (the same in a table). The memory is a guest's without an IOMMU, seen through a
//! `View`; the driver fills the ring between the timed parts (in split rings it stores the index
//! inside them, once per batch). All on one core, so no line comes from another cache: a floor, not
//! a forecast. Prints the tenth percentile of 2000 laps, nanoseconds per request and per look at a
//! ring with nothing new; no test: a shared machine's times say little.

mod common;

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use common::{Case, LAPS, World, tenth};
use guest_mem::{DirectMap, Dma};
use vio::ring::{Chain, Ring, RingStop};

/// One batch.
#[inline(never)]
fn visit<D: Dma>(
    ring: &mut Ring,
    dma: &mut D,
    chain: &mut Chain,
    batch: u16,
) -> Result<u16, RingStop> {
    let mut done = 0;
    while done < batch && ring.peek(dma, chain)? {
        let token = ring.advance(chain);
        ring.stage(dma, black_box(token), chain.writable().len())?;
        done += 1;
    }
    black_box(ring.publish(dma)?);
    Ok(done)
}

fn run(world: &World, case: Case) -> Result<(f64, f64), Box<dyn Error>> {
    let refused = |stop: RingStop| format!("{stop:?}");
    let mut ring = world.ring(case)?;
    let mut chain = Chain::new();
    let ns = world.time(case, |view, batch| {
        let done = visit(&mut ring, view, &mut chain, batch).map_err(refused)?;
        assert_eq!(done, batch);
        Ok(())
    })?;
    let mut direct = DirectMap::new();
    let mut idle = Vec::with_capacity(LAPS);
    for _ in 0..LAPS {
        let start = Instant::now();
        for _ in 0..1000 {
            let mut view = world.view(&mut direct);
            assert!(!black_box(ring.has_available(&mut view).map_err(refused)?));
        }
        idle.push(start.elapsed().as_nanos() as f64 / 1000.0);
    }
    Ok((ns, tenth(idle)))
}

fn main() -> Result<(), Box<dyn Error>> {
    let world = World::new()?;
    let filter = std::env::args().nth(1).unwrap_or_default();
    for packed in [false, true] {
        for (indirect, in_order) in [(false, false), (true, false), (false, true)] {
            for batch in [1, 32] {
                let case = Case {
                    packed,
                    indirect,
                    in_order,
                    batch,
                };
                let layout = case.layout();
                let shape = if indirect { "indirect3" } else { "direct3" };
                let order = if in_order { "/in_order" } else { "" };
                let name = format!("{layout}/{shape}{order}/{batch}");
                if !name.contains(&filter) {
                    continue;
                }
                let (ns, idle) = run(&world, case)?;
                println!("{name:<32} {ns:8.2} ns {idle:8.2} ns");
            }
        }
    }
    Ok(())
}
