//! A driver that changes memory while the device looks at it.
//!
//! A ring reaches memory through windows, and asks its [`Dma`] for the generation before each use
//! of one. [`Racing`] stores what the script says at that moment: between any two of the device's
//! accesses, at a place that the input chooses and that repeats. That is what a second thread could
//! do, but for values torn inside one access.

use std::cell::RefCell;

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{
    Access, Dma, Gpa, Hva, Intent, Iova, Lease, LeaseId, LeaseStop, Perm, PhysMem, Run, Window,
};

use crate::Input;

/// One store of the driver.
#[derive(Clone, Debug)]
pub struct Store {
    /// Number of accesses of the device before it.
    pub wait: u8,
    /// Address.
    pub at: u32,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Memory as the driver has left it, and what it is about to store.
#[derive(Debug)]
struct Driver {
    shadow: Vec<u8>,
    /// The last one comes first.
    plan: Vec<Store>,
    stored: usize,
}

/// A view of memory whose driver keeps storing.
#[derive(Debug)]
pub struct Racing {
    /// Memory as the device reaches it.
    pub flat: FlatDma,
    mem: ArrayMem,
    driver: RefCell<Driver>,
}

impl Racing {
    /// `bytes` of zeroes; addresses from 0.
    pub fn new(bytes: usize) -> Self {
        let mem = ArrayMem::new(bytes as u64);
        Self {
            flat: FlatDma::new(mem.clone()),
            mem,
            driver: RefCell::new(Driver {
                shadow: vec![0; bytes],
                plan: Vec::new(),
                stored: 0,
            }),
        }
    }

    /// The memory itself.
    pub fn mem(&self) -> &ArrayMem {
        &self.mem
    }

    /// The driver stores now. What lies behind the end of memory is dropped.
    pub fn store(&self, at: u32, bytes: &[u8]) {
        let mut driver = self.driver.borrow_mut();
        let at = (at as usize).min(driver.shadow.len());
        let len = bytes.len().min(driver.shadow.len() - at);
        self.mem.put(Gpa::new(at as u64), &bytes[..len]);
        driver.shadow[at..at + len].copy_from_slice(&bytes[..len]);
        driver.stored += 1;
    }

    /// The driver will store while the device is at work; in this order.
    pub fn plan(&self, mut stores: Vec<Store>) {
        stores.reverse();
        self.driver.borrow_mut().plan = stores;
    }

    /// [`plan`](Self::plan) of `count` stores as the input says, of up to 16 bytes, that each wait
    /// for `longest` accesses at most, a power of two less one.
    pub(crate) fn plan_from(&self, input: &mut Input<'_>, count: u8, longest: u8) {
        let store = |_| {
            let wait = input.u8() & longest;
            let at = input.u16().into();
            let len = input.u8() % 17;
            let bytes = input.bytes(len.into()).to_vec();
            Store { wait, at, bytes }
        };
        let stores = (0..count).map(store).collect();
        self.plan(stores);
    }

    /// Returns the number of stores that the driver has made.
    pub fn stored(&self) -> usize {
        self.driver.borrow().stored
    }

    /// A word as it stands; 0 behind the end of memory.
    pub(crate) fn load(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        let _ = self.mem.read(Gpa::new(at), &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// All of memory.
    pub fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.driver.borrow().shadow.len()];
        self.mem
            .read(Gpa::new(0), &mut bytes)
            .expect("all of it is RAM");
        bytes
    }

    /// Checks that the device has changed nothing but bytes inside `allowed`, and takes note of
    /// those.
    ///
    /// # Panics
    /// If it has.
    pub fn check_unchanged(&self, allowed: &[std::ops::Range<usize>]) {
        let contents = self.contents();
        let mut driver = self.driver.borrow_mut();
        let len = contents.len();
        for range in allowed {
            let range = range.start.min(len)..range.end.min(len);
            driver.shadow[range.clone()].copy_from_slice(&contents[range]);
        }
        if driver.shadow != contents {
            let at = (0..len).find(|&at| driver.shadow[at] != contents[at]);
            panic!("the device has written to {at:x?}");
        }
    }

    /// The device accesses memory.
    fn tick(&self) {
        let mut driver = self.driver.borrow_mut();
        if let Some(next) = driver.plan.last_mut() {
            if next.wait != 0 {
                next.wait -= 1;
                return;
            }
            let Some(Store { at, bytes, .. }) = driver.plan.pop() else {
                return;
            };
            drop(driver);
            self.store(at, &bytes);
        }
    }
}

impl Dma for Racing {
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()> {
        self.tick();
        self.flat.read(iova, buf)
    }

    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        self.tick();
        self.flat.write(iova, buf)
    }

    fn generation(&self) -> u64 {
        self.tick();
        self.flat.generation()
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
        self.tick();
        self.flat.window(iova, len, perm)
    }

    fn refresh(&mut self, window: &mut Window) -> Access<()> {
        self.tick();
        self.flat.refresh(window)
    }

    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop> {
        self.tick();
        self.flat.lease(iova, len, intent)
    }

    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)> {
        self.tick();
        self.flat.host(iova, len, intent)
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
        self.tick();
        self.flat.locate(iova, len, perm)
    }

    fn has_lease_room(&self, leases: usize) -> bool {
        self.flat.has_lease_room(leases)
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        self.flat.is_stale(id)
    }

    fn release(&mut self, id: LeaseId) {
        self.flat.release(id);
    }
}
