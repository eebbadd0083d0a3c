//! Exports on a real sidecore, and guests that drive them over real sockets.
#![allow(dead_code, reason = "each test uses a part")]

pub mod front;
pub mod raw;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sidecore::{Handle, IdlePolicy, Sidecore, SidecoreBuilder};
use vhost_blk::drive::Run;
use vhost_blk::layout::Layout;
use vhost_blk::load::{Mix, Mode, Pacing, VmSpec};
use vhost_blk::memory::Memory;
use vhost_blk::queue::{Done, Extent, Op, Queue, SECTOR, Status};
use vhost_blk::{Client, Options};
use vhost_export::{Export, ExportConfig, ExportMessage, ExportStats};
use vio::blk::{Blk, BlkClass, BlkConfig, BlockIo, MemDisk, NullDisk, RawDisk};
use vio_faults::{SlowControl, SlowDisk};

/// Duration that no step of a test takes, however slow the machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a disk.
pub const DISK: usize = 4 << 20;
/// Bytes of a request.
pub const BLOCK: u32 = 4096;

/// Feature bits by name.
pub use vhost_blk::ring::feature;

/// One export to be.
pub struct Disk {
    pub config: ExportConfig,
    pub blk: BlkConfig,
    pub io: Box<dyn BlockIo>,
}

impl Disk {
    pub fn new(name: &str, io: Box<dyn BlockIo>) -> Self {
        Self {
            config: ExportConfig::new(name),
            blk: BlkConfig {
                queues: 4,
                packed: true,
                ..BlkConfig::default()
            },
            io,
        }
    }

    pub fn ram(name: &str) -> Self {
        Self::new(name, Box::new(MemDisk::new(vec![0; DISK], 64, false)))
    }

    pub fn null(name: &str) -> Self {
        Self::new(name, Box::new(NullDisk::new(DISK as u64)))
    }

    /// A RAM disk whose requests end when the test says so.
    pub fn slow(name: &str) -> (Self, SlowControl) {
        let below = Box::new(MemDisk::new(vec![0; DISK], 64, false));
        let (disk, control) = SlowDisk::new(below).expect("a socket pair");
        let mut disk = Self::new(name, Box::new(disk));
        // Short, so that tests that run into it do not wait long; those that do not are far below.
        disk.config.drain_limit_ns = 200_000_000;
        (disk, control)
    }

    pub fn file(name: &str, path: &Path) -> Self {
        std::fs::write(path, vec![0; DISK]).expect("a file");
        let file = RawDisk::open(path, Default::default()).expect("a disk");
        Self::new(name, Box::new(file))
    }
}

/// A sidecore that serves some disks.
pub struct Server {
    core: Option<Sidecore<Export<BlkClass>>>,
    pub dir: tempfile::TempDir,
}

impl Server {
    pub fn start(idle: IdlePolicy, disks: Vec<Disk>) -> Self {
        Self::with(SidecoreBuilder::new("test").idle(idle), disks)
    }

    pub fn with(builder: SidecoreBuilder, disks: Vec<Disk>) -> Self {
        log_to_nowhere();
        let dir = tempfile::tempdir().expect("a directory");
        let mut exports = Vec::new();
        for (at, disk) in disks.into_iter().enumerate() {
            let listener = UnixListener::bind(dir.path().join(at.to_string())).expect("a socket");
            let blk = Blk::new(disk.blk, disk.io).expect("a disk");
            exports.push(Export::new(disk.config, blk, listener).expect("an export"));
        }
        let core = builder.spawn(exports).expect("a thread");
        Self {
            core: Some(core),
            dir,
        }
    }

    pub fn core(&self) -> &Sidecore<Export<BlkClass>> {
        self.core.as_ref().expect("it runs")
    }

    pub fn handle(&self, disk: usize) -> Handle<ExportMessage> {
        self.core().handle(disk)
    }

    pub fn path(&self, disk: usize) -> PathBuf {
        self.dir.path().join(disk.to_string())
    }

    pub fn guest(&self, disk: usize, options: Options) -> Guest {
        Guest::connect(&self.path(disk), options)
    }

    pub fn stats(&self, disk: usize) -> ExportStats {
        self.handle(disk)
            .call(ExportMessage::Stats)
            .expect("it answers")
    }

    /// Waits until the counters of a disk say so.
    pub fn until(&self, disk: usize, what: &str, condition: impl Fn(&ExportStats) -> bool) {
        until(what, || condition(&self.stats(disk)));
    }

    /// Processor time of the sidecore.
    pub fn cpu(&self) -> Duration {
        self.core().thread_cpu_time().expect("it runs")
    }

    /// Stops it, and makes sure that it still can.
    pub fn stop(&mut self) -> Vec<Export<BlkClass>> {
        self.core.take().expect("it runs").stop()
    }
}

/// Options of a guest with these rings.
pub fn options(features: u64, queues: u16, depth: u16) -> Options {
    let all = Options::new(depth, BLOCK);
    let ring = feature::EVENT_IDX | feature::INDIRECT | feature::PACKED | feature::IN_ORDER;
    Options {
        features: all.features & !ring | features,
        queues,
        timeout: PATIENCE,
        ..all
    }
}

/// As [`options`], with an inflight region.
pub fn tracked(features: u64, queues: u16, depth: u16) -> Options {
    let options = options(features, queues, depth);
    Options {
        protocol: options.protocol | vhost_user::wire::ProtocolFeatures::INFLIGHT_SHMFD,
        ..options
    }
}

/// A run of random reads by one guest that asks again as soon as it is answered.
pub fn reads(socket: PathBuf, options: Options, measure: Duration) -> Run {
    Run {
        vms: vec![VmSpec {
            socket,
            depth: options.depth,
            block: options.block,
            weight: 1.0,
            pacing: Pacing::Closed,
            group: 0,
        }],
        options,
        mix: Mix {
            read: 100,
            flush: 0,
            is_sequential: false,
        },
        sectors: None,
        mode: Mode::Event,
        warm_up: Duration::ZERO,
        measure,
        seed: 1,
        server: None,
    }
}

/// Releases a disk's requests after a delay, in which the caller begins to wait for them.
pub fn open_soon(control: &SlowControl) -> thread::JoinHandle<()> {
    let control = control.clone();
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(2));
        control.set_open(true);
    })
}

/// Waits for a condition.
#[track_caller]
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "this did not happen: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// Queues of a front end or a client, and a driver's operations on them.
pub struct Io<'a> {
    pub memory: &'a Memory,
    pub layout: &'a Layout,
    pub queues: &'a mut [Queue],
}

/// Returns the initial content of block `block`.
pub fn pattern(block: u64) -> Vec<u8> {
    let first = (block as u8).wrapping_mul(31).wrapping_add(7);
    (0..BLOCK).map(|at| first.wrapping_add(at as u8)).collect()
}

impl Io<'_> {
    /// Submits a read or write of a block; `false`: there is no slot.
    pub fn submit(&mut self, queue: u16, op: Op, block: u64) -> bool {
        let own = &mut self.queues[usize::from(queue)];
        let Some(slot) = own.take_slot() else {
            return false;
        };
        let at = self.layout.data(queue, slot);
        match op {
            Op::Write => self.memory.write(at, &pattern(block)),
            _ => self.memory.zero(at, BLOCK as usize),
        }
        let extent = Extent {
            sector: block * u64::from(BLOCK / SECTOR),
            bytes: BLOCK,
        };
        assert!(own.submit(self.memory, self.layout, slot, op, extent, 0));
        own.publish(self.memory);
        true
    }

    /// A request that came back, checked.
    pub fn reap(&mut self, queue: u16) -> Option<Done> {
        let own = &mut self.queues[usize::from(queue)];
        let done = own
            .complete(self.memory, self.layout)
            .expect("the device keeps to the protocol")?;
        own.release(done.slot);
        let mut bytes = vec![0; BLOCK as usize];
        self.memory
            .read(self.layout.data(queue, done.slot), &mut bytes);
        if done.op == Op::Read && done.status == Status::Ok {
            let block = done.extent.sector / u64::from(BLOCK / SECTOR);
            assert!(bytes == pattern(block), "block {block} is damaged");
        }
        Some(done)
    }

    pub fn outstanding(&self) -> u16 {
        self.queues.iter().map(Queue::outstanding).sum()
    }

    /// Takes what has come back by now; how many ended well and how many did not.
    pub fn collect(&mut self) -> (usize, usize) {
        let (mut good, mut bad) = (0, 0);
        for queue in 0..self.queues.len() as u16 {
            while let Some(done) = self.reap(queue) {
                match done.status {
                    Status::Ok => good += 1,
                    _ => bad += 1,
                }
            }
        }
        (good, bad)
    }

    /// Waits for everything.
    #[track_caller]
    pub fn drain(&mut self) -> (usize, usize) {
        let start = Instant::now();
        let (mut good, mut bad) = (0, 0);
        while self.outstanding() != 0 {
            match self.collect() {
                (0, 0) => {
                    assert!(start.elapsed() < PATIENCE, "requests do not come back");
                    thread::yield_now();
                }
                more => (good, bad) = (good + more.0, bad + more.1),
            }
        }
        (good, bad)
    }

    /// Writes blocks through all queues and reads them again.
    #[track_caller]
    pub fn verify(&mut self, blocks: u64) {
        let count = self.queues.len() as u64;
        for op in [Op::Write, Op::Read] {
            let mut good = 0;
            for block in 0..blocks {
                let queue = (block % count) as u16;
                while !self.submit(queue, op, block) {
                    let drained = self.drain();
                    assert_eq!(drained.1, 0, "a request failed");
                    good += drained.0;
                }
            }
            let drained = self.drain();
            assert_eq!((good + drained.0, drained.1), (blocks as usize, 0));
        }
    }
}

/// A well-behaved front end.
pub struct Guest {
    pub client: Client,
}

impl Guest {
    #[track_caller]
    pub fn connect(path: &Path, options: Options) -> Self {
        let client = Client::connect(path, options).expect("the server accepts");
        Self { client }
    }

    pub fn io(&mut self) -> Io<'_> {
        let (memory, layout, queues) = self.client.parts();
        Io {
            memory,
            layout,
            queues,
        }
    }

    #[track_caller]
    pub fn verify(&mut self, blocks: u64) {
        self.io().verify(blocks);
    }

    #[track_caller]
    pub fn drain(&mut self) -> (usize, usize) {
        self.io().drain()
    }

    pub fn submit(&mut self, queue: u16, op: Op, block: u64) -> bool {
        self.io().submit(queue, op, block)
    }

    /// Stops the rings: each stands where it should.
    #[track_caller]
    pub fn stop(&mut self) {
        for (theirs, ours) in self.client.stop().expect("the rings stop") {
            assert_eq!(theirs, ours, "a ring stands elsewhere");
        }
    }
}

/// Returns the log of all tests of the process; its first mebibyte.
pub fn logged() -> String {
    LOG.lock().expect("nobody panics holding it").clone()
}

static LOG: std::sync::Mutex<String> = std::sync::Mutex::new(String::new());

/// Lines logged so far, by all tests of the process.
pub static LOGGED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Counts log lines; prints them where `EXPORT_LOG` is set.
fn log_to_nowhere() {
    struct Count;
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            LOGGED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let mut log = LOG.lock().expect("nobody panics holding it");
            if log.len() < 1 << 20 {
                log.push_str(&String::from_utf8_lossy(bytes));
            }
            drop(log);
            if std::env::var_os("EXPORT_LOG").is_some() {
                eprint!("{}", String::from_utf8_lossy(bytes));
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    // Another test of the process may have done it.
    let _ = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_writer(|| Count)
        .try_init();
}
