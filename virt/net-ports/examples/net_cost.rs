//! Benchmark of the cost per frame of a network device:
//! `cargo run --release -p net-ports --example net_cost [CELL [VISITS]]`.
//!
//! A cell is `g2h`, `h2g` or `loop`, with `_split` or `_packed`: frames of 64 bytes, a chain of one
//! descriptor each, rings of 256 entries, visits of the budget that a core gives to a port alone.
//! The driver is played between the visits, which alone are timed. The memory is a guest's behind
//! vhost-user without an IOMMU, seen through a `View`. All on one core, so no line comes from
//! another cache: a floor, not a forecast.
//!
//! Prints the tenth percentile of the visits, nanoseconds per frame. The number of instructions is
//! exact, and the same on a busy machine:
//! ```text
//! valgrind --tool=callgrind --toggle-collect='net_cost::visit*' \
//!     target/release/examples/net_cost g2h_split 1000
//! ```
//! divided by the frames that it prints (the rounds that warm the device up are not visits of that
//! name).

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use fake_driver::{AnyDriver, Buffer};
use guest_mem::{
    DirectMap, ForeignRam, ForeignRegion, Gpa, GuestRam, KeepAlive, PhysMem, SourceId, View,
};
use net_ports::{Loop, Sink, Source};
use vio::net::{Net, NetPort, RX, TX};
use vio::ring::Ring;
use vio::{Interrupt, PollBudget, QueueConfig, QueueDevice, feature};

const SIZE: u16 = 256;
const FRAME: u32 = 64;
const HEADER: u32 = 12;
/// Bytes of a receive buffer.
const BUFFER: u32 = 1530;
/// From one buffer to the next: an odd number of cache lines.
const STRIDE: u64 = 25 * 64;
/// Budget of a visit by a core to a port that is alone on it, in nanoseconds.
const BUDGET: u64 = 6_400;

/// Sink that drops interrupts.
struct Quiet;

impl Interrupt for Quiet {
    fn queue(&mut self, _queue: u16) {}
    fn config(&mut self) {}
}

type Driver = AnyDriver<ForeignRam, QueueConfig>;

struct World {
    ram: ForeignRam,
    rx: Driver,
    tx: Driver,
    net: Net,
    sends: bool,
    receives: bool,
}

/// One visit.
#[inline(never)]
fn visit(net: &mut Net, direct: &mut DirectMap, ram: &ForeignRam) {
    let mut view = View::new(direct, ram, SourceId(0));
    let _ = black_box(net.visit(&mut view, &mut Quiet, &mut PollBudget::new(0, BUDGET)));
}

/// The same, under a name of its own.
#[inline(never)]
fn warm_up(net: &mut Net, direct: &mut DirectMap, ram: &ForeignRam) {
    let mut view = View::new(direct, ram, SourceId(0));
    let _ = black_box(net.visit(&mut view, &mut Quiet, &mut PollBudget::new(1, BUDGET)));
}

/// Returns the start of a queue's buffer; its frame begins on a cache line.
fn buffer(queue: u16, nth: u64) -> u64 {
    0x10_0000 * (1 + u64::from(queue)) + nth % u64::from(SIZE) * STRIDE + 52
}

impl World {
    fn new(cell: &str) -> Result<Self, Box<dyn Error>> {
        let (direction, layout) = cell.split_once('_').ok_or("a cell is like g2h_split")?;
        let (port, sends, receives): (Box<dyn NetPort>, _, _) = match direction {
            "g2h" => (Box::new(Sink::default()), true, false),
            "h2g" => {
                let source = Source::new(FRAME as usize).ok_or("a frame's length")?;
                (Box::new(source), false, true)
            }
            "loop" => (Box::new(Loop::default()), true, true),
            other => return Err(format!("no direction {other}").into()),
        };
        let theirs = GuestRam::new(&[(Gpa::new(0), 4 << 20)])?;
        let file = Arc::new(theirs.memfd().ok_or("a file")?.try_clone_to_owned()?);
        let region = ForeignRegion {
            gpa: Gpa::new(0),
            len: 4 << 20,
            file,
            offset: 0,
        };
        let ram = ForeignRam::empty().with_regions(&[region])?;
        let mut net = Net::new([2, 0, 0, 0, 0, 1], SIZE, port)?.with_packed();
        let packed = match layout {
            "split" => 0,
            "packed" => feature::RING_PACKED,
            other => return Err(format!("no layout {other}").into()),
        };
        // As the client of `bench/net`: no EVENT_IDX, no offloads, mergeable buffers.
        let features = net.features() & !(feature::RING_PACKED | feature::IN_ORDER) | packed;
        let keep: KeepAlive = ram.keep_alive();
        net.begin(features, keep)?;
        let driver = |base, index| Driver::new(ram.clone(), Gpa::new(base), index, SIZE, features);
        let (rx, tx) = (driver(0x1_0000, RX), driver(0x2_0000, TX));
        for queue in [&rx, &tx] {
            net.add_queue(Ring::new(&queue.config(), SIZE, features)?)?;
        }
        Ok(Self {
            ram,
            rx,
            tx,
            net,
            sends,
            receives,
        })
    }

    /// Takes back the buffers that the device has used, and fills the rings.
    fn drive(&mut self, sent: &mut u64, posted: &mut u64) {
        while self.tx.used().is_some() {}
        while self.rx.used().is_some() {}
        if self.receives {
            while self.rx.free() != 0 {
                let at = Buffer::from((buffer(RX, *posted), BUFFER));
                self.rx.stage(&[], &[at]);
                *posted += 1;
            }
            self.rx.publish();
        }
        if self.sends {
            while self.tx.free() != 0 {
                let at = Buffer::from((buffer(TX, *sent), HEADER + FRAME));
                self.tx.stage(&[at], &[]);
                *sent += 1;
            }
            self.tx.publish();
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let cells = match args.next() {
        Some(cell) => vec![cell],
        None => ["split", "packed"]
            .iter()
            .flat_map(|layout| ["g2h", "h2g", "loop"].map(|way| format!("{way}_{layout}")))
            .collect(),
    };
    let visits: usize = match args.next() {
        Some(visits) => visits.parse()?,
        None => 20_000,
    };
    for cell in cells {
        let mut world = World::new(&cell)?;
        let mut direct = DirectMap::new();
        let (mut sent, mut posted) = (0, 0);
        for _ in 0..100 {
            world.drive(&mut sent, &mut posted);
            warm_up(&mut world.net, &mut direct, &world.ram);
        }
        let (mut frames, mut times) = (0, Vec::with_capacity(visits));
        for _ in 0..visits {
            world.drive(&mut sent, &mut posted);
            let before = world.net.stats().requests;
            let start = Instant::now();
            visit(&mut world.net, &mut direct, &world.ram);
            let ns = start.elapsed().as_nanos() as f64;
            let moved = world.net.stats().requests - before;
            frames += moved;
            times.push(ns / moved.max(1) as f64);
        }
        let errors = world.net.stats().errors;
        if errors != 0 || world.net.needs_reset() {
            return Err(format!("{cell}: {errors} frames dropped").into());
        }
        times.sort_by(f64::total_cmp);
        let tenth = times.get(visits / 10).copied().unwrap_or_default();
        println!("{cell:12} {tenth:6.1} ns per frame, {frames} frames in {visits} visits");
    }
    Ok(())
}
