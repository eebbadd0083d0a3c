//! The view against a naive byte-by-byte model, over a toy IOMMU with random mappings and
//! permissions.

use std::collections::{BTreeMap, HashSet};

use fake_mem::{ArrayMem, PendingMem};
use guest_mem::{
    Access, Dma, DmaFault, Full, Gpa, Intent, Iommu, Iova, LeaseStop, LeaseTable, NoIommu, Perm,
    PhysMem, Run, SourceId, Stop, View,
};
use proptest::prelude::*;

/// Toy pages of 64 bytes: short ranges cross many, and models stay small.
const PAGE: u64 = 64;
/// Device pages that exist.
const PAGES: u64 = 12;
const RAM: u64 = 4096;
const DISK: SourceId = SourceId::new(0, 1, 0);

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Target of the page, in units of `PAGE`; beyond RAM for some.
    target: u64,
    read: bool,
    write: bool,
}

/// One flat table for all devices; each lookup reads a word of guest memory, as a walk does.
struct Toy {
    table: BTreeMap<u64, Entry>,
    leases: LeaseTable,
    generation: u64,
}

impl Toy {
    fn new(entries: &[Option<Entry>]) -> Self {
        let pages = (0..).zip(entries);
        Self {
            table: pages.filter_map(|(page, e)| Some((page, (*e)?))).collect(),
            leases: LeaseTable::new(4),
            generation: 0,
        }
    }

    fn lookup(&self, iova: u64, perm: Perm) -> Option<u64> {
        let entry = self.table.get(&(iova / PAGE))?;
        let allowed = match perm {
            Perm::Read => entry.read,
            Perm::Write => entry.write,
        };
        allowed.then(|| entry.target * PAGE + iova % PAGE)
    }
}

impl Iommu for Toy {
    fn translate<M: PhysMem>(
        &mut self,
        mem: &M,
        _source: SourceId,
        iova: Iova,
        perm: Perm,
    ) -> Access<Run> {
        // The read gives PendingMem its chance to pend.
        mem.read_u64(Gpa::new(iova.raw() / PAGE % (RAM / 8) * 8))?;
        let gpa = self.lookup(iova.raw(), perm);
        let gpa = gpa.ok_or(DmaFault::Blocked { iova })?;
        Ok(Run {
            gpa: Gpa::new(gpa),
            len: PAGE - iova.raw() % PAGE,
        })
    }

    fn generation(&self, _source: SourceId) -> u64 {
        self.generation
    }

    type Leases = LeaseTable;

    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}

fn entry() -> impl Strategy<Value = Option<Entry>> {
    // Three targets in forty lie beyond RAM (64 toy pages).
    prop::option::weighted(
        0.85,
        (
            27..67u64,
            prop::bool::weighted(0.8),
            prop::bool::weighted(0.8),
        )
            .prop_map(|(target, read, write)| Entry {
                target,
                read,
                write,
            }),
    )
}

/// The guest addresses of a range byte by byte, or the fault that the first bad page gives.
fn naive(toy: &Toy, iova: u64, len: u64, perm: Perm) -> Result<Vec<u64>, Stop> {
    (iova..iova + len)
        .map(|at| {
            let blocked = DmaFault::Blocked {
                iova: Iova::new(at),
            };
            let gpa = toy.lookup(at, perm).ok_or(Stop::Fault(blocked))?;
            let gone = DmaFault::NotRam { gpa: Gpa::new(gpa) };
            if gpa < RAM { Ok(gpa) } else { Err(gone.into()) }
        })
        .collect()
}

/// Runs a step again as long as it pends, as its owner does.
fn finish<T>(mut step: impl FnMut() -> Access<T>) -> Access<T> {
    for _ in 0..1000 {
        match step() {
            Err(Stop::Pending(_)) => {}
            done => return done,
        }
    }
    panic!("each access pends once: the step must end");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn copies_agree_with_byte_by_byte_translation(
        entries in prop::collection::vec(entry(), PAGES as usize),
        iova in 0..(PAGES + 1) * PAGE,
        len in 0..400u64,
        pends: bool,
    ) {
        let mut toy = Toy::new(&entries);
        let array = ArrayMem::new(RAM);
        let fill: Vec<u8> = (0..RAM as u32).map(|i| (i * 13 / 5) as u8).collect();
        array.put(Gpa::new(0), &fill);
        let mem = match pends {
            true => PendingMem::every(array.clone()),
            false => PendingMem::never(array.clone()),
        };

        let want = naive(&toy, iova, len, Perm::Read);
        let mut buf = vec![0; len as usize];
        let got = finish(|| View::new(&mut toy, &mem, DISK).read(Iova::new(iova), &mut buf));
        prop_assert_eq!(got, want.as_ref().map(|_| ()).map_err(|stop| *stop));
        if let Ok(gpas) = want {
            let bytes: Vec<u8> = gpas.iter().map(|gpa| fill[*gpa as usize]).collect();
            prop_assert_eq!(&buf, &bytes);
        }

        let want = naive(&toy, iova, len, Perm::Write);
        let data: Vec<u8> = (0..len).map(|i| i as u8 ^ 0xa5).collect();
        let got = finish(|| View::new(&mut toy, &mem, DISK).write(Iova::new(iova), &data));
        prop_assert_eq!(got, want.as_ref().map(|_| ()).map_err(|stop| *stop));
        let after = array.get::<{ RAM as usize }>(Gpa::new(0));
        let mut model = fill;
        match want {
            Ok(gpas) => {
                for (gpa, byte) in gpas.iter().zip(&data) {
                    model[*gpa as usize] = *byte;
                }
                prop_assert!(after[..] == model);
            }
            // A refused write may have changed only bytes that it was allowed to write.
            Err(_) => {
                let reachable: HashSet<u64> =
                    (iova..iova + len).filter_map(|at| toy.lookup(at, Perm::Write)).collect();
                for at in (0..RAM).filter(|at| !reachable.contains(at)) {
                    prop_assert_eq!(after[at as usize], model[at as usize]);
                }
            }
        }
    }

    /// RAM is not asked for, and no lease begins.
    #[test]
    fn pieces_are_located_where_each_byte_is(
        entries in prop::collection::vec(entry(), PAGES as usize),
        iova in 0..PAGES * PAGE,
        len in 1..200u32,
        perm in prop_oneof![Just(Perm::Read), Just(Perm::Write)],
        pends: bool,
    ) {
        let mut toy = Toy::new(&entries);
        let mem = match pends {
            true => PendingMem::every(ArrayMem::new(RAM)),
            false => PendingMem::never(ArrayMem::new(RAM)),
        };
        let mut gpas = Vec::new();
        let outcome = loop {
            let done = gpas.len() as u32;
            if done == len {
                break Ok(());
            }
            let at = Iova::new(iova + u64::from(done));
            match finish(|| View::new(&mut toy, &mem, DISK).locate(at, len - done, perm)) {
                Ok(run) => {
                    prop_assert!(run.len != 0 && run.len <= u64::from(len - done));
                    gpas.extend(run.gpa.raw()..run.gpa.raw() + run.len);
                }
                Err(stop) => break Err(stop),
            }
        };
        let bytes = iova..iova + u64::from(len);
        let want: Vec<_> = bytes.clone().map_while(|at| toy.lookup(at, perm)).collect();
        let blocked = bytes.clone().nth(want.len()).map(|at| {
            Stop::Fault(DmaFault::Blocked { iova: Iova::new(at) })
        });
        prop_assert_eq!((outcome.err(), gpas), (blocked, want));
        prop_assert!(toy.leases.is_empty());
    }

    #[test]
    fn leases_cover_the_range_piece_by_piece(
        entries in prop::collection::vec(entry(), PAGES as usize),
        iova in 0..PAGES * PAGE,
        len in 1..200u32,
        perm in prop_oneof![Just(Perm::Read), Just(Perm::Write)],
    ) {
        let mut toy = Toy::new(&entries);
        let mem = ArrayMem::new(RAM);
        let base = mem.host(Gpa::new(0), 1, Intent::Read).unwrap();
        let mut gpas = Vec::new();
        let mut ids = Vec::new();
        let mut done = 0;
        let outcome = loop {
            if done == len {
                break Ok(());
            }
            let at = Iova::new(iova + u64::from(done));
            match View::new(&mut toy, &mem, DISK).lease(at, len - done, perm) {
                Ok(lease) => {
                    let start = lease.hva.offset_from(base).unwrap();
                    gpas.extend(start..start + u64::from(lease.len));
                    done += lease.len;
                    ids.push(lease.id);
                    prop_assert_eq!(toy.leases.len(), ids.len());
                }
                Err(stop) => break Err(stop),
            }
            if ids.len() == toy.leases.max() {
                View::new(&mut toy, &mem, DISK).release(ids.remove(0));
            }
        };
        match naive(&toy, iova, u64::from(len), perm) {
            Ok(want) => prop_assert_eq!((outcome, gpas), (Ok(()), want)),
            Err(stop) => prop_assert_eq!(outcome, Err(stop.into())),
        }
        for id in ids {
            View::new(&mut toy, &mem, DISK).release(id);
        }
        prop_assert!(toy.leases.is_empty());
    }
}

#[test]
#[cfg_attr(miri, ignore = "copies all memory dozens of times")]
fn a_wait_at_each_access_in_turn_gives_the_same_bytes_and_one_lease() {
    let entry = |target| {
        Some(Entry {
            target,
            read: true,
            write: true,
        })
    };
    let entries = [entry(9), entry(3), entry(40)];
    let run = |mem: &PendingMem<ArrayMem>| {
        mem.inner().put(Gpa::new(9 * PAGE), b"across");
        let mut toy = Toy::new(&entries);
        let mut view = View::new(&mut toy, mem, DISK);
        let mut buf = [0; 100];
        finish(|| view.read(Iova::new(0), &mut buf)).unwrap();
        finish(|| view.write(Iova::new(60), &buf)).unwrap();
        let mut window = finish(|| view.window(Iova::new(64), 8, Perm::Read)).unwrap();
        let word = window.load_u64(0);
        finish(|| view.refresh(&mut window)).unwrap();
        let lease = finish(|| match view.lease(Iova::new(130), 20, Perm::Write) {
            Err(LeaseStop::Access(stop)) => Err(stop),
            lease => Ok(lease.expect("there is room")),
        })
        .unwrap();
        assert_eq!((lease.len, toy.leases.len()), (20, 1));
        (buf, word, mem.inner().get::<{ RAM as usize }>(Gpa::new(0)))
    };
    let free = PendingMem::never(ArrayMem::new(RAM));
    let want = run(&free);
    assert!(free.accesses() >= 10);
    for k in 0..free.accesses() {
        let mem = PendingMem::kth(ArrayMem::new(RAM), k);
        assert!(run(&mem) == want, "waiting at access {k}");
        assert_eq!(mem.take_tickets().len(), 1);
    }
}

#[test]
fn ranges_that_wrap_or_hold_nothing_are_bad() {
    let mem = ArrayMem::new(RAM);
    let mut iommu = NoIommu::new(1);
    let mut view = View::new(&mut iommu, &mem, DISK);
    let bad = Stop::Fault(DmaFault::BadRange);
    let last = Iova::new(u64::MAX);
    assert_eq!(view.read(last, &mut [0; 2]), Err(bad));
    assert_eq!(view.write(last, &[0; 2]), Err(bad));
    assert_eq!(view.lease(last, 2, Perm::Read), Err(bad.into()));
    assert_eq!(view.lease(Iova::new(0), 0, Perm::Read), Err(bad.into()));
    assert_eq!(view.locate(last, 2, Perm::Read), Err(bad));
    assert_eq!(view.locate(Iova::new(0), 0, Perm::Read), Err(bad));
    assert_eq!(view.read(last, &mut []), Ok(()));
    // The last byte of the space is a range that does not wrap; it is just not RAM.
    let gpa = Gpa::new(u64::MAX);
    assert_eq!(
        view.read(last, &mut [0]),
        Err(DmaFault::NotRam { gpa }.into())
    );
}

#[test]
fn full_table_of_leases_is_something_to_wait_for() {
    let mem = ArrayMem::new(RAM);
    let mut iommu = NoIommu::new(1);
    let mut view = View::new(&mut iommu, &mem, DISK);
    let lease = view.lease(Iova::new(0), 8, Perm::Read).unwrap();
    let full = Err(Full { most: 1 }.into());
    assert_eq!(view.lease(Iova::new(0), 8, Perm::Read), full);
    view.release(lease.id);
    assert!(view.lease(Iova::new(0), 8, Perm::Read).is_ok());
}

/// Memory that lies about host addresses: none of them may be dereferenced.
struct Liar(ArrayMem);

impl PhysMem for Liar {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.0.read_u64(gpa)
    }
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.0.store_u32_release(gpa, value)
    }
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.0.read(gpa, buf)
    }
    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.0.write(gpa, buf)
    }
    fn host(&self, gpa: Gpa, _len: u64, _intent: Intent) -> Access<guest_mem::Hva> {
        Ok(guest_mem::Hva::new(gpa.raw() | 8))
    }
    fn keep_alive(&self) -> guest_mem::KeepAlive {
        self.0.keep_alive()
    }
}

#[test]
fn window_refuses_an_address_its_memory_does_not_own() {
    let mem = Liar(ArrayMem::new(RAM));
    let mut iommu = NoIommu::new(1);
    let answer = View::new(&mut iommu, &mem, DISK).window(Iova::new(0), 8, Perm::Read);
    let gpa = Gpa::new(0);
    assert_eq!(answer.err(), Some(DmaFault::NotRam { gpa }.into()));
}
