//! Harness of the examples: operations through the back end, as a device would ask for them.

use std::error::Error;
use std::time::{Duration, Instant};

use disk_image::ImageDisk;
use vio::blk::{BlockIo, Op, Outcome};

/// Keeps `depth` operations in flight until `most` have begun or `limit` is over; how many ended.
/// Those with data have a private buffer for it.
pub fn drive(
    disk: &mut ImageDisk,
    depth: u32,
    most: u64,
    limit: Duration,
    op: impl Fn(u64) -> Op,
) -> Result<u64, Box<dyn Error>> {
    let start = Instant::now();
    let (mut begun, mut ended) = (0, 0);
    let mut free: Vec<u32> = (0..depth).collect();
    let mut done = Vec::new();
    loop {
        while begun < most
            && start.elapsed() < limit
            && let Some(slot) = free.pop()
        {
            let op = op(begun);
            if let Op::Read { len, .. } | Op::Write { len, .. } = op
                && !disk.reserve(slot, len)
            {
                return Err("no room for a buffer".into());
            }
            disk.submit(slot, op, &[]);
            begun += 1;
        }
        if ended == begun {
            return Ok(ended);
        }
        disk.flush();
        disk.poll(&mut done);
        if done.is_empty() {
            std::thread::yield_now();
        }
        for completion in done.drain(..) {
            if completion.outcome != Outcome::Done {
                return Err(format!("{completion:?}").into());
            }
            disk.unreserve(completion.slot);
            free.push(completion.slot);
            ended += 1;
        }
    }
}
