//! A guest, a caged disk, and a worker in the same thread.

mod events;
mod like_blk;
mod memory;

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fake_mem::ArrayMem;
use guest_mem::{Iommu, SharedFile};
use rustix::event::{EventfdFlags, eventfd};
use worker_area::{Shape, Worker};

use super::{Area, Caged, CagedClass, WorkerEvent, WorkerProcess};
use crate::QueueDevice;
use crate::blk::tests::support::{Guest, MEMORY, RINGS, image};
use crate::blk::{BlkConfig, BlkFacts, BlkWorker, BlockIo, MemDisk};

/// State of the process as a test sets and reads it.
#[derive(Default)]
struct Facts {
    events: VecDeque<WorkerEvent>,
    kicks: u32,
    ends: Vec<bool>,
}

#[derive(Clone, Default)]
struct Control(Arc<Mutex<Facts>>);

impl Control {
    fn facts(&self) -> std::sync::MutexGuard<'_, Facts> {
        self.0.lock().expect("no test panics while it holds it")
    }

    fn tell(&self, event: WorkerEvent) {
        self.facts().events.push_back(event);
    }
}

/// A process that is none.
struct Process {
    control: Control,
    wake: OwnedFd,
}

impl WorkerProcess for Process {
    fn kick(&mut self) {
        self.control.facts().kicks += 1;
    }

    fn wake_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    fn drain(&mut self) {}

    fn has_events(&self) -> bool {
        !self.control.facts().events.is_empty()
    }

    fn next_event(&mut self) -> Option<WorkerEvent> {
        self.control.facts().events.pop_front()
    }

    fn record_answer(&mut self) {}

    fn end(&mut self, is_final: bool) {
        self.control.facts().ends.push(is_final);
    }
}

/// A worker over its own mapping of the area.
struct Served {
    area: Worker<SharedFile>,
    worker: BlkWorker,
}

impl Served {
    fn of(area: &Area, config: &BlkConfig, io: Box<dyn BlockIo>) -> Self {
        let file = area.file().try_clone_to_owned().expect("a descriptor");
        let area = Worker::open(file, area.shape().area_len()).expect("the area");
        let worker = BlkWorker::new(config, io, &area).expect("a disk");
        Self { area, worker }
    }

    fn step(&mut self) {
        self.worker.step(&mut self.area).expect("a good owner");
        self.area.publish();
    }
}

/// A guest with a caged disk.
struct CagedGuest {
    guest: Guest<CagedClass>,
    /// `None`: it has died, or does nothing.
    served: Option<Served>,
    control: Control,
    shape: Shape,
    config: BlkConfig,
}

/// A small area: windows of a page.
fn small() -> Shape {
    Shape::new(8, 4096, 16, 1).expect("a small area")
}

fn mem_disk() -> Box<MemDisk> {
    Box::new(MemDisk::new(image(), 1024, false))
}

impl CagedGuest {
    fn new(shape: Shape, io: Box<dyn BlockIo>) -> Self {
        let config = BlkConfig {
            queue_size: 64,
            ..BlkConfig::default()
        };
        Self::with(shape, io, config)
    }

    fn with(shape: Shape, io: Box<dyn BlockIo>, config: BlkConfig) -> Self {
        let area = Area::create(shape).expect("a memory file");
        let served = Served::of(&area, &config, io);
        let control = Control::default();
        let process = Process {
            control: control.clone(),
            wake: eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
        };
        let words = served.worker.facts().words();
        let facts = BlkFacts::from_words(words).expect("facts of a disk");
        let device = Caged::new(&config, facts, area, Box::new(process)).expect("a device");
        let mem = ArrayMem::new(MEMORY);
        Self {
            guest: Guest::over(mem, RINGS, device, config.queue_size, !0),
            served: Some(served),
            control,
            shape,
            config,
        }
    }

    /// Polls device and worker in turn until a used element comes.
    fn wait_used<D: guest_mem::Dma>(&mut self, dma: &mut D) -> (u16, u32) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            let _ = self.guest.blk.poll(dma, &mut self.guest.irq, 0);
            if let Some(served) = &mut self.served {
                served.step();
            }
            if let Some(used) = self.guest.driver.used() {
                return used;
            }
        }
        panic!("no completion: {:?}", self.guest.blk.stats());
    }

    /// Runs one request to its end; status and bytes written.
    fn run(
        &mut self,
        kind: u32,
        sector: u64,
        readable: &[(u64, u32)],
        writable: &[(u64, u32)],
    ) -> (u8, u32) {
        let mut dma = self.guest.dma();
        let head = self.guest.request(0, kind, sector, readable, writable);
        let (used, len) = self.wait_used(&mut dma);
        assert_eq!(used, head);
        assert_eq!(dma.iommu.leases().len(), 0, "a caged disk takes no lease");
        (self.guest.status(0), len)
    }
}
