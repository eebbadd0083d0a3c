//! A crash at each write of the store and of the images: the content of an image after it must be
//! one that a power failure may leave.
//!
//! In memory: everything stops at the k-th write, for every k. The contents after a kill and after
//! a power failure are then compared with an oracle that knows the guest's requests and their
//! answers ([`oracle`], [`media`]). As processes: one that runs the same over files is killed at
//! its k-th write.

mod guest;
mod media;
mod oracle;
mod processes;
#[path = "../support/mod.rs"]
mod support;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use guest_mem::GuestRam;
use swap::frames::PAGE;
use swap::pager::Report;

use guest::{BLOCKS, DISKS, Guest, Journal, LIMIT, Over, PAGES, WORKERS};
use media::Media;
use oracle::{Event, Oracle, SECTOR};
use support::{Disk, Files, Machine, Made, Shape};

const PATIENCE: Duration = Duration::from_secs(60);
const SHAPE: Shape = Shape {
    pages: PAGES as u32,
    limit: LIMIT,
};
/// Number of the store's medium. The disks' come before it.
const STORE: usize = DISKS;

/// An oracle, and the media whose events it records.
struct Watch {
    oracle: Mutex<Oracle>,
    media: Media,
}

impl Watch {
    fn check(&self, oracle: &Oracle, what: &str, disk: usize, image: &[u8]) {
        if let Err(error) = oracle.check(disk, image) {
            panic!("{what}: {error}");
        }
    }
}

impl Journal for Watch {
    fn record(&self, event: &Event) {
        let mut oracle = self.oracle.lock().expect("no thread has failed");
        oracle.record(event);
        // Writes that were answered as durable are there.
        if matches!(
            event,
            Event::Flushed { .. }
                | Event::Written {
                    is_durable: true,
                    ..
                }
        ) {
            for disk in 0..DISKS {
                self.check(&oracle, "durable", disk, &self.media.durable(disk));
            }
        }
    }

    fn is_over(&self) -> bool {
        self.media.has_crashed()
    }
}

fn new_oracle() -> Oracle {
    Oracle::new(DISKS, (BLOCKS * PAGE / SECTOR) as u64)
}

/// Sends a message when dropped: its thread has ended, normally or by a panic.
struct Tell(Sender<()>);

impl Drop for Tell {
    fn drop(&mut self) {
        // After a crash the receiver may be gone.
        let _ = self.0.send(());
    }
}

/// Runs the guest's workers on threads; each sends a message when it has ended.
fn start(guest: &Arc<Guest>, seed: u64, tell: &Sender<()>) -> Vec<JoinHandle<Result<(), Over>>> {
    let worker = |number| {
        let (guest, tell) = (guest.clone(), Tell(tell.clone()));
        thread::spawn(move || {
            let _tell = tell;
            guest.work(seed, number)
        })
    };
    (0..WORKERS).map(worker).collect()
}

/// Result of a run in memory.
struct Ran {
    has_crashed: bool,
    report: Report,
}

fn wait(ended: &Receiver<()>, media: &Media) {
    for _ in 0..WORKERS {
        ended
            .recv_timeout(PATIENCE)
            .expect("they end, or it crashes");
        if media.has_crashed() {
            return;
        }
    }
}

/// Runs until the `stop_at`-th write, if there are so many, and checks the contents.
fn run(seed: u64, stop_at: u64) -> Made<Ran> {
    let (tell, ended) = channel();
    let mut lengths = [BLOCKS * PAGE; DISKS + 1];
    lengths[STORE] = PAGES * PAGE;
    let media = Media::new(&lengths, seed ^ stop_at << 32, stop_at, tell.clone());
    let machine = Machine::over(&SHAPE, |ram: &GuestRam| {
        let disk = |file| Disk {
            below: media.open(file, ram),
            image: media.open(file, ram),
        };
        Ok(Files {
            store: media.open(STORE, ram),
            slots: PAGES,
            trims: false,
            disks: (0..DISKS).map(disk).collect(),
        })
    })?;
    let watch = Arc::new(Watch {
        oracle: Mutex::new(new_oracle()),
        media: media.clone(),
    });
    let guest = Arc::new(Guest::new(&machine, watch.clone()));
    let workers = start(&guest, seed, &tell);
    wait(&ended, &media);
    // An access to a page that cannot come continues when the pager has ended.
    let report = machine.cut_off();
    for worker in workers {
        // It need not have come to its end.
        let _ = worker.join().expect("it found what it stored");
    }
    assert_eq!(report.pauses, 0);
    let oracle = watch.oracle.lock().expect("no thread has failed");
    let left = media.take_left();
    let has_crashed = left.is_some();
    for (disk, left) in left.iter().flatten().take(DISKS).enumerate() {
        watch.check(&oracle, "killed", disk, &left.killed);
        watch.check(&oracle, "powered off", disk, &left.powered_off);
    }
    if !has_crashed {
        for disk in 0..DISKS {
            watch.check(&oracle, "at the end", disk, &media.cached(disk));
        }
    }
    Ok(Ran {
        has_crashed,
        report,
    })
}

#[test]
fn a_crash_at_any_write_leaves_what_a_power_failure_may_leave() {
    let mut before_a_write = 0;
    for seed in 1..=3 {
        let mut stop_at = 1;
        let report = loop {
            let ran = match run(seed, stop_at) {
                Ok(ran) => ran,
                Err(error) => return eprintln!("skipped: {error}"),
            };
            if !ran.has_crashed {
                break ran.report;
            }
            stop_at += 1;
        };
        let counts = report.counts;
        println!("seed {seed}: {} crashes; {report:?}", stop_at - 1);
        assert!(stop_at > 50, "{stop_at}");
        // A run that came to its end has exercised all paths.
        for (what, count) in [
            ("dropped to the disk", counts.dropped_to_disk),
            ("saved", counts.saved),
            ("fetched from the disk", counts.fetched_from_disk),
            ("fetched from the store", counts.fetched_from_store),
            ("not fetched", counts.not_fetched),
        ] {
            assert!(count > 0, "{what}: {count}");
        }
        before_a_write += counts.fetched_before_a_write;
    }
    assert!(before_a_write > 0, "no block changed that a page stood for");
}
