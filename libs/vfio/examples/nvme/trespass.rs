//! DMA where it may not be: checks which accesses the IOMMU allows under a policy, and which it
//! refuses.
//!
//! The device is asked to read a block of the namespace into memory, and the memory is checked:
//! either all of the block has come, or nothing of it. The command's status says less, since a
//! controller may have sent data before it receives a fault (QEMU's reports success).

use dma_map::address::Iova;
use dma_map::mapper::{Reuse, Teardown};
use dma_map::{Direction, Policy};
use std::sync::atomic::Ordering;
use vfio::{DmaBuffer, VfioMap};

use crate::nvme::{Controller, PAGE, READ};
use crate::{Core, Failure, Mapper};

/// Contents of the memory before.
const UNTOUCHED: u64 = 0x5555_aaaa_5555_aaaa;

/// Returns whether the device, asked to write a page of data to `iova`, has written it to `memory`.
fn reaches(controller: &mut Controller, memory: &DmaBuffer, iova: Iova) -> Result<bool, Failure> {
    for place in memory.words() {
        place.store(UNTOUCHED, Ordering::Relaxed);
    }
    // The block that slot 0 has written.
    controller.submit(0, READ, 0, 1, [iova.raw(), 0]);
    let answer = controller.wait()?;
    let words = memory.words().iter();
    let untouched = words
        .filter(|place| place.load(Ordering::Relaxed) == UNTOUCHED)
        .count();
    eprintln!(
        "  DMA to {iova:#x}: status {:#x}, {untouched} of {} words untouched",
        answer.status,
        PAGE / 8
    );
    match untouched {
        0 => Ok(true),
        _ if untouched == PAGE / 8 => Ok(false),
        _ => Err(format!("{untouched} words of a page were not written").into()),
    }
}

/// Tries each access. Returns fields for the summary.
///
/// # Errors
/// The device reaches what it must not, or does not reach what it may.
pub fn run(
    map: &VfioMap,
    mapper: &Mapper,
    core: &mut Core,
    controller: &mut Controller,
    policy: Policy,
) -> Result<String, Failure> {
    // The call that unmaps is the invalidation: only these policies defer it.
    let has_window = matches!(policy.teardown, Teardown::Deferred(_))
        || matches!(policy.reuse, Reuse::Optimistic(_));
    let memory = map.allocate(PAGE)?;
    let page = [memory.segment(0, PAGE)];
    let mut seen = String::new();
    let mut expect = |what: &str, reaches: bool, expected: bool| -> Result<(), Failure> {
        let verb = |reaches| if reaches { "reached" } else { "refused" };
        seen.push_str(&format!(",\"{what}\":\"{}\"", verb(reaches)));
        match reaches == expected {
            true => Ok(()),
            false => Err(format!(
                "{what}: the memory was {}, and should be {}",
                verb(reaches),
                verb(expected)
            )
            .into()),
        }
    };

    let read_only = core.map(&page, Direction::ToDevice)?;
    expect(
        "read_only",
        reaches(controller, &memory, read_only.iova())?,
        false,
    )?;
    core.unmap(read_only)?;
    let mapping = core.map(&page, Direction::FromDevice)?;
    let iova = mapping.iova();
    expect("mapped", reaches(controller, &memory, iova)?, true)?;
    core.unmap(mapping)?;
    // No time has passed for the mapper.
    expect("unmapped", reaches(controller, &memory, iova)?, has_window)?;
    mapper.flush()?;
    expect("flushed", reaches(controller, &memory, iova)?, false)?;
    // A list of pages that is not there: the controller itself has to report that it could not read
    // it.
    controller.submit(0, READ, 0, 3, [iova.raw(), iova.raw()]);
    let status = controller.wait()?.status;
    expect("list", status == 0, false)?;
    Ok(seen)
}
