//! Cost of a block device per request: `cargo run --release -p vio --example blk_cost`.
//!
//! 4 KiB reads of a null and of a RAM disk, batches of 1 and 32, split and packed: one
//! [`Blk::visit`] per batch. Same arrangement as `ring_cost`, and the same warning: all on one
//! core, so no line comes from another cache. Prints the tenth percentile of 2000 laps, nanoseconds
//! per request.

mod common;

use std::error::Error;

use common::{Case, MIB, SIZE, World};
use guest_mem::PhysMem;
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, NullDisk};
use vio::{Interrupt, PollBudget, QueueDevice};

/// Interrupt sink that discards all interrupts.
struct Quiet;

impl Interrupt for Quiet {
    fn queue(&mut self, _queue: u16) {}
    fn config(&mut self) {}
}

fn run(world: &World, case: Case, disk: Box<dyn BlockIo>) -> Result<f64, Box<dyn Error>> {
    let config = BlkConfig {
        queue_size: SIZE,
        packed: true,
        ..BlkConfig::default()
    };
    let mut blk = Blk::new(config, disk)?;
    blk.begin(case.features(), world.ram.keep_alive())?;
    blk.add_queue(world.ring(case)?)?;
    world.time(case, |view, batch| {
        let before = blk.stats().requests;
        // As much as the batch costs and no more: in a packed ring the whole lap is there.
        let cost = match batch {
            1 => 1,
            batch => u64::from(batch) * 600,
        };
        let _ = blk.visit(view, &mut Quiet, &mut PollBudget::new(0, cost));
        assert_eq!(blk.stats().requests - before, u64::from(batch));
        Ok(())
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let world = World::new()?;
    for packed in [false, true] {
        for batch in [1, 32] {
            let case = Case {
                packed,
                indirect: false,
                in_order: false,
                batch,
            };
            let null = run(&world, case, Box::new(NullDisk::new(MIB)))?;
            let memory = MemDisk::new(vec![0; MIB as usize], 256, false);
            let memory = run(&world, case, Box::new(memory))?;
            let layout = case.layout();
            println!("{layout:6} batch {batch:2}   null {null:6.1} ns   ram {memory:6.1} ns");
        }
    }
    Ok(())
}
