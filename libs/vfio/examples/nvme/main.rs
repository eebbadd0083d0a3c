//! A small NVMe driver in user space: writes stamped blocks, reads them back, verifies each.
//!
//! An example of a driver over `vfio` and `dma-map`, from a device's address to its data: `open`
//! below gets a device, its IOVAs and a mapper; `nvme.rs` is the controller; `work.rs` maps a
//! buffer for each command and unmaps it when the command is complete; `trespass.rs` asks the
//! device for DMA where it may not, and checks the outcome.
//!
//! A summary goes to standard output, one line of JSON for each policy. Status 0: every block was
//! right.

/// Returns an error with this text unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($text:tt)*) => {
        if !$holds {
            return Err(format!($($text)*).into());
        }
    };
}

mod nvme;
mod trespass;
mod work;

use std::error::Error;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dma_map::iova::{Aperture, ChunkAllocator, CoreId};
use dma_map::mapper::{Optimistic, Reuse};
use dma_map::{DeviceLimits, DmaMapper, Domain, MapperCore, Policy, TickClock};
use vfio::{Container, Device, Group, VfioMap};

use nvme::Controller;
use work::Work;

/// Nanoseconds since the first call.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let since = START.get_or_init(Instant::now).elapsed();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

type Clock = TickClock<fn() -> u64>;
type Mapper = DmaMapper<ChunkAllocator, VfioMap, VfioMap, Clock>;
type Core = MapperCore<ChunkAllocator, VfioMap, VfioMap, Clock>;
type Failure = Box<dyn Error>;

const HELP: &str = "\
usage: nvme ADDRESS --overwrite [--policy NAME|all] [--blocks N] [--trespass]

Drives the NVMe controller at the PCI address ADDRESS, for example 0000:01:00.0, from user space: identifies it, writes
stamped blocks to namespace 1, reads them back and verifies them, each command with a mapping of its own.

  --overwrite     required: WHAT IS ON THE NAMESPACE IS LOST
  --policy NAME   strict, strict-combining, shared, async, deferred or optimistic; `all`: one after the other [strict]
  --blocks N      blocks of 4 KiB to verify under each policy [10000]
  --trespass      then ask the device for DMA to what is unmapped, read-only or not there; the IOMMU has to refuse what
                  the policy has closed (and the kernel logs a fault for each)

The device has to be bound to vfio-pci, which takes an IOMMU; what is missing is said. For other users than root `chown` the
file /dev/vfio/GROUP, and allow 8 MiB of locked memory (`ulimit -l`).";

const IDLE: Optimistic = Optimistic {
    quota: 256,
    residency: Duration::from_secs(1),
};
const POLICIES: [(&str, Policy); 6] = [
    ("strict", Policy::STRICT),
    ("strict-combining", Policy::STRICT_COMBINING),
    ("shared", Policy::SHARED),
    ("async", Policy::ASYNC),
    ("deferred", Policy::DEFERRED),
    // A buffer comes round again within some milliseconds; on a busy machine, later.
    (
        "optimistic",
        Policy::STRICT.with_reuse(Reuse::Optimistic(IDLE)),
    ),
];

struct Arguments {
    address: String,
    policies: Vec<(&'static str, Policy)>,
    blocks: u64,
    has_trespass: bool,
}

/// Parses the arguments. The error names the wrong one.
fn parse(mut given: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let (mut address, mut policy, mut blocks) = (None, "strict".to_owned(), 10_000);
    let (mut may_overwrite, mut has_trespass) = (false, false);
    while let Some(argument) = given.next() {
        let mut value = || given.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--overwrite" => may_overwrite = true,
            "--trespass" => has_trespass = true,
            "--policy" => policy = value()?,
            "--blocks" => blocks = value()?.parse().or(Err("--blocks: no number"))?,
            _ if argument.starts_with('-') => return Err(format!("what is {argument}?")),
            _ => address = Some(argument),
        }
    }
    let mut policies = Vec::from(POLICIES);
    policies.retain(|(name, _)| [name, "all"].contains(&policy.as_str()));
    if policies.is_empty() {
        return Err(format!("no policy {policy}"));
    }
    if !may_overwrite {
        return Err("without --overwrite nothing is done: what is on the namespace is lost".into());
    }
    let address = address.ok_or("no address of a device")?;
    Ok(Arguments {
        address,
        policies,
        blocks,
        has_trespass,
    })
}

/// Opens the device. Returns it with the IOVAs it may use and the map for its memory.
fn open(address: &str) -> Result<(Device, Aperture, VfioMap), Failure> {
    let group = Group::of_device(address)?;
    let container = Container::open()?;
    container.attach(&group)?;
    let info = container.info()?;
    let (aperture, left) = (info.aperture()?, info.mappings_left.unwrap_or(u32::MAX));
    let (id, usable) = (group.id(), aperture.usable());
    eprintln!("{address}: group {id}, IOVAs {usable:x?}, {left} mappings at most");
    let device = group.device(address)?;
    Ok((device, aperture, VfioMap::new(container)?))
}

/// One policy, from a reset to the last block.
fn run(arguments: &Arguments, name: &str, policy: Policy) -> Result<(), Failure> {
    let (device, aperture, map) = open(&arguments.address)?;
    let domain = Domain {
        allocator: ChunkAllocator::new(aperture, 1)?,
        table: map.clone(),
        invalidator: map.clone(),
        clock: TickClock::new(now as fn() -> u64),
    };
    let mapper = DmaMapper::new(domain, policy, DeviceLimits::default())?;
    let mut core = mapper.core(CoreId(0))?;
    let mut controller = Controller::start(device, &map, &mut core)?;
    eprintln!("{}", controller.description());

    let mut work = Work::new(&map, &mapper, &mut core, &controller)?;
    // Queues and lists of pages, which stay mapped.
    mapper.flush()?;
    let (before, kept) = (map.calls(), map.mappings());
    let done = work.verify(&mut controller, arguments.blocks)?;
    mapper.flush()?;
    let (calls, left) = (map.calls(), map.mappings());
    ensure!(left == kept, "{left:?} are left, and not {kept:?}");
    let trespass = match arguments.has_trespass {
        true => trespass::run(&map, &mapper, work.core, &mut controller, policy)?,
        false => String::new(),
    };
    work.core.publish();
    // A controller that is stopped uses no memory, so mappings and memory may go.
    controller.stop()?;
    let risk = mapper.risk();
    let reused: u64 = mapper.reuse_counts().hits;
    println!(
        "{{\"policy\":\"{name}\",\"blocks\":{},\"commands\":{},\"ms\":{},\"map_calls\":{},\"unmap_calls\":{},\
         \"reused\":{reused},\"stale_max\":{},\"longest_stale_us\":{}{trespass}}}",
        done.blocks,
        done.commands,
        done.ns / 1_000_000,
        calls.maps - before.maps,
        calls.unmaps - before.unmaps,
        risk.stale_max,
        risk.stale_times.max_ns / 1000,
    );
    Ok(())
}

fn main() -> ExitCode {
    let mut given = std::env::args().skip(1).peekable();
    if given.peek().is_none_or(|first| first == "--help") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let arguments = match parse(given) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("nvme: {problem} (--help)");
            return ExitCode::from(2);
        }
    };
    for (name, policy) in &arguments.policies {
        if let Err(error) = run(&arguments, name, *policy) {
            let (mut text, mut cause) = (error.to_string(), error.source());
            while let Some(error) = cause {
                text.push_str(&format!(": {error}"));
                cause = error.source();
            }
            eprintln!("nvme: {name}: {text}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
