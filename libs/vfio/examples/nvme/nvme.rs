//! An NVMe controller, polled: NVM Express base specification, revision 1.4. One admin queue pair,
//! one I/O queue pair.
//!
//! The controller's answers are checked: strides against its registers' length, the fields of
//! Identify against this driver's abilities, and of a completion whether it answers anything. Left
//! out: interrupts, several queues and namespaces, metadata, and memory pages that are not of 4
//! KiB.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dma_map::Direction;
use vfio::{Bar, Device, DmaBuffer, VfioMap};

use crate::{Core, Failure};

/// Bytes of a memory page, of a queue, and of a block that is verified.
pub const PAGE: usize = 4096;
/// Entries of a queue, 64 of 64 bytes, unless the controller takes fewer.
const ENTRIES: u16 = 64;
/// Longest time to wait for a controller; an emulated one on a busy machine takes the longest.
const PATIENCE: Duration = Duration::from_secs(60);

/// Registers, by byte (§3.1).
const CAP: usize = 0x00;
const CC: usize = 0x14;
const CSTS: usize = 0x1c;
const AQA: usize = 0x24;
const ASQ: usize = 0x28;
const ACQ: usize = 0x30;
const DOORBELLS: usize = 0x1000;
/// Enabled; submission entries of 2^6 bytes, completion entries of 2^4.
const CC_ENABLE: u32 = 4 << 20 | 6 << 16 | 1;
const CSTS_READY: u32 = 1 << 0;
const CSTS_FATAL: u32 = 1 << 1;

/// Opcodes of the admin queue and of an I/O queue (§5, §6).
const CREATE_SUBMISSION: u8 = 0x01;
const CREATE_COMPLETION: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
pub const WRITE: u8 = 0x01;
pub const READ: u8 = 0x02;

/// Answer of the controller to a command (§4.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The command's number, as the controller gives it.
    pub id: u16,
    /// 0: success.
    pub status: u16,
}

impl Completion {
    /// Parses the second word of an entry. Returns `None` unless its phase marks it as new.
    fn parse(word: u64, queue: u16, entries: u16, phase: bool) -> Result<Option<Self>, Failure> {
        let [head, from, id, status] = [0, 16, 32, 48].map(|shift| (word >> shift) as u16);
        if (status & 1 == 1) != phase {
            return Ok(None);
        }
        let is_ours = head < entries && from == queue;
        ensure!(is_ours, "an answer {word:#x} in queue {queue}");
        let status = status >> 1;
        Ok(Some(Self { id, status }))
    }
}

/// A pair of queues, each a page.
struct Queue {
    id: u16,
    entries: u16,
    submissions: DmaBuffer,
    completions: DmaBuffer,
    iovas: [u64; 2],
    tail: u16,
    head: u16,
    /// Of new entries: it changes when the queue wraps.
    phase: bool,
    doorbells: [usize; 2],
}

impl Queue {
    /// Maps the two pages for as long as the mapper lives.
    fn new(id: u16, bar: &Bar, map: &VfioMap, core: &mut Core) -> Result<Self, Failure> {
        let cap = bar.read64(CAP);
        // CAP.MQES, from 0; CAP.DSTRD.
        let entries = ENTRIES.min((cap as u16).saturating_add(1));
        let stride = 4_usize << (cap >> 32 & 0xf);
        let doorbells = [0, 1].map(|which| DOORBELLS + (2 * usize::from(id) + which) * stride);
        let fits = entries >= 2 && doorbells[1] + 4 <= bar.len();
        ensure!(fits, "CAP {cap:#x} does not fit {:#x} bytes", bar.len());
        let (submissions, completions) = (map.allocate(PAGE)?, map.allocate(PAGE)?);
        // The controller reads commands, and writes answers.
        let commands = core.map_coherent(&[submissions.segment(0, PAGE)], Direction::ToDevice)?;
        let answers = core.map_coherent(&[completions.segment(0, PAGE)], Direction::FromDevice)?;
        Ok(Self {
            id,
            entries,
            iovas: [commands.iova().raw(), answers.iova().raw()],
            submissions,
            completions,
            tail: 0,
            head: 0,
            phase: true,
            doorbells,
        })
    }

    /// Gives the controller a command (§4.2), of which no more than `entries - 1` are under way.
    fn submit(&mut self, bar: &Bar, command: [u64; 8]) {
        let places = &self.submissions.words()[usize::from(self.tail) * command.len()..];
        for (place, word) in places.iter().zip(command) {
            place.store(word, Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % self.entries;
        bar.write32(self.doorbells[0], self.tail.into());
    }

    /// The next answer, if it is there.
    fn poll(&mut self, bar: &Bar) -> Result<Option<Completion>, Failure> {
        // The second word has the phase. Acquire: the memory that the controller wrote before is
        // seen.
        let place = usize::from(self.head) * 2 + 1;
        let word = self.completions.words()[place].load(Ordering::Acquire);
        let Some(answer) = Completion::parse(word, self.id, self.entries, self.phase)? else {
            return Ok(None);
        };
        self.head = (self.head + 1) % self.entries;
        self.phase ^= self.head == 0;
        bar.write32(self.doorbells[1], self.head.into());
        Ok(Some(answer))
    }

    /// The next answer.
    fn wait(&mut self, bar: &Bar) -> Result<Completion, Failure> {
        let start = Instant::now();
        loop {
            if let Some(answer) = self.poll(bar)? {
                return Ok(answer);
            }
            ensure!(start.elapsed() < PATIENCE, "queue {} is silent", self.id);
        }
    }
}

/// A submission entry without metadata: number, namespace, data, and command words 10 to 12.
fn command(id: u16, opcode: u8, namespace: u32, prp: [u64; 2], words: [u32; 3]) -> [u64; 8] {
    let [ten, eleven, twelve] = words.map(u64::from);
    let first = u64::from(namespace) << 32 | u64::from(id) << 16 | u64::from(opcode);
    [first, 0, 0, prp[0], prp[1], eleven << 32 | ten, twelve, 0]
}

/// A controller that is enabled, and its namespace 1.
pub struct Controller {
    bar: Bar,
    _device: Device,
    admin: Queue,
    io: Queue,
    identity: Identity,
    namespace: Namespace,
}

impl Controller {
    /// Resets the device, identifies it and makes its I/O queues. These stay mapped as long as the
    /// mapper lives.
    pub fn start(device: Device, map: &VfioMap, core: &mut Core) -> Result<Self, Failure> {
        device.reset()?;
        device.enable_dma()?;
        let bar = device.bar(0)?;
        ensure!(bar.len() >= DOORBELLS, "BAR 0 has {:#x} bytes", bar.len());
        let cap = bar.read64(CAP);
        // CAP.CSS: the NVM command set; CAP.MPSMIN: pages of 4 KiB.
        let can = cap >> 37 & 1 == 1 && cap >> 48 & 0xf == 0;
        ensure!(can, "not NVMe with pages of 4 KiB: CAP is {cap:#x}");
        let mut new = Self {
            admin: Queue::new(0, &bar, map, core)?,
            io: Queue::new(1, &bar, map, core)?,
            bar,
            _device: device,
            identity: Identity::default(),
            namespace: Namespace::default(),
        };
        new.stop()?;
        let last = u32::from(new.admin.entries - 1);
        new.bar.write32(AQA, last << 16 | last);
        new.bar.write64(ASQ, new.admin.iovas[0]);
        new.bar.write64(ACQ, new.admin.iovas[1]);
        new.bar.write32(CC, CC_ENABLE);
        new.wait_ready(true)?;

        let (page, mut said) = (map.allocate(PAGE)?, [0; PAGE]);
        let mapping = core.map(&[page.segment(0, PAGE)], Direction::FromDevice)?;
        let iova = mapping.iova().raw();
        new.ask(IDENTIFY, 0, iova, [1, 0, 0])?;
        page.read(0, &mut said);
        new.identity = Identity::parse(&said)?;
        new.ask(IDENTIFY, 1, iova, [0, 0, 0])?;
        page.read(0, &mut said);
        new.namespace = Namespace::parse(&said)?;
        core.unmap(mapping)?;

        // Contiguous, without interrupts; commands are answered in the queue of the same number.
        let (id, last) = (u32::from(new.io.id), u32::from(new.io.entries - 1));
        let [submissions, completions] = new.io.iovas;
        let size = last << 16 | id;
        new.ask(CREATE_COMPLETION, 0, completions, [size, 1, 0])?;
        new.ask(CREATE_SUBMISSION, 0, submissions, [size, id << 16 | 1, 0])?;
        Ok(new)
    }

    /// Stops it: it uses no memory afterwards.
    pub fn stop(&mut self) -> Result<(), Failure> {
        self.bar.write32(CC, 0);
        self.wait_ready(false)
    }

    fn wait_ready(&self, is_ready: bool) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            let status = self.bar.read32(CSTS);
            // All ones: it is gone.
            let is_dead = status == u32::MAX || is_ready && status & CSTS_FATAL != 0;
            let is_late = start.elapsed() > PATIENCE;
            ensure!(!is_dead && !is_late, "not ready: CSTS is {status:#x}");
            if (status & CSTS_READY != 0) == is_ready {
                return Ok(());
            }
        }
    }

    /// One admin command, to its end.
    fn ask(
        &mut self,
        opcode: u8,
        namespace: u32,
        prp: u64,
        words: [u32; 3],
    ) -> Result<(), Failure> {
        let entry = command(0, opcode, namespace, [prp, 0], words);
        self.admin.submit(&self.bar, entry);
        let Completion { id, status } = self.admin.wait(&self.bar)?;
        let is_good = id == 0 && status == 0;
        ensure!(
            is_good,
            "admin command {opcode:#x} ({id}) failed: {status:#x}"
        );
        Ok(())
    }

    /// Starts command `id` for `pages` pages from page `first` of the namespace on.
    pub fn submit(&mut self, id: u16, opcode: u8, first: u64, pages: usize, prp: [u64; 2]) {
        let per_page = PAGE as u64 >> self.namespace.shift;
        let (start, blocks) = (first * per_page, pages as u64 * per_page);
        let words = [start as u32, (start >> 32) as u32, blocks as u32 - 1];
        let entry = command(id, opcode, 1, prp, words);
        self.io.submit(&self.bar, entry);
    }

    /// Returns the next answer, if there is one. The caller checks whether it answers a command.
    pub fn poll(&mut self) -> Result<Option<Completion>, Failure> {
        self.io.poll(&self.bar)
    }

    /// The next answer.
    pub fn wait(&mut self) -> Result<Completion, Failure> {
        self.io.wait(&self.bar)
    }

    /// Description for people.
    pub fn description(&self) -> String {
        let Namespace { blocks, shift } = self.namespace;
        format!(
            "{}: {blocks} blocks of 2^{shift} bytes",
            self.identity.model
        )
    }

    /// Most commands under way.
    pub fn depth(&self) -> usize {
        usize::from(self.io.entries) - 1
    }

    /// Pages of the namespace, and of the largest command.
    pub fn pages(&self) -> (u64, usize) {
        let Namespace { blocks, shift } = self.namespace;
        (blocks >> (12 - shift), self.identity.most_pages)
    }
}

/// Data of Identify for a controller, as far as it is needed (§5.15.2.2).
#[derive(Debug, Default, PartialEq, Eq)]
struct Identity {
    model: String,
    most_pages: usize,
}

impl Identity {
    fn parse(said: &[u8; PAGE]) -> Result<Self, Failure> {
        // For terminals: nothing but what can be printed.
        let model = said[24..64]
            .iter()
            .filter(|byte| (b' '..=b'~').contains(byte));
        let model = String::from_iter(model.map(|byte| char::from(*byte)));
        let model = model.trim().to_owned();
        // MDTS: a power of two of pages; 0: any.
        let most_pages = match u32::from(said[77]) {
            0 => usize::MAX,
            order => 1_usize.checked_shl(order).unwrap_or(usize::MAX),
        };
        ensure!(said[516..520] != [0; 4], "{model}: no namespace");
        Ok(Self { model, most_pages })
    }
}

/// Data of Identify for a namespace (§5.15.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Namespace {
    blocks: u64,
    /// A block has `1 << shift` bytes: 512 to 4096.
    shift: u32,
}

impl Namespace {
    fn parse(said: &[u8; PAGE]) -> Result<Self, Failure> {
        let blocks = u64::from_le_bytes(*said.first_chunk().expect("a page has 8 bytes"));
        // FLBAS chooses among formats: bytes of metadata, and the block's size as a power of two.
        let format = usize::from(said[26] & 0xf);
        let [low, high, shift, _] = said[128..].as_chunks::<4>().0[format];
        let is_known = format <= usize::from(said[25]) && (9..=12).contains(&shift);
        ensure!(
            is_known,
            "namespace 1: format {format}, blocks of 2^{shift}"
        );
        ensure!([low, high] == [0; 2], "namespace 1 has metadata");
        // Its bytes can be counted.
        let can_be = blocks > 0 && blocks <= u64::MAX >> shift;
        ensure!(can_be, "namespace 1 has {blocks} blocks of 2^{shift} bytes");
        let shift = shift.into();
        Ok(Self { blocks, shift })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controller() -> [u8; PAGE] {
        let mut said = [0; PAGE];
        said[24..64].copy_from_slice(b"QEMU \x1b[31mNVMe Ctrl                     ");
        said[77] = 7;
        said[516] = 1;
        said
    }

    fn namespace() -> [u8; PAGE] {
        let mut said = [0; PAGE];
        said[..8].copy_from_slice(&0x2_0000_u64.to_le_bytes());
        said[25] = 1;
        said[26] = 1;
        said[134] = 12;
        said
    }

    #[test]
    fn identify_data_is_parsed_and_only_printable_text_is_kept() {
        let identity = Identity::parse(&controller()).expect("a controller");
        assert_eq!(identity.model, "QEMU [31mNVMe Ctrl");
        assert_eq!(identity.most_pages, 128);
        let mut any = controller();
        for (order, most) in [(0, usize::MAX), (1, 2), (64, usize::MAX), (255, usize::MAX)] {
            any[77] = order;
            let identity = Identity::parse(&any).expect("a controller");
            assert_eq!(identity.most_pages, most);
        }
        any[516] = 0;
        assert!(Identity::parse(&any).is_err());
    }

    #[test]
    fn an_answer_is_new_by_its_phase_and_has_to_be_of_the_queue() {
        let parse = |word, phase| Completion::parse(word, 1, 64, phase);
        let word = 0x0009_0007_0001_003f;
        let (id, status) = (7, 4);
        let answer = Completion { id, status };
        assert_eq!(parse(word, true).expect("well-formed"), Some(answer));
        assert_eq!(parse(word, false).expect("old"), None);
        for wrong in [0x0009_0007_0001_0040, 0x0009_0007_0002_003f, u64::MAX] {
            assert!(parse(wrong, true).is_err(), "{wrong:#x}");
        }
    }

    #[test]
    fn a_namespace_that_cannot_be_used_is_refused() {
        let (blocks, shift) = (0x2_0000, 12);
        let good = Namespace::parse(&namespace()).expect("a namespace");
        assert_eq!(good, Namespace { blocks, shift });
        // Format 2 of 2; metadata; blocks of 2^8, 2^13, 2^255 bytes; none; more bytes than can be
        // counted.
        for (at, byte) in [
            (26, 2),
            (132, 8),
            (134, 8),
            (134, 13),
            (134, 255),
            (2, 0),
            (7, 0xff),
        ] {
            let mut said = namespace();
            said[at] = byte;
            assert!(Namespace::parse(&said).is_err(), "byte {at}: {byte}");
        }
        assert!(Namespace::parse(&[0xff; PAGE]).is_err());
    }
}
