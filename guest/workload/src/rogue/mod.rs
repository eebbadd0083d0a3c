//! Checks of a device's DMA against the mappings of its IOMMU: permitted accesses must arrive,
//! others must not.
//!
//! A [`CopyDevice`] copies between its own buffer and memory, at given IOVAs. The program makes and
//! ends the mappings itself, through the kernel's VFIO. There are three parts, each of which prints
//! its results as lines `key=value`:
//!
//! * [`prove`]: DMA through a mapping works both ways. Without it the other parts would prove
//!   nothing: a device that does nothing breaks no rule.
//! * [`attempt_all`]: accesses that no mapping allows, and whether memory (or, for a read, the
//!   device's buffer) shows them.
//! * [`pieces::run`]: many mappings of random size, made and ended in random order, so that a layer
//!   below (a shadow of these mappings, for instance) has to split and to join them.
//!
//! **Destination of an access that is not mapped.** An IOMMU in bypass uses an IOVA as a physical
//! address. An access to an IOVA that was never mapped therefore uses the physical address of a
//! page of this program, kept in place by a mapping at another IOVA, and that page is checked.
//!
//! **Time.** Between the end of a mapping and the access there may be a pause, for policies that
//! defer an invalidation. All preparations of the access are made before the mapping ends, so that
//! without a pause the access follows at once.
//!
//! Left out: any judgement by the IOMMU's own log of faults, which is the host's; and reads of
//! memory that is mapped for writing alone. Those arrive: since 5.12 Linux's driver for VT-d gives
//! no such right (seen on 6.1; its commit «Remove WO permissions on second-level paging entries»).

use std::time::Duration;

use dma_map::iova::Access;

use crate::pattern;

pub mod edu;
mod model;
pub mod pieces;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of one copy.
pub const COPY: usize = 64;

/// Numbers of pages of memory: the page of copies to and from the device's buffer, the page under
/// attack, and the page that a revoked IOVA is mapped to anew.
const BOUNCE: usize = 0;
const TARGET: usize = 1;
const OTHER: usize = 2;
/// Pages of memory among which one is chosen whose physical address the device supports.
const CANDIDATES: std::ops::Range<usize> = 1..64;

/// IOVAs of the bounce page, of a page that is kept in place, and of the accesses under test. All
/// are below 2^28.
const BOUNCE_IOVA: u64 = 0x0100_0000;
const HELD_IOVA: u64 = 0x0110_0000;
const TEST_IOVA: u64 = 0x0120_0000;

/// A device that copies by DMA, behind an IOMMU whose mappings are made here, and [`MEMORY`] bytes
/// that may be mapped for it.
///
/// Addresses of memory (`at`) are bytes from its start. Errors are descriptions; one of them ends
/// the run.
pub trait CopyDevice {
    /// Returns the first byte of 4 MiB of memory at an address that is a multiple of 2 MiB.
    fn large_at(&self) -> usize;
    /// Reads memory as the processor sees it.
    fn read(&self, at: usize, data: &mut [u8]);
    /// Writes to memory.
    fn write(&mut self, at: usize, data: &[u8]);
    /// Returns the physical address of the page of memory at `at`, which is mapped and so stays in
    /// place.
    fn physical(&self, at: usize) -> Result<u64, String>;
    /// Returns the highest address that the device supports.
    fn last_address(&self) -> u64;
    /// Maps `len` bytes of memory at `iova`.
    fn map(&mut self, iova: u64, at: usize, len: usize, access: Access) -> Result<(), String>;
    /// Ends all mappings that make up these `len` bytes. From then on the device must be refused
    /// access to them.
    fn unmap(&mut self, iova: u64, len: usize) -> Result<(), String>;
    /// Makes the device read [`COPY`] bytes from `iova` into its buffer, and waits until it is
    /// done, or was refused.
    fn load(&mut self, iova: u64) -> Result<(), String>;
    /// Makes the device write [`COPY`] bytes of its buffer to `iova`, and waits likewise.
    fn store(&mut self, iova: u64) -> Result<(), String>;
    /// Waits for this time.
    fn pause(&mut self, time: Duration);
}

/// Bytes of memory that a run takes: the pages of [`attempt_all`], and 4 MiB for [`pieces::run`] at
/// an aligned address.
pub const MEMORY: usize = (64 << 12) + (2 << 20) + (4 << 20);

/// Options of [`attempt_all`].
#[derive(Clone, Copy, Debug, Default)]
pub struct AttemptConfig {
    /// Time between the end of a mapping and the access to what it mapped.
    pub wait: Duration,
    /// Time before each attempt, so that a rate-limited log has all of them.
    pub pause: Duration,
    /// Whether the IOVA is mapped again, to another page, as soon as its mapping has ended.
    pub remap: bool,
}

/// Accesses that must not arrive: state of the IOVA, and whether the device writes.
const ATTEMPTS: [(&str, bool); 5] = [
    ("unmapped", true),
    ("read-only", true),
    ("revoked", true),
    ("unmapped", false),
    ("revoked", false),
];

/// An access that must not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// State of the IOVA: `unmapped`, `read-only`, `revoked`.
    pub state: &'static str,
    /// Whether the device writes to memory; otherwise it reads.
    pub is_write: bool,
    /// IOVA of the access.
    pub iova: u64,
    /// Whether nothing of it arrived.
    pub is_blocked: bool,
}

impl Attempt {
    /// Returns the line that reports it.
    #[must_use]
    pub fn line(&self) -> String {
        let blocked = if self.is_blocked { "yes" } else { "no" };
        let access = if self.is_write { "write" } else { "read" };
        format!(
            "rogue {} blocked={blocked} iova={:#x} access={access}",
            self.state, self.iova
        )
    }
}

/// Returns the content of copy `number` of a run: no two are alike in any word.
fn content(number: u64) -> [u8; COPY] {
    let mut data = [0; COPY];
    pattern::fill(number.wrapping_add(0x5eed), 0, &mut data);
    data
}

/// Returns the content of memory before an access that must not change it.
fn before(number: u64) -> [u8; COPY] {
    content(number ^ 1 << 63)
}

/// Returns the content of memory at `at`.
fn peek(device: &impl CopyDevice, at: usize) -> [u8; COPY] {
    let mut data = [0; COPY];
    device.read(at, &mut data);
    data
}

/// Returns the content of the pages that attempts use.
fn snapshot(device: &impl CopyDevice) -> Vec<u8> {
    let mut data = vec![0; CANDIDATES.end * PAGE];
    device.read(0, &mut data);
    data
}

/// Fills the device's buffer with `data`, through the mapping of the bounce page.
fn fill(device: &mut impl CopyDevice, data: &[u8; COPY]) -> Result<(), String> {
    device.write(BOUNCE * PAGE, data);
    device.load(BOUNCE_IOVA)
}

/// Returns the content of the device's buffer, read through the mapping of the bounce page.
fn drain(device: &mut impl CopyDevice) -> Result<[u8; COPY], String> {
    let at = BOUNCE * PAGE + PAGE / 2;
    device.write(at, &[0; COPY]);
    device.store(BOUNCE_IOVA + PAGE as u64 / 2)?;
    Ok(peek(device, at))
}

/// Maps the bounce page and copies in both directions through it.
///
/// # Errors
/// A byte did not arrive, or the device's or system's own.
pub fn prove(device: &mut impl CopyDevice) -> Result<(), String> {
    device.map(BOUNCE_IOVA, BOUNCE * PAGE, PAGE, Access::ReadWrite)?;
    for number in 0..4 {
        let data = content(number);
        fill(device, &data)?;
        if drain(device)? != data {
            return Err(format!(
                "copy {number} through a mapping at {BOUNCE_IOVA:#x} did not come back: the device \
                 is no proof of anything"
            ));
        }
    }
    Ok(())
}

/// Tries all accesses that must not arrive, after [`prove`]. Writes come first. Prints each as soon
/// as it was made.
///
/// # Errors
/// DMA that is mapped did not arrive, memory changed elsewhere, or the device's or system's own. An
/// access that arrived is no error: it is in the report.
pub fn attempt_all(
    device: &mut impl CopyDevice,
    config: &AttemptConfig,
    say: &mut dyn FnMut(&Attempt),
) -> Result<Vec<Attempt>, String> {
    let mut made = Vec::new();
    for (state, is_write) in ATTEMPTS {
        device.pause(config.pause);
        let number = 16 + made.len() as u64;
        let attempt = attempt(device, config, (state, is_write), number)?;
        say(&attempt);
        made.push(attempt);
    }
    Ok(made)
}

/// Page of memory under attack, the IOVA of the access, and the IOVA of a mapping that exists
/// during it.
struct Target {
    page: usize,
    iova: u64,
    mapped: Option<u64>,
}

/// Prepares one access, ends the mapping that it would need, if there was one, and makes the device
/// access it.
fn attempt(
    device: &mut impl CopyDevice,
    config: &AttemptConfig,
    (state, is_write): (&'static str, bool),
    number: u64,
) -> Result<Attempt, String> {
    let at_target = |iova, mapped| Target {
        page: TARGET,
        iova,
        mapped,
    };
    // Each attempt has an IOVA of its own, so that a log distinguishes them.
    let iova = TEST_IOVA + (number << 16);
    let target = match state {
        "unmapped" => hold_physical(device)?,
        "revoked" => at_target(iova, None),
        _ => at_target(iova, Some(iova)),
    };
    let at = target.page * PAGE;
    device.write(at, &before(number));
    let secret = before(number);
    match state {
        "read-only" => device.map(iova, at, PAGE, Access::Read)?,
        "revoked" => {
            device.map(iova, at, PAGE, Access::ReadWrite)?;
            use_mapping(device, iova, at, number)?;
            device.write(at, &before(number));
        }
        _ => {}
    }
    let data = content(number);
    fill(device, &data)?;
    let is_remapped = state == "revoked" && config.remap;
    if is_remapped {
        device.write(OTHER * PAGE, &before(!number));
    }
    let earlier = snapshot(device);
    if state == "revoked" {
        device.unmap(iova, PAGE)?;
        if is_remapped {
            device.map(iova, OTHER * PAGE, PAGE, Access::ReadWrite)?;
        }
        if !config.wait.is_zero() {
            device.pause(config.wait);
        }
    }
    let is_blocked = if is_write {
        device.store(target.iova)?;
        check_write(device, &target, earlier, (&data, is_remapped))?
    } else {
        device.load(target.iova)?;
        let got = drain(device)?;
        if is_remapped && got != before(!number) && !shares_words(&got, &secret) {
            return Err(format!("{iova:#x}, mapped again, was not read"));
        }
        !shares_words(&got, &secret)
    };
    for mapped in target.mapped.into_iter().chain(is_remapped.then_some(iova)) {
        device.unmap(mapped, PAGE)?;
    }
    Ok(Attempt {
        state,
        is_write,
        iova: target.iova,
        is_blocked,
    })
}

/// Returns whether a write left the page of `target` unchanged. No other byte of memory may have
/// changed, except in a page that the IOVA is mapped to now, which must hold `data`.
fn check_write(
    device: &impl CopyDevice,
    target: &Target,
    earlier: Vec<u8>,
    (data, is_remapped): (&[u8; COPY], bool),
) -> Result<bool, String> {
    let (mut expected, now) = (earlier, snapshot(device));
    let page = target.page * PAGE..(target.page + 1) * PAGE;
    let is_blocked = expected[page.clone()] == now[page.clone()];
    // A change of this page is reported, and is no error.
    expected[page.clone()].copy_from_slice(&now[page]);
    // A write that did not go through the old mapping must have gone through the new one.
    if is_remapped && is_blocked {
        expected[OTHER * PAGE..][..COPY].copy_from_slice(data);
    }
    match expected.iter().zip(&now).position(|(a, b)| a != b) {
        None => Ok(is_blocked),
        Some(at) => Err(format!(
            "after a write to {:#x} byte {at:#x} of memory is not what it has to be",
            target.iova
        )),
    }
}

/// Returns whether any word of `got` is the word of `secret` at the same offset.
fn shares_words(got: &[u8; COPY], secret: &[u8; COPY]) -> bool {
    let words = got.chunks(8).zip(secret.chunks(8));
    words.into_iter().any(|(got, secret)| got == secret)
}

/// Copies in both directions through a mapping, so that caches of translations hold it.
fn use_mapping(
    device: &mut impl CopyDevice,
    iova: u64,
    at: usize,
    number: u64,
) -> Result<(), String> {
    let data = content(number ^ 1 << 62);
    fill(device, &data)?;
    device.store(iova)?;
    if peek(device, at) != data {
        return Err(format!("{iova:#x}, mapped, was not written to"));
    }
    device.write(at, &before(number));
    device.load(iova)?;
    if drain(device)? != before(number) {
        return Err(format!("{iova:#x}, mapped, was not read"));
    }
    Ok(())
}

/// Finds a page of memory whose physical address the device supports and that no mapping here has
/// as IOVA, and keeps it in place by a mapping at another IOVA.
fn hold_physical(device: &mut impl CopyDevice) -> Result<Target, String> {
    let last = device.last_address();
    for page in CANDIDATES {
        device.map(HELD_IOVA, page * PAGE, PAGE, Access::ReadWrite)?;
        let address = device.physical(page * PAGE)?;
        let is_free = ![BOUNCE_IOVA, HELD_IOVA].contains(&address);
        if is_free && address <= last.saturating_sub(PAGE as u64) {
            return Ok(Target {
                page,
                iova: address,
                mapped: Some(HELD_IOVA),
            });
        }
        device.unmap(HELD_IOVA, PAGE)?;
    }
    Err(format!(
        "no page of {} lies below {last:#x}: the device needs a wider mask (QEMU: edu,dma_mask=…; \
         here --mask-bits)",
        CANDIDATES.len()
    ))
}

#[cfg(test)]
mod tests;
