//! The expected outcome of one look at a split ring (virtio 1.2 §2.7, §5.2.6), from a copy of guest
//! memory.
//!
//! Written from the specification, plainly, on a slice of bytes. Where the specification leaves
//! bytes open (data of a request that failed half-way), they are marked free and not compared.

use vio::blk::request::{STATUS_IOERR, STATUS_OK, STATUS_UNSUPP, feature as blk_feature, kind};
use vio::feature;

use super::MEMORY;

/// The features that the driver has negotiated, the ring, and the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) features: u64,
    pub(super) size: u16,
    pub(super) desc: usize,
    pub(super) avail: usize,
    pub(super) used: usize,
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    pub(super) serial: [u8; 20],
}

/// Outcome of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// There was nothing.
    Nothing,
    /// One request was served; whether the driver wants an interrupt, if that is not among bytes
    /// that may be anything.
    Served(Option<bool>),
    /// A table of descriptors cannot be read: the queue rests.
    Fault,
    /// The driver broke the protocol: the device needs a reset.
    Broken,
}

/// Bytes, of which some may be anything.
#[derive(Clone, Debug)]
pub(super) struct Bytes {
    pub(super) bytes: Vec<u8>,
    pub(super) free: Vec<std::ops::Range<usize>>,
}

impl Bytes {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        let free = Vec::new();
        Self { bytes, free }
    }

    /// Whether `real` is one of the contents allowed.
    pub(super) fn check(&self, real: &[u8], what: &str) {
        if self.bytes == real {
            return;
        }
        for (at, (want, got)) in self.bytes.iter().zip(real).enumerate() {
            let is_free = self.free.iter().any(|range| range.contains(&at));
            assert!(
                want == got || is_free,
                "{what} at {at:#x}: {got:#x} instead of {want:#x}"
            );
        }
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes[at..at + 2].try_into().expect("two bytes"))
    }

    /// `None` if a byte of it may be anything.
    fn known_u16(&self, at: usize) -> Option<u16> {
        let is_free = |at| self.free.iter().any(|range| range.contains(&at));
        (!is_free(at) && !is_free(at + 1)).then(|| self.u16(at))
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    addr: u64,
    len: u32,
}

/// Returns the place of `len` bytes of guest memory from `addr` on; `None` outside of memory.
fn ram(addr: u64, len: u64) -> Option<std::ops::Range<usize>> {
    let end = addr.checked_add(len)?;
    (end <= MEMORY as u64).then_some(addr as usize..end as usize)
}

/// The guest and the disk, before the look and then after it.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) terms: Terms,
    pub(super) memory: Bytes,
    pub(super) disk: Bytes,
    pub(super) next_avail: u16,
    pub(super) next_used: u16,
    /// The available index that was loaded last.
    pub(super) seen: u16,
}

/// A chain, readable buffers apart from writable ones.
#[derive(Default)]
struct Chain {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

impl Chain {
    fn push(&mut self, addr: u64, len: u32, flags: u16) -> Result<(), End> {
        let writable = flags & 2 != 0;
        let all = total(&self.readable) + total(&self.writable) + u64::from(len);
        let wraps = addr.checked_add(u64::from(len.max(1)) - 1).is_none();
        if len == 0
            || wraps
            || all > u64::from(u32::MAX)
            || (!writable && !self.writable.is_empty())
        {
            return Err(End::Broken);
        }
        let list = if writable {
            &mut self.writable
        } else {
            &mut self.readable
        };
        list.push(Buffer { addr, len });
        Ok(())
    }
}

fn total(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(|buffer| u64::from(buffer.len)).sum()
}

/// The parts of `buffers` that make up bytes `skip..skip + len`.
fn cut(buffers: &[Buffer], mut skip: u64, mut len: u64) -> Vec<Buffer> {
    let mut parts = Vec::new();
    for buffer in buffers {
        let own = u64::from(buffer.len);
        let from = skip.min(own);
        let take = (own - from).min(len);
        skip -= from;
        len -= take;
        if take != 0 {
            parts.push(Buffer {
                addr: buffer.addr + from,
                len: take as u32,
            });
        }
    }
    parts
}

/// Effect of a request.
enum Action {
    Status(u8),
    Id(u64),
    Flush,
    Read(usize, usize),
    Write(usize, usize),
    Zero(usize, usize),
}

impl Model {
    fn has(&self, bit: u64) -> bool {
        self.terms.features & bit != 0
    }

    /// One look.
    pub(super) fn look(&mut self) -> End {
        self.try_look().unwrap_or_else(|end| end)
    }

    fn try_look(&mut self) -> Result<End, End> {
        let Terms {
            size, avail, used, ..
        } = self.terms;
        if self.seen == self.next_avail {
            let idx = self.memory.u16(avail + 2);
            if idx.wrapping_sub(self.next_avail) > size {
                return Err(End::Broken);
            }
            self.seen = idx;
        }
        if self.seen == self.next_avail {
            return Ok(End::Nothing);
        }
        let slot = usize::from(self.next_avail % size);
        let head = self.memory.u16(avail + 4 + 2 * slot);
        let chain = self.walk(head)?;
        let written = self.serve(&chain)?;
        let slot = usize::from(self.next_used % size);
        self.memory
            .put(used + 4 + 8 * slot, &u32::from(head).to_le_bytes());
        self.memory.put(used + 8 + 8 * slot, &written.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        self.next_used = self.next_used.wrapping_add(1);
        self.memory.put(used + 2, &self.next_used.to_le_bytes());
        let wants = if self.has(feature::EVENT_IDX) {
            let event = self.memory.known_u16(avail + 4 + 2 * usize::from(size));
            event.map(|event| self.next_used.wrapping_sub(event) == 1)
        } else {
            self.memory.known_u16(avail).map(|flags| flags & 1 == 0)
        };
        Ok(End::Served(wants))
    }

    /// Returns the bytes of the disk that the chain at `head` would change, as memory stands.
    pub(super) fn may_change(&self, head: u16) -> Option<std::ops::Range<usize>> {
        let chain = self.walk(head).ok()?;
        let (readable, writable) = (total(&chain.readable), total(&chain.writable));
        if writable == 0 || readable < 16 {
            return None;
        }
        match self.action(&chain, readable, writable) {
            Action::Write(at, len) | Action::Zero(at, len) => Some(at..at + len),
            _ => None,
        }
    }

    fn walk(&self, head: u16) -> Result<Chain, End> {
        let size = usize::from(self.terms.size);
        let table = self.terms.desc..self.terms.desc + 16 * size;
        let table = self.memory.bytes.get(table).ok_or(End::Fault)?;
        self.walk_table(table, head, self.has(feature::INDIRECT_DESC))
    }

    fn walk_table(&self, table: &[u8], head: u16, may_indirect: bool) -> Result<Chain, End> {
        let mut chain = Chain::default();
        let mut tables: Option<Vec<u8>> = None;
        let mut next = head;
        let mut hops = 0;
        loop {
            let current = tables.as_deref().unwrap_or(table);
            let at = 16 * usize::from(next);
            let entry = current.get(at..at + 16).ok_or(End::Broken)?;
            if hops == current.len() / 16 {
                return Err(End::Broken);
            }
            hops += 1;
            let addr = u64::from_le_bytes(entry[..8].try_into().expect("eight"));
            let len = u32::from_le_bytes(entry[8..12].try_into().expect("four"));
            let flags = u16::from_le_bytes(entry[12..14].try_into().expect("two"));
            let goes_on = flags & 1 != 0;
            if flags & 4 != 0 {
                if !may_indirect || goes_on || tables.is_some() {
                    return Err(End::Broken);
                }
                if len == 0 || !len.is_multiple_of(16) || len > 1024 * 16 {
                    return Err(End::Broken);
                }
                let range = ram(addr, len.into()).ok_or(End::Fault)?;
                tables = Some(self.memory.bytes[range].to_vec());
                next = 0;
                hops = 0;
                continue;
            }
            chain.push(addr, len, flags)?;
            if !goes_on {
                return Ok(chain);
            }
            next = u16::from_le_bytes(entry[14..].try_into().expect("two"));
        }
    }

    /// Reads the request, does it, writes the status; bytes written.
    fn serve(&mut self, chain: &Chain) -> Result<u32, End> {
        let (readable, writable) = (total(&chain.readable), total(&chain.writable));
        if writable == 0 || readable < 16 {
            return Err(End::Broken);
        }
        let status_at = cut(&chain.writable, writable - 1, 1)[0].addr;
        let action = self.action(chain, readable, writable);
        let (status, len) = self.act(chain, action);
        let at = ram(status_at, 1).ok_or(End::Broken)?;
        self.memory.put(at.start, &[status]);
        let len = if status == STATUS_OK { len } else { 0 };
        Ok(len as u32 + 1)
    }

    fn gather(&self, parts: &[Buffer]) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in parts {
            bytes.extend(&self.memory.bytes[ram(part.addr, part.len.into())?]);
        }
        Some(bytes)
    }

    /// Writes data in order; on a fault all that lies in memory is free.
    fn scatter(&mut self, parts: &[Buffer], bytes: &[u8]) -> bool {
        let places: Vec<_> = parts
            .iter()
            .map(|part| ram(part.addr, part.len.into()))
            .collect();
        if places.contains(&None) {
            for part in parts {
                let end = part.addr.saturating_add(part.len.into());
                let clip = |at: u64| at.min(MEMORY as u64) as usize;
                self.memory.free.push(clip(part.addr)..clip(end));
            }
            return false;
        }
        let mut at = 0;
        for place in places.into_iter().flatten() {
            let len = place.len();
            self.memory.put(place.start, &bytes[at..at + len]);
            at += len;
        }
        true
    }

    fn action(&self, chain: &Chain, readable: u64, writable: u64) -> Action {
        let Some(header) = self.gather(&cut(&chain.readable, 0, 16)) else {
            return Action::Status(STATUS_IOERR);
        };
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four"));
        let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
        match word(0) {
            kind::IN => self.transfer(sector, writable - 1, false),
            kind::OUT => self.transfer(sector, readable - 16, true),
            kind::FLUSH => Action::Flush,
            kind::GET_ID => Action::Id((writable - 1).min(20)),
            kind::DISCARD if self.has(blk_feature::DISCARD) => self.range(chain, readable, 0),
            kind::WRITE_ZEROES if self.has(blk_feature::WRITE_ZEROES) => {
                self.range(chain, readable, 1)
            }
            _ => Action::Status(STATUS_UNSUPP),
        }
    }

    fn transfer(&self, sector: u64, len: u64, write: bool) -> Action {
        let fits = sector <= self.terms.sectors && len / 512 <= self.terms.sectors - sector;
        if !len.is_multiple_of(512) || !fits || (write && self.terms.read_only) {
            return Action::Status(STATUS_IOERR);
        }
        let at = sector as usize * 512;
        match (len as usize, write) {
            (0, _) => Action::Status(STATUS_OK),
            (len, true) => Action::Write(at, len),
            (len, false) => Action::Read(at, len),
        }
    }

    fn range(&self, chain: &Chain, readable: u64, allowed: u32) -> Action {
        let failed = Action::Status(STATUS_IOERR);
        if self.terms.read_only || readable != 32 {
            return failed;
        }
        let Some(range) = self.gather(&cut(&chain.readable, 16, 16)) else {
            return failed;
        };
        let word = |at: usize| u32::from_le_bytes(range[at..at + 4].try_into().expect("four"));
        let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
        let (sectors, flags) = (word(8), word(12));
        if flags & !allowed != 0 {
            return Action::Status(STATUS_UNSUPP);
        }
        let fits =
            sector <= self.terms.sectors && u64::from(sectors) <= self.terms.sectors - sector;
        // The configuration space says 2048 (1 MiB) for a disk in memory.
        if sectors > 2048 || !fits {
            return failed;
        }
        if sectors == 0 {
            return Action::Status(STATUS_OK);
        }
        Action::Zero(sector as usize * 512, sectors as usize * 512)
    }

    /// Does it; status and bytes of data written into the chain if it succeeds.
    fn act(&mut self, chain: &Chain, action: Action) -> (u8, usize) {
        let failed = (STATUS_IOERR, 0);
        match action {
            Action::Status(status) => (status, 0),
            Action::Flush => (STATUS_OK, 0),
            Action::Id(len) => {
                let serial = self.terms.serial;
                let parts = cut(&chain.writable, 0, len);
                if self.scatter(&parts, &serial[..len as usize]) {
                    (STATUS_OK, len as usize)
                } else {
                    failed
                }
            }
            Action::Read(at, len) => {
                let bytes = self.disk.bytes[at..at + len].to_vec();
                if self.scatter(&cut(&chain.writable, 0, len as u64), &bytes) {
                    (STATUS_OK, len)
                } else {
                    failed
                }
            }
            Action::Write(at, len) => match self.gather(&cut(&chain.readable, 16, len as u64)) {
                Some(bytes) => {
                    self.disk.put(at, &bytes);
                    (STATUS_OK, 0)
                }
                None => {
                    self.disk.free.push(at..at + len);
                    failed
                }
            },
            Action::Zero(at, len) => {
                self.disk.bytes[at..at + len].fill(0);
                (STATUS_OK, 0)
            }
        }
    }
}
