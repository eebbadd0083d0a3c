//! A map and an unmap as a driver makes them, ours beside Linux's: an address is found and a table
//! entry written; cleared, the device made to forget, the address freed. No hardware on either
//! side.
//!
//! Linux's is `alloc_iova_fast`, `generic_pt` and `free_iova_fast` behind one call each for map and
//! unmap, strict, without the lock of its invalidation queue. Our deferred policy, and ours that
//! gives tables back, are compared with the same. A slot of the window holds what the interface
//! returns: a `Mapping` of ours, an address of Linux's.
#![expect(
    unsafe_code,
    reason = "a mapper that gives tables back trusts its allocator; Linux's unmap trusts its caller"
)]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use address::PhysAddr;
use anyhow::{Result, anyhow};
use dma_linux::{Domain, Linux};
use dma_map::invalidate::NullInvalidator;
use dma_map::{
    DeviceLimits, Direction, DmaMapper, ManualClock, MapperCore, Mapping, Policy, Segment,
};
use iova::CoreId;

use super::rig::{Table, table};
use crate::alloc::{self, Best, FIRST_PAGE, LAST_PAGE, space};
use crate::measure::{BATCH, Case, Random, Task, Tasks, Turns};
use crate::record::Record;

/// Map and unmap of one core.
trait Maps: Send + 'static {
    type Mapping: Send + 'static;

    /// Called by a thread before it goes on with what another one did.
    fn enter(&mut self) {}

    /// Maps `size` bytes, a page of that size.
    fn map(&mut self, phys: u64, size: u64) -> Self::Mapping;

    fn unmap(&mut self, mapping: Self::Mapping, size: u64);
}

/// A mapper without hardware.
pub type Mapper = DmaMapper<Best, Table, NullInvalidator, ManualClock>;
/// One core of it.
pub type Core = MapperCore<Best, Table, NullInvalidator, ManualClock>;

/// A mapper without hardware; one that `reclaims` gives tables back.
///
/// # Errors
/// The policy does not fit.
pub fn mapper(cores: usize, policy: Policy, reclaims: bool) -> Result<Mapper> {
    let domain = |allocator| -> Result<_> {
        Ok(dma_map::Domain {
            allocator,
            table: table()?,
            invalidator: NullInvalidator,
            clock: ManualClock::new(),
        })
    };
    let limits = DeviceLimits::default();
    if !reclaims {
        let domain = domain(Best::new(space()?, cores)?)?;
        return Ok(DmaMapper::new(domain, policy, limits)?);
    }
    let domain = domain(Best::retiring(space()?, cores)?)?;
    // SAFETY: the allocators of `iova` give out nothing of a chunk between `retire` and `recycle`,
    // nor anything that is allocated, which their tests check; there is no hardware that could have
    // cached anything; and no other code has the table or the allocator, which were made here.
    Ok(unsafe { DmaMapper::new_reclaiming(domain, policy, limits) }?)
}

struct Ours(Core);

impl Maps for Ours {
    type Mapping = Mapping;

    #[inline(never)]
    fn map(&mut self, phys: u64, size: u64) -> Mapping {
        let segment = Segment::new(PhysAddr::new(phys), size);
        match self.0.map(&[segment], Direction::Bidirectional) {
            Ok(mapping) => mapping,
            Err(_) => panic!("the space is far larger than the window"),
        }
    }

    #[inline(never)]
    fn unmap(&mut self, mapping: Mapping, _: u64) {
        self.0.unmap(mapping).expect("it is mapped");
    }
}

struct OfLinux {
    domain: Arc<Domain>,
    id: usize,
}

impl Maps for OfLinux {
    type Mapping = u64;

    fn enter(&mut self) {
        self.domain.linux().enter(self.id);
    }

    #[inline(always)]
    fn map(&mut self, phys: u64, size: u64) -> u64 {
        let first = self.domain.dma_map(phys, size as usize, 1, LAST_PAGE);
        assert_ne!(first, 0, "the space is far larger than the window");
        first
    }

    #[inline(always)]
    fn unmap(&mut self, first: u64, size: u64) {
        // SAFETY: `map` gave it for this size, and it is in one slot only.
        unsafe { self.domain.dma_unmap(first, size as usize, 1) }
    }
}

/// Parameters of the threads of a row: each holds `live` mappings of `size` bytes and replaces a
/// random one.
#[derive(Clone, Copy)]
struct Window {
    live: usize,
    size: u64,
}

struct Held<M: Maps> {
    maps: M,
    random: Random,
    slots: Vec<Option<M::Mapping>>,
    window: Window,
    count: u64,
}

impl<M: Maps> Held<M> {
    fn boxed(mut maps: M, id: usize, window: Window) -> Box<dyn Task> {
        maps.enter();
        let mut held = Self {
            maps,
            random: Random::of_core(id),
            slots: Vec::with_capacity(window.live),
            // So that the size is no constant to the compiler.
            window: std::hint::black_box(window),
            count: (id as u64) << 20,
        };
        for _ in 0..window.live {
            let mapping = held.another();
            held.slots.push(Some(mapping));
        }
        Box::new(held)
    }

    /// Maps the next buffer: above 4 GiB, each of a core elsewhere for a million mappings.
    #[inline(always)]
    fn another(&mut self) -> M::Mapping {
        self.count += 1;
        let phys = (1 << 32) + (self.count & 0x1f_ffff) * self.window.size;
        self.maps.map(phys, self.window.size)
    }
}

impl<M: Maps> Task for Held<M> {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        self.maps.enter();
        let mask = self.slots.len() - 1;
        for _ in 0..BATCH {
            let at = (self.random.bits() >> 32) as usize & mask;
            let mapping = self.slots[at].take().expect("the window is full");
            self.maps.unmap(mapping, self.window.size);
            self.slots[at] = Some(self.another());
        }
        BATCH
    }

    fn finish(&mut self) {
        self.maps.enter();
        for mapping in self.slots.drain(..).flatten() {
            self.maps.unmap(mapping, self.window.size);
        }
    }
}

fn ours(threads: usize, window: Window, policy: Policy, reclaims: bool) -> Result<Tasks> {
    let mapper = mapper(threads, policy, reclaims)?;
    let task = |id| {
        let core = mapper
            .core(CoreId(id))
            .map_err(|error| anyhow!("{error}"))?;
        Ok(Held::boxed(Ours(core), id, window))
    };
    (0..threads).map(task).collect()
}

fn of_linux(linux: &'static Linux, threads: usize, window: Window) -> Result<Tasks> {
    let domain = Arc::new(Domain::new(linux, FIRST_PAGE)?);
    let task = |id| {
        let domain = Arc::clone(&domain);
        Ok(Held::boxed(OfLinux { domain, id }, id, window))
    };
    (0..threads).map(task).collect()
}

/// A row: its name in keys, for people, threads, the key of strict's ratio, and the window.
#[rustfmt::skip]
pub const ROWS: [(&str, &str, usize, &str, usize, u64); 5] = [
    ("mu4k", "4 KiB, 256 live, random", 1, "map_unmap_linux_ratio", 256, 4096),
    ("mu4k", "the same", 2, "", 256, 4096),
    ("mu4k_65536", "4 KiB, 65,536 live, random", 1, "", 65_536, 4096),
    ("mu2m", "a leaf of 2 MiB, 256 live, random", 1, "map_unmap_2mib_linux_ratio", 256, 2 << 20),
    ("mu2m", "the same", 2, "", 256, 2 << 20),
];

/// Ours: name in keys, policy, whether tables are given back. The target for 2 MiB is about the one
/// that gives them back.
pub const POLICIES: [(&str, Policy, bool); 4] = [
    ("strict", Policy::STRICT, false),
    ("strict_reclaiming", Policy::STRICT, true),
    ("deferred", Policy::DEFERRED, false),
    ("deferred_reclaiming", Policy::DEFERRED, true),
];

/// Runs the rows.
pub fn measure(turns: &Turns, record: &mut Record) {
    for (name, title, threads, key, live, size) in ROWS {
        let window = Window { live, size };
        let mut cases: Vec<_> = POLICIES
            .into_iter()
            .map(|(policy_name, policy, reclaims)| {
                Case::new(format!("{name} {policy_name}"), threads, move || {
                    ours(threads, window, policy, reclaims)
                })
            })
            .collect();
        cases.extend(alloc::linux().map(|linux| {
            Case::new(format!("{name} linux"), threads, move || {
                of_linux(linux, threads, window)
            })
        }));
        let s = if threads == 1 { "" } else { "s" };
        record.section(&format!("unmap and map {title}, {threads} thread{s}"));
        let found = turns.measure(&cases);
        for (case, outcome) in cases.iter().zip(&found) {
            record.row(&case.name.replace(' ', "_"), case, outcome);
        }
        let of = |at: usize| found.get(at).and_then(|outcome| outcome.as_ref().ok());
        for (at, (policy, ..)) in POLICIES.iter().enumerate() {
            let row = format!("{name}_{policy}_{threads}thr_ratio");
            record.ratio(&row, of(at), of(POLICIES.len()));
        }
        if !key.is_empty() {
            let target = usize::from(name == "mu2m");
            record.ratio(key, of(target), of(POLICIES.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_every_policy_unmap_what_they_map() {
        for (_, policy, reclaims) in POLICIES {
            for size in [4096, 2 << 20] {
                let window = Window { live: 16, size };
                let mut tasks = ours(2, window, policy, reclaims).expect("cores");
                for task in &mut tasks {
                    assert_eq!(task.batch(&AtomicBool::new(false)), BATCH);
                }
                tasks.iter_mut().for_each(|task| task.finish());
            }
        }
    }
}
