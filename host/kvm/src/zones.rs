//! One reader of KVM's coalesced-MMIO ring for all register pages of a machine.
//!
//! A machine has one ring, in which the writes of all logged pages (zones) are in the order in
//! which they were made. Each unit takes its own ([`ZoneLog`]); what a reader meets of another zone
//! is kept for that one, behind what was kept before. So each unit sees its writes in their order,
//! however the units take turns. Between two units there is no order to keep: a driver that depends
//! on one waits until the first has answered.
//!
//! **When the ring is full** a write exits, and the unit that it is for reads the ring to its end
//! first ([`WriteLog::drain`] of as many entries as a ring has): all that was logged before has
//! been taken or kept by then.
//!
//! All units are polled by one thread, their owner's, so the lock here is never waited for. A check
//! of an empty ring takes none.
//!
//! Bound: what is kept for a unit comes from one whole ring (169 writes) for each poll of, and each
//! access to, another unit since its own last poll; an owner polls all of its units one after the
//! other and accepts a bounded number of messages in between.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vtd::front::LogEntry;
use vtd_port::WriteLog;

use crate::coalesced::{CoalescedRing, CoalescedZone, RingProbe};

/// The ring of one machine and the zones that its writes belong to.
pub struct ZonedRing {
    probe: RingProbe,
    reader: Mutex<Reader>,
}

struct Reader {
    ring: CoalescedRing,
    zones: Vec<Zone>,
}

struct Zone {
    addresses: Range<u64>,
    kept: VecDeque<LogEntry>,
    /// Length of `kept`. Read without the lock by the unit's log, on the thread that changes it.
    count: Arc<AtomicUsize>,
}

impl Zone {
    fn keep(&mut self, entry: LogEntry) {
        self.kept.push_back(entry);
        self.count.store(self.kept.len(), Ordering::Relaxed);
    }
}

impl ZonedRing {
    /// Maps the ring of the machine that `vcpu` (any of its vCPUs' descriptors) belongs to, without
    /// zones. One for a machine: a second would take entries from the first.
    ///
    /// # Errors
    /// The kernel's, of mmap(2).
    pub fn map(vcpu: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        CoalescedRing::map(vcpu).map(Self::over)
    }

    fn over(ring: CoalescedRing) -> Arc<Self> {
        Arc::new(Self {
            probe: ring.probe(),
            reader: Mutex::new(Reader {
                ring,
                zones: Vec::new(),
            }),
        })
    }

    /// Returns the log of the writes to `zone`, which logs from now on.
    ///
    /// # Errors
    /// KVM refuses, or the zone overlaps another.
    pub fn log(self: &Arc<Self>, zone: CoalescedZone) -> io::Result<ZoneLog> {
        let entries = self.entries(zone.addresses())?;
        let mut log = ZoneLog { entries, zone };
        log.register()?;
        Ok(log)
    }

    fn entries(self: &Arc<Self>, addresses: Range<u64>) -> io::Result<ZoneEntries> {
        let mut reader = self.reader();
        let overlaps = |zone: &Zone| {
            zone.addresses.start < addresses.end && addresses.start < zone.addresses.end
        };
        if reader.zones.iter().any(overlaps) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let count = Arc::new(AtomicUsize::new(0));
        reader.zones.push(Zone {
            addresses,
            kept: VecDeque::new(),
            count: count.clone(),
        });
        Ok(ZoneEntries {
            ring: self.clone(),
            number: reader.zones.len() - 1,
            count,
            taken: VecDeque::new(),
        })
    }

    fn reader(&self) -> MutexGuard<'_, Reader> {
        // A panic leaves entries where they are.
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One zone's writes out of the ring.
struct ZoneEntries {
    ring: Arc<ZonedRing>,
    number: usize,
    count: Arc<AtomicUsize>,
    /// Empty between two calls; its memory is used again.
    taken: VecDeque<LogEntry>,
}

impl ZoneEntries {
    #[inline]
    fn is_empty(&self) -> bool {
        // Relaxed: kept by this thread. Entries of another zone alone make this false, and that
        // unit says the same.
        self.count.load(Ordering::Relaxed) == 0 && self.ring.probe.is_empty()
    }

    /// Takes what was kept, then this zone's part of at most `max` entries of the ring. No lock is
    /// held in `take`.
    fn drain(&mut self, max: usize, take: &mut dyn FnMut(LogEntry)) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut reader = self.ring.reader();
        let Reader { ring, zones } = &mut *reader;
        ring.drain(max, |address, bytes| {
            let zone = zones
                .iter_mut()
                .find(|zone| zone.addresses.contains(&address));
            // KVM logs registered zones only.
            debug_assert!(
                zone.is_some(),
                "a write at {address:#x}, which is in no zone"
            );
            if let Some(zone) = zone {
                zone.keep(entry(address - zone.addresses.start, bytes));
            }
        });
        let own = &mut zones[self.number];
        std::mem::swap(&mut own.kept, &mut self.taken);
        own.count.store(0, Ordering::Relaxed);
        drop(reader);
        let count = self.taken.len();
        self.taken.drain(..).for_each(take);
        count
    }
}

/// Returns the entry of up to eight bytes, little-endian, at this offset of a register page. A
/// wrong entry is ignored by the unit.
fn entry(offset: u64, bytes: &[u8]) -> LogEntry {
    let mut data = [0; 8];
    data[..bytes.len()].copy_from_slice(bytes);
    LogEntry {
        offset: offset as u16,
        len: bytes.len() as u8,
        data: u64::from_le_bytes(data),
    }
}

/// The log of one register page's writes.
pub struct ZoneLog {
    entries: ZoneEntries,
    zone: CoalescedZone,
}

impl WriteLog for ZoneLog {
    fn drain(&mut self, max: usize, take: &mut dyn FnMut(LogEntry)) -> usize {
        self.entries.drain(max, take)
    }

    fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn unregister(&mut self) -> io::Result<()> {
        Ok(self.zone.unregister()?)
    }

    fn register(&mut self) -> io::Result<()> {
        Ok(self.zone.register()?)
    }
}

#[cfg(test)]
mod tests;
