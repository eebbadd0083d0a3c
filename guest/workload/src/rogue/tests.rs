use std::collections::BTreeMap;

use super::pieces::PiecesConfig;
use super::*;

/// Fault of an IOMMU, or of a layer that builds its tables from a guest's tables (a shadow).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// An IOVA without a mapping is used as a physical address.
    Bypass,
    /// A mapping allows both directions.
    NoRights,
    /// A mapping stays in effect for this time after its end, in milliseconds.
    Stale(u64),
    /// The last page of a mapping of several pages stays mapped after its end.
    KeepsLast,
    /// Making a mapping removes the last page of the mapping before it, if both are contiguous.
    TakesBefore,
    /// Making a mapping removes the first page of the mapping behind it, if both are contiguous.
    TakesBehind,
    /// From the 33rd page of a mapping on, each page leads to the page behind the right one.
    Shifted,
    /// A mapping at an IOVA that was mapped before keeps the old memory.
    KeepsOld,
}

/// Physical address of the fake device's memory.
const PHYSICAL: u64 = 0x0a00_0000;

/// A fake of QEMU's `edu` device, and of its IOMMU.
struct Fake {
    flaw: Flaw,
    memory: Vec<u8>,
    buffer: [u8; COPY],
    /// Page of memory and rights, by the page number of the IOVA.
    pages: BTreeMap<u64, (usize, Access)>,
    /// Ended mappings in the same form, with the time of the end in milliseconds.
    ended: BTreeMap<u64, (usize, Access, u64)>,
    now_ms: u64,
    last_address: u64,
}

impl Fake {
    fn new(flaw: Flaw) -> Self {
        Self {
            flaw,
            memory: vec![0; MEMORY],
            buffer: [0; COPY],
            pages: BTreeMap::new(),
            ended: BTreeMap::new(),
            now_ms: 1000,
            last_address: (1 << 28) - 1,
        }
    }

    /// Returns the offset in memory that an access to `iova` reaches, if any.
    fn translate(&self, iova: u64, is_write: bool) -> Option<usize> {
        let (page, offset) = (iova / PAGE as u64, (iova % PAGE as u64) as usize);
        let live = self.pages.get(&page).copied();
        let stale = self.ended.get(&page).filter(|(.., at)| match self.flaw {
            Flaw::Stale(ms) => self.now_ms < at + ms,
            Flaw::KeepsLast => true,
            _ => false,
        });
        let found = live.or(stale.map(|(page, access, _)| (*page, *access)));
        if let Some((page, access)) = found {
            let needed = if is_write {
                Access::Write
            } else {
                Access::Read
            };
            let allows = access == Access::ReadWrite || access == needed;
            let allows = allows || self.flaw == Flaw::NoRights;
            return allows.then_some(page * PAGE + offset);
        }
        let at = iova.checked_sub(PHYSICAL)? as usize;
        (self.flaw == Flaw::Bypass && at < MEMORY).then_some(at)
    }
}

impl CopyDevice for Fake {
    fn large_at(&self) -> usize {
        CANDIDATES.end * PAGE
    }

    fn read(&self, at: usize, data: &mut [u8]) {
        data.copy_from_slice(&self.memory[at..][..data.len()]);
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        self.memory[at..][..data.len()].copy_from_slice(data);
    }

    fn physical(&self, at: usize) -> Result<u64, String> {
        Ok(PHYSICAL + at as u64)
    }

    fn last_address(&self) -> u64 {
        self.last_address
    }

    fn map(&mut self, iova: u64, at: usize, len: usize, access: Access) -> Result<(), String> {
        for page in 0..len / PAGE {
            let far = usize::from(self.flaw == Flaw::Shifted && page >= 32);
            let key = iova / PAGE as u64 + page as u64;
            let memory = match self.ended.get(&key) {
                Some((old, ..)) if self.flaw == Flaw::KeepsOld => *old,
                _ => at / PAGE + page + far,
            };
            if self.pages.insert(key, (memory, access)).is_some() {
                return Err(format!("{iova:#x} is mapped"));
            }
        }
        Ok(())
    }

    fn unmap(&mut self, iova: u64, len: usize) -> Result<(), String> {
        let (first, pages) = (iova / PAGE as u64, (len / PAGE) as u64);
        for page in first..first + pages {
            let (memory, access) = self.pages.remove(&page).ok_or("is not mapped")?;
            let keeps = self.flaw != Flaw::KeepsLast || pages > 1 && page + 1 == first + pages;
            if keeps {
                self.ended.insert(page, (memory, access, self.now_ms));
            }
        }
        let neighbour = match self.flaw {
            Flaw::TakesBefore => Some((first - 1, first)),
            Flaw::TakesBehind => Some((first + pages, first + pages - 1)),
            _ => None,
        };
        if let Some((neighbour, own)) = neighbour {
            let memory = |page| self.pages.get(&page).map(|(memory, _)| *memory);
            let own = self.ended.get(&own).map(|(memory, ..)| *memory);
            let apart = memory(neighbour).zip(own).map(|(a, b)| a.abs_diff(b));
            if apart == Some(1) {
                self.pages.remove(&neighbour);
            }
        }
        Ok(())
    }

    fn load(&mut self, iova: u64) -> Result<(), String> {
        for byte in 0..COPY {
            let from = self.translate(iova + byte as u64, false);
            // As in QEMU: refused bytes read as zeroes.
            self.buffer[byte] = from.map_or(0, |at| self.memory[at]);
        }
        self.now_ms += 100;
        Ok(())
    }

    fn store(&mut self, iova: u64) -> Result<(), String> {
        for byte in 0..COPY {
            if let Some(at) = self.translate(iova + byte as u64, true) {
                self.memory[at] = self.buffer[byte];
            }
        }
        self.now_ms += 100;
        Ok(())
    }

    fn pause(&mut self, time: Duration) {
        self.now_ms += time.as_millis() as u64;
    }
}

/// Returns the attempts that reached memory on a device with this flaw, as `state/access`.
fn arrived(flaw: Flaw, config: &AttemptConfig) -> Result<Vec<String>, String> {
    let mut device = Fake::new(flaw);
    prove(&mut device)?;
    let made = attempt_all(&mut device, config, &mut |_| {})?;
    assert_eq!(made.len(), ATTEMPTS.len());
    let arrived = made.iter().filter(|attempt| !attempt.is_blocked);
    let name = |attempt: &Attempt| {
        let access = if attempt.is_write { "write" } else { "read" };
        format!("{}/{access}", attempt.state)
    };
    Ok(arrived.map(name).collect())
}

#[test]
fn nothing_arrives_through_a_right_iommu() {
    for remap in [false, true] {
        let config = AttemptConfig {
            remap,
            ..AttemptConfig::default()
        };
        assert_eq!(arrived(Flaw::None, &config), Ok(vec![]));
    }
}

#[test]
fn each_flaw_shows_in_the_attempts_that_it_concerns() {
    let plain = AttemptConfig::default();
    let remap = AttemptConfig {
        remap: true,
        ..plain
    };
    let late = AttemptConfig {
        wait: Duration::from_millis(50),
        ..plain
    };
    let revoked = ["revoked/write", "revoked/read"];
    for (flaw, config, expected) in [
        (
            Flaw::Bypass,
            plain,
            &["unmapped/write", "unmapped/read"][..],
        ),
        (Flaw::NoRights, plain, &["read-only/write"]),
        (Flaw::Stale(50), plain, &revoked),
        (Flaw::Stale(50), late, &[]),
        (Flaw::Stale(51), late, &revoked),
        (Flaw::KeepsOld, plain, &[]),
        (Flaw::KeepsOld, remap, &revoked),
    ] {
        let found = arrived(flaw, &config).expect("the run ends");
        assert_eq!(found, expected, "{flaw:?} {config:?}");
    }
}

#[test]
fn each_attempt_has_its_own_iova_and_line() {
    let mut device = Fake::new(Flaw::None);
    prove(&mut device).expect("it copies");
    let mut lines = Vec::new();
    let say = &mut |attempt: &Attempt| lines.push(attempt.line());
    attempt_all(&mut device, &AttemptConfig::default(), say).expect("the run ends");
    assert_eq!(
        lines,
        [
            "rogue unmapped blocked=yes iova=0xa001000 access=write",
            "rogue read-only blocked=yes iova=0x1310000 access=write",
            "rogue revoked blocked=yes iova=0x1320000 access=write",
            "rogue unmapped blocked=yes iova=0xa001000 access=read",
            "rogue revoked blocked=yes iova=0x1340000 access=read",
        ]
    );
}

#[test]
fn device_that_does_nothing_or_sees_no_page_is_no_proof() {
    let mut device = Fake::new(Flaw::None);
    device.last_address = PHYSICAL + PAGE as u64;
    prove(&mut device).expect("it copies");
    let none = attempt_all(&mut device, &AttemptConfig::default(), &mut |_| {});
    let reason = none.expect_err("no page is low enough");
    assert!(reason.contains("--mask-bits"), "{reason}");

    /// A device that only reports that it has copied.
    struct Idle(Fake);
    impl CopyDevice for Idle {
        fn large_at(&self) -> usize {
            self.0.large_at()
        }
        fn read(&self, at: usize, data: &mut [u8]) {
            self.0.read(at, data);
        }
        fn write(&mut self, at: usize, data: &[u8]) {
            self.0.write(at, data);
        }
        fn physical(&self, at: usize) -> Result<u64, String> {
            self.0.physical(at)
        }
        fn last_address(&self) -> u64 {
            self.0.last_address()
        }
        fn map(&mut self, iova: u64, at: usize, len: usize, access: Access) -> Result<(), String> {
            self.0.map(iova, at, len, access)
        }
        fn unmap(&mut self, iova: u64, len: usize) -> Result<(), String> {
            self.0.unmap(iova, len)
        }
        fn load(&mut self, _: u64) -> Result<(), String> {
            Ok(())
        }
        fn store(&mut self, _: u64) -> Result<(), String> {
            Ok(())
        }
        fn pause(&mut self, _: Duration) {}
    }
    let reason = prove(&mut Idle(Fake::new(Flaw::None))).expect_err("nothing came back");
    assert!(reason.contains("no proof"), "{reason}");
}

/// Runs the random mappings of [`pieces`] on a device with this flaw.
fn run_pieces(flaw: Flaw, seed: u64, wait: u64) -> Result<pieces::PiecesReport, String> {
    let mut device = Fake::new(flaw);
    prove(&mut device)?;
    let config = PiecesConfig {
        count: 300,
        seed,
        wait: Duration::from_millis(wait),
    };
    let report = pieces::run(&mut device, &config)?;
    let left = device.pages.len();
    // The mapping of the bounce page is not ended.
    assert!(report.arrived > 0 || left == 1, "{left} pages are left");
    Ok(report)
}

#[test]
fn pieces_are_made_cut_and_ended() {
    for seed in 0..8 {
        let report = run_pieces(Flaw::None, seed, 0).expect("all is right");
        assert_eq!(report.arrived, 0);
        assert_eq!(report.maps, report.unmaps);
        assert!(report.cuts > 10, "{report:?}");
        assert!(
            report.rogues > 50 && report.copies > report.maps,
            "{report:?}"
        );
    }
}

#[test]
fn pieces_find_each_flaw_in_every_order() {
    for seed in 0..8 {
        for flaw in [Flaw::Stale(1), Flaw::KeepsLast] {
            let report = run_pieces(flaw, seed, 0).expect("all that is mapped arrives");
            assert!(report.arrived > 0, "{flaw:?} {seed}: {report:?}");
        }
        for flaw in [
            Flaw::TakesBefore,
            Flaw::TakesBehind,
            Flaw::Shifted,
            Flaw::KeepsOld,
        ] {
            let wrong = run_pieces(flaw, seed, 0);
            assert!(wrong.is_err(), "{flaw:?} {seed}: {wrong:?}");
        }
        let late = run_pieces(Flaw::Stale(50), seed, 50).expect("it has ended by then");
        assert_eq!(late.arrived, 0);
    }
}
