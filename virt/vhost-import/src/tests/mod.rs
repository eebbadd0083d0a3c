//! A device against a back end that is played here: the sessions are real, the disk behind them is
//! not.

mod back_end;
mod iotlb;
mod kernel;
mod life;
mod net;
mod refusals;
mod restarts;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use guest_mem::{Gpa, GuestRam, Iova, PhysMem};
use rustix::event::{EventfdFlags, eventfd};
use vio::{QueueConfig, RemoteDevice, feature};

use crate::{Import, ImportConfig, ImportError};
use back_end::{BackEnd, Plan};

const RAM: u64 = 1 << 20;
/// A second region, so that there is more than one to share.
const HIGH: u64 = 1 << 32;
/// Entries of a ring.
const SIZE: u16 = 64;
/// Time limit of anything that is expected to happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Until it is so.
#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ram() -> GuestRam {
    GuestRam::new(&[(Gpa::new(0), RAM), (Gpa::new(HIGH), RAM)]).unwrap()
}

fn fds(queues: u16) -> Vec<OwnedFd> {
    let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
    (0..queues).map(|_| eventfd(0, flags).unwrap()).collect()
}

fn config(path: &Path, queues: u16) -> ImportConfig {
    ImportConfig {
        queues,
        queue_size: 256,
        patience: Duration::from_millis(100),
        ..ImportConfig::new("test", path)
    }
}

/// A device, and the guest's RAM.
struct Guest {
    import: Import,
    ram: GuestRam,
    queues: u16,
    call: Vec<OwnedFd>,
}

impl Guest {
    fn connect(back_end: &BackEnd, queues: u16) -> Self {
        Self::try_connect(config(back_end.path(), queues)).unwrap()
    }

    fn try_connect(config: ImportConfig) -> Result<Self, ImportError> {
        let (ram, queues) = (ram(), config.queues);
        let all = config.class.device_queues(queues);
        let call = fds(all);
        let clones = call.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let import = Import::connect(config, ram.clone(), fds(all), clones)?;
        Ok(Self {
            import,
            ram,
            queues,
            call,
        })
    }

    /// The rings as this guest places them: the odd ones in the second region.
    fn rings(&self) -> Vec<QueueConfig> {
        (0..self.queues).map(ring).collect()
    }

    fn start(&mut self) {
        let features = self.import.features();
        self.import.start(features, &self.rings()).unwrap();
    }

    fn stop(&mut self) {
        eventually("the rings are stopped", || self.import.stop());
    }

    /// Stores a ring's two indices, as driver and back end would.
    fn set_indices(&self, queue: u16, avail: u16, used: u16) {
        let config = ring(queue);
        for (at, value) in [(config.avail, avail), (config.used, used)] {
            let at = Gpa::new(at.raw() + 2);
            self.ram.write(at, &value.to_le_bytes()).unwrap();
        }
    }
}

fn ring(index: u16) -> QueueConfig {
    let base = if index.is_multiple_of(2) {
        0x1000
    } else {
        HIGH + 0x1000
    } + u64::from(index) * 0x2000;
    QueueConfig {
        index,
        size: SIZE,
        desc: Iova::new(base),
        avail: Iova::new(base + 0x400),
        used: Iova::new(base + 0x800),
    }
}

/// Everything but IN_ORDER.
fn plan() -> Plan {
    Plan {
        features: feature::VERSION_1 | feature::EVENT_IDX | 1 << 6 | 1 << 9 | 1 << 12,
        ..Plan::default()
    }
}
