//! A device of the kernel's vhost, whose system calls are played here.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use guest_mem::Attachment;
use vhost_user::wire::{IotlbAccess, IotlbRange};
use vio::Revoked;

use super::iotlb::Tables;
use super::*;
use crate::handshake::ring as signal;
use crate::{KernelBackEnd, KernelConfig, KernelRing, NetIdentity};

const CSUM: u64 = 1;
const MRG_RXBUF: u64 = 1 << 15;
const OWN: u64 = 1 << 3 | 1 << 5 | 1 << 16;
const ACCESS_PLATFORM: u64 = 1 << 33;
const FEATURES: u64 = feature::VERSION_1 | CSUM | MRG_RXBUF | ACCESS_PLATFORM;
const DOMAIN: u32 = 5;
/// IOVA of the rings behind an IOMMU, in pages.
const RINGS: u64 = 0xff00;

/// A call that has been made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Features(u64),
    Start { index: u16, base: u16, desc: u64 },
    Stop(u16),
    Update(u64, u64, u64, IotlbAccess),
    Invalidate(u64, u64),
    Refuse(u64),
    Closed,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    misses: VecDeque<(u64, IotlbAccess)>,
    is_gone: bool,
    /// Calls of this kind fail.
    refuses: Option<fn(&Call) -> bool>,
    /// Calls of this kind do not return until this ends.
    holds: Option<fn(&Call) -> bool>,
}

#[derive(Clone)]
struct Kernel {
    state: Arc<Mutex<State>>,
    /// Readable while there are misses.
    requests: Arc<OwnedFd>,
    features: u64,
}

impl Kernel {
    fn new(features: u64) -> Self {
        Self {
            state: Arc::default(),
            requests: Arc::new(fds(1).remove(0)),
            features,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    fn has(&self, call: Call) -> bool {
        self.calls().contains(&call)
    }

    fn miss(&self, iova: u64, access: IotlbAccess) {
        self.state().misses.push_back((iova, access));
        signal(&self.requests);
    }

    fn call(&self, call: Call) -> Result<(), ImportError> {
        self.state().calls.push(call);
        while self.state().holds.is_some_and(|holds| holds(&call)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.state().refuses {
            Some(refuses) if refuses(&call) => Err(ImportError::Kernel {
                what: "what is asked of it",
                source: io::ErrorKind::InvalidInput.into(),
            }),
            _ => Ok(()),
        }
    }
}

/// Handle of the kernel's device, which the link owns; its drop is the close of the descriptor.
struct Device(Kernel);

impl Drop for Device {
    fn drop(&mut self) {
        self.0.state().calls.push(Call::Closed);
    }
}

impl KernelBackEnd for Device {
    fn features(&self) -> u64 {
        self.0.features
    }

    fn set_features(&mut self, features: u64) -> Result<(), ImportError> {
        self.0.call(Call::Features(features))
    }

    fn start_ring(&mut self, ring: &KernelRing<'_>) -> Result<(), ImportError> {
        self.0.call(Call::Start {
            index: ring.index,
            base: ring.base,
            desc: ring.desc.raw(),
        })
    }

    fn stop_ring(&mut self, index: u16) -> Result<u16, ImportError> {
        self.0.call(Call::Stop(index))?;
        Ok(40 + index)
    }

    fn update(
        &mut self,
        range: IotlbRange,
        gpa: Gpa,
        access: IotlbAccess,
    ) -> Result<(), ImportError> {
        let IotlbRange { first, last } = range;
        self.0.call(Call::Update(first, last, gpa.raw(), access))
    }

    fn invalidate(&mut self, range: IotlbRange) -> Result<(), ImportError> {
        self.0.call(Call::Invalidate(range.first, range.last))
    }

    fn refuse(&mut self, iova: u64) -> Result<(), ImportError> {
        self.0.call(Call::Refuse(iova))
    }

    fn take_miss(&mut self) -> Result<Option<(u64, IotlbAccess)>, ImportError> {
        let mut state = self.0.state();
        let miss = state.misses.pop_front();
        if state.misses.is_empty() {
            sidecore::drain_eventfd(self.0.requests.as_fd());
        }
        Ok(miss)
    }

    fn requests(&self) -> BorrowedFd<'_> {
        self.0.requests.as_fd()
    }

    fn is_gone(&self) -> bool {
        self.0.state().is_gone
    }
}

struct World {
    import: Import,
    tables: Tables,
    kernel: Kernel,
    kick: Vec<OwnedFd>,
    released: Vec<u64>,
    has_iommu: bool,
}

impl World {
    fn try_new(kernel: Kernel, has_iommu: bool) -> Result<Self, ImportError> {
        let ram = ram();
        let kick = fds(2);
        let clones = kick.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let config = KernelConfig {
            name: "test".into(),
            identity: NetIdentity {
                mac: [2, 0, 0, 0, 0, 1],
                mtu: Some(1500),
            },
            queue_size: 256,
            has_iommu,
        };
        let device = Device(kernel.clone());
        let import = Import::attach(config, device, ram.clone(), clones, fds(2))?;
        Ok(Self {
            import,
            tables: Tables {
                ram,
                attachment: Attachment::Domain(DOMAIN),
                pages: BTreeMap::from([(RINGS, (1, true, true))]),
                recorded: 0,
                is_absent: false,
            },
            kernel,
            kick,
            released: Vec::new(),
            has_iommu,
        })
    }

    /// Its rings are served, and what was called for that is no matter.
    fn new(has_iommu: bool) -> Self {
        let mut world = Self::try_new(Kernel::new(FEATURES), has_iommu).unwrap();
        world.start();
        world.kernel.state().calls.clear();
        world
    }

    fn rings(&self) -> Vec<QueueConfig> {
        let behind = |index: u16| {
            let base = (RINGS << 12) + 0x800 * u64::from(index);
            QueueConfig {
                index,
                size: 16,
                desc: Iova::new(base),
                avail: Iova::new(base + 0x400),
                used: Iova::new(base + 0x600),
            }
        };
        match self.has_iommu {
            true => vec![behind(0), behind(1)],
            false => vec![ring(0), ring(1)],
        }
    }

    fn start(&mut self) {
        let rings = self.rings();
        self.import.start(self.import.features(), &rings).unwrap();
        self.until("served", |world| {
            let started = |call: &Call| matches!(call, Call::Start { index: 1, .. });
            world.kernel.calls().iter().any(started)
        });
    }

    /// Polls as the owner does, and returns whether the driver is notified of an event.
    fn poll(&mut self) -> bool {
        let has_events = self.import.has_events();
        let is_told = has_events && self.import.take_events();
        if has_events || self.import.is_waiting() {
            self.import.serve(&mut self.tables, 0);
        }
        self.released
            .extend(std::iter::from_fn(|| self.import.take_released()));
        is_told
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        eventually(what, || {
            self.poll();
            is_so(self)
        });
    }

    fn stop(&mut self) {
        self.until("stopped", |world| world.import.stop());
    }
}

fn page(number: u64) -> (u64, u64) {
    (number << 12, (number << 12) + 0xfff)
}

fn pages(first: u64) -> Revoked {
    Revoked::Pages {
        domain: DOMAIN,
        first: Iova::new(first << 12),
        last: Iova::new((first << 12) + 0xfff),
    }
}

#[test]
fn the_kernel_hears_of_its_own_features_and_of_rings_where_the_driver_has_them() {
    let mut world = World::try_new(Kernel::new(FEATURES), false).unwrap();
    let offered = FEATURES & !ACCESS_PLATFORM | OWN;
    assert_eq!(world.import.features(), offered);
    world.start();
    let start = |index| Call::Start {
        index,
        base: 0,
        desc: ring(index).desc.raw(),
    };
    let expected = [
        Call::Features(FEATURES & !ACCESS_PLATFORM),
        start(0),
        start(1),
    ];
    assert_eq!(world.kernel.calls(), expected);
}

#[test]
fn rings_go_on_where_they_were_stopped_and_begin_anew_after_a_reset() {
    let mut world = World::new(false);
    world.stop();
    for kick in &world.kick {
        sidecore::drain_eventfd(kick.as_fd());
    }
    world.import.resume();
    let start = |index, base| Call::Start {
        index,
        base,
        desc: ring(index).desc.raw(),
    };
    world.until("served again", |world| world.kernel.has(start(1, 41)));
    let calls = world.kernel.calls();
    assert_eq!(calls[..2], [Call::Stop(0), Call::Stop(1)]);
    assert_eq!(calls[3..], [start(0, 40), start(1, 41)]);
    // Work that came meanwhile has been announced already.
    world.until("kicked", |world| {
        sidecore::drain_eventfd(world.kick[1].as_fd())
    });
    world.stop();
    world.import.reset();
    world.kernel.state().calls.clear();
    world.start();
    assert!(world.kernel.has(start(0, 0)), "{:?}", world.kernel.calls());
}

#[test]
fn a_kernel_that_lacks_something_is_refused_with_what_it_lacks() {
    for (features, has_iommu, lacks) in [
        (FEATURES & !feature::VERSION_1, false, "VERSION_1"),
        (FEATURES & !ACCESS_PLATFORM, true, "ACCESS_PLATFORM"),
    ] {
        let error = World::try_new(Kernel::new(features), has_iommu).map(drop);
        let text = vhost_user::chain(&error.unwrap_err());
        assert!(text.contains(lacks), "{text}");
    }
}

#[test]
fn a_start_that_the_kernel_refuses_breaks_the_device_until_its_reset() {
    for refuses in [
        (|call| matches!(call, Call::Features(_))) as fn(&Call) -> bool,
        |call| matches!(call, Call::Start { index: 1, .. }),
    ] {
        let mut world = World::try_new(Kernel::new(FEATURES), false).unwrap();
        world.kernel.state().refuses = Some(refuses);
        let rings = world.rings();
        world.import.start(world.import.features(), &rings).unwrap();
        world.until("broken", |world| world.import.needs_reset());
        let (mut starts, mut stops) = (0, 0);
        for call in world.kernel.calls() {
            starts += u32::from(matches!(call, Call::Start { .. }));
            stops += u32::from(matches!(call, Call::Stop(_)));
        }
        assert_eq!(starts, stops, "what was started is stopped");
        world.kernel.state().refuses = None;
        world.stop();
        world.import.reset();
        world.start();
        assert!(!world.import.needs_reset());
    }
}

#[test]
fn a_miss_is_answered_by_the_owner_and_asked_once() {
    let mut world = World::new(true);
    world.tables.pages.insert(0x10, (0x20, true, false));
    world.tables.is_absent = true;
    for _ in 0..1_000 {
        world.kernel.miss(0x10_123, IotlbAccess::Read);
    }
    world.until("all asked", |world| {
        world.kernel.state().misses.is_empty() && world.import.is_waiting()
    });
    world.tables.is_absent = false;
    let (first, last) = page(0x10);
    let update = Call::Update(first, last, 0x20 << 12, IotlbAccess::Read);
    world.until("answered", |world| world.kernel.has(update));
    world.stop();
    let updates = world.kernel.calls();
    let updates = updates.iter().filter(|call| **call == update).count();
    assert_eq!(updates, 1, "an entry answers all that it covers");
    assert!(!world.import.needs_reset());
}

#[test]
fn an_address_without_a_mapping_stops_the_rings_and_ends_the_question() {
    let mut world = World::new(true);
    world.tables.pages.insert(0x10, (0x20, true, false));
    // Mapped, but not for that.
    for iova in [0x99_000, 0x10_000] {
        world.kernel.miss(iova, IotlbAccess::Write);
        world.until("broken", |world| world.import.needs_reset());
        world.until("ended", |world| world.kernel.has(Call::Refuse(iova)));
        let expected = [Call::Stop(0), Call::Stop(1), Call::Refuse(iova)];
        assert_eq!(world.kernel.calls(), expected);
        world.stop();
        world.import.reset();
        world.start();
        assert!(!world.import.needs_reset());
        world.kernel.state().calls.clear();
    }
    assert_eq!(world.tables.recorded, 2, "the guest sees the faults");
}

#[test]
fn questions_about_rings_that_are_stopped_do_not_stay_in_the_kernel() {
    let mut world = World::new(true);
    world.tables.is_absent = true;
    world.kernel.miss(0x10_000, IotlbAccess::Read);
    world.until("asked", |world| world.import.is_waiting());
    world.stop();
    let expected = [Call::Stop(0), Call::Stop(1), Call::Refuse(0x10_000)];
    assert_eq!(world.kernel.calls(), expected);
    // The answer, of whichever kind, is about rings that are gone.
    world.tables.is_absent = false;
    world.poll();
    assert!(!world.import.needs_reset());
}

#[test]
fn an_invalidation_is_released_once_the_kernel_has_forgotten() {
    let mut world = World::new(true);
    let is_invalidation = |call: &Call| matches!(call, Call::Invalidate(..));
    world.kernel.state().holds = Some(is_invalidation);
    assert!(world.import.invalidated(pages(RINGS), 7));
    world.until("told", |world| {
        world.kernel.calls().iter().any(is_invalidation)
    });
    world.poll();
    assert_eq!(world.released, [], "the write has not returned");
    world.kernel.state().holds = None;
    world.until("released", |world| world.released == [7]);
    let (first, last) = page(RINGS);
    assert_eq!(world.kernel.calls(), [Call::Invalidate(first, last)]);
}

#[test]
fn a_kernel_that_does_not_forget_is_closed_before_the_hold_ends() {
    let mut world = World::new(true);
    world.kernel.state().refuses = Some(|call| matches!(call, Call::Invalidate(..)));
    assert!(world.import.invalidated(pages(RINGS), 7));
    world.until("released", |world| world.released == [7]);
    assert!(world.kernel.has(Call::Closed), "nothing else ends its use");
    world.until("broken", |world| world.import.needs_reset());
    // Nothing serves it any more, and it says so.
    world.stop();
    world.import.reset();
    world
        .import
        .start(world.import.features(), &world.rings())
        .unwrap();
    world.until("broken again", |world| world.import.needs_reset());
}

#[test]
fn a_call_that_does_not_return_is_given_up_by_the_owner() {
    let mut world = World::new(true);
    let is_invalidation = |call: &Call| matches!(call, Call::Invalidate(..));
    world.kernel.state().holds = Some(is_invalidation);
    assert!(world.import.invalidated(pages(RINGS), 7));
    world.until("told", |world| {
        world.kernel.calls().iter().any(is_invalidation)
    });
    world.import.hold_overdue(7);
    assert_eq!(world.import.take_released(), Some(7));
    assert!(world.import.needs_reset());
    world.kernel.state().holds = None;
    world.until("stopped", |world| world.kernel.has(Call::Stop(1)));
}

#[test]
fn an_interface_that_is_deleted_takes_the_link_down() {
    let mut world = World::new(false);
    let status = |world: &World| {
        let mut status = [0; 2];
        world.import.read_config(6, &mut status);
        u16::from_le_bytes(status)
    };
    assert_eq!(status(&world), 1);
    world.kernel.state().is_gone = true;
    let mut told = 0;
    eventually("told", || {
        told += u32::from(world.poll());
        told != 0
    });
    assert_eq!((told, status(&world)), (1, 0));
    assert!(
        !world.import.needs_reset(),
        "its rings are served as before"
    );
}

#[test]
fn a_ring_that_makes_no_sense_breaks_the_device() {
    let ram = ram();
    let kernel = Kernel::new(FEATURES);
    // The link's own descriptor for errors is what the kernel signals.
    let shared = Arc::new(crate::shared::Shared::new().unwrap());
    let class = crate::Class::Net(NetIdentity {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: None,
    });
    let device = Device(kernel.clone());
    let offer = crate::kernel::Offer::of(&device, &class, false).unwrap();
    let fds = crate::handshake::RingFds::new(fds(2), fds(2)).unwrap();
    let err = fds.err.try_clone().unwrap();
    let memory = crate::memory::Memory::new(ram);
    let rings = [0, 1].map(|index| memory.place(&ring(index)).unwrap());
    let link = crate::kernel::KernelLink::new("test".into(), device, offer, shared.clone(), fds);
    let thread = std::thread::spawn(move || link.run());
    shared.order(crate::shared::LinkCommand::Start(
        crate::shared::Activation {
            generation: 1,
            features: FEATURES,
            rings: rings.to_vec(),
        },
    ));
    let started = |call: &Call| matches!(call, Call::Start { index: 1, .. });
    eventually("served", || kernel.calls().iter().any(started));
    signal(&err);
    eventually("broken", || shared.broken() == 1);
    assert!(kernel.has(Call::Stop(1)));
    shared.end();
    thread.join().unwrap();
    assert_eq!(kernel.calls().last(), Some(&Call::Closed));
}
