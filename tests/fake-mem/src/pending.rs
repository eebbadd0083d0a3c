//! Injected waits.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use guest_mem::{
    Access, Dma, Gpa, Hva, Intent, Iova, KeepAlive, Lease, LeaseId, LeaseStop, Pages, Perm,
    PhysMem, Run, Stop, Ticket, Wanted, Window,
};

/// Accesses that wait. Every wait happens once: the same access, made again, goes through.
#[derive(Debug)]
enum When {
    Never,
    /// The access of this number, counted from 0.
    Kth(u64),
    /// The first access of each kind to each address; these have waited already.
    Every(HashSet<(Kind, u64)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    LoadWord,
    StoreWord,
    Read,
    Write,
    Host,
    Run,
    Window,
    Refresh,
    Lease,
    Locate,
}

#[derive(Debug)]
struct State {
    when: When,
    accesses: u64,
    tickets: Vec<Ticket>,
    next_ticket: u64,
}

/// Shared by clones, so that a test can look on while the code under test owns the memory.
#[derive(Clone, Debug)]
struct Injector(Arc<Mutex<State>>);

impl Injector {
    fn new(when: When) -> Self {
        Self(Arc::new(Mutex::new(State {
            when,
            accesses: 0,
            tickets: Vec::new(),
            next_ticket: 1,
        })))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no test panics while it holds this")
    }

    fn pass(&self, kind: Kind, address: u64) -> Access<()> {
        let mut state = self.state();
        let number = state.accesses;
        state.accesses += 1;
        let waits = match &mut state.when {
            When::Never => false,
            When::Kth(k) => number == *k,
            When::Every(waited) => waited.insert((kind, address)),
        };
        if !waits {
            return Ok(());
        }
        let ticket = Ticket(state.next_ticket);
        state.next_ticket += 1;
        state.tickets.push(ticket);
        Err(Stop::Pending(ticket))
    }
}

macro_rules! control {
    ($name:ident) => {
        impl<T> $name<T> {
            fn with(inner: T, when: When) -> Self {
                Self {
                    inner,
                    injector: Injector::new(when),
                }
            }

            /// Never waits, only counts.
            pub fn never(inner: T) -> Self {
                Self::with(inner, When::Never)
            }

            /// Waits once: on access number `k`, counted from 0.
            pub fn kth(inner: T, k: u64) -> Self {
                Self::with(inner, When::Kth(k))
            }

            /// Waits on the first access of each kind to each address.
            pub fn every(inner: T) -> Self {
                Self::with(inner, When::Every(HashSet::new()))
            }

            /// After `every`: all addresses wait once more.
            pub fn forget(&self) {
                if let When::Every(waited) = &mut self.injector.state().when {
                    waited.clear();
                }
            }

            /// Accesses made so far, those that waited included.
            pub fn accesses(&self) -> u64 {
                self.injector.state().accesses
            }

            /// Takes the tickets handed out since the last call, oldest first: complete each to let
            /// the parked unit or queue go on.
            pub fn take_tickets(&self) -> Vec<Ticket> {
                std::mem::take(&mut self.injector.state().tickets)
            }

            /// Returns the wrapped value.
            pub fn inner(&self) -> &T {
                &self.inner
            }

            /// Returns the wrapped value.
            pub fn inner_mut(&mut self) -> &mut T {
                &mut self.inner
            }
        }
    };
}

/// Guest memory that answers [`Stop::Pending`] with a fresh ticket where the test says.
/// A clone shares the count and the waits.
#[derive(Clone, Debug)]
pub struct PendingMem<M> {
    inner: M,
    injector: Injector,
}
control!(PendingMem);

impl<M: PhysMem> PhysMem for PendingMem<M> {
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.injector.pass(Kind::LoadWord, gpa.raw())?;
        self.inner.read_u64(gpa)
    }

    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.injector.pass(Kind::StoreWord, gpa.raw())?;
        self.inner.store_u32_release(gpa, value)
    }

    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.injector.pass(Kind::Read, gpa.raw())?;
        self.inner.read(gpa, buf)
    }

    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.injector.pass(Kind::Write, gpa.raw())?;
        self.inner.write(gpa, buf)
    }

    fn host(&self, gpa: Gpa, len: u64, intent: Intent) -> Access<Hva> {
        self.injector.pass(Kind::Host, gpa.raw())?;
        self.inner.host(gpa, len, intent)
    }

    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.injector.pass(Kind::Run, gpa.raw())?;
        self.inner.run(gpa)
    }

    fn let_go(&self, pages: &Pages, mask: u32) -> u32 {
        self.inner.let_go(pages, mask)
    }

    fn keep_alive(&self) -> KeepAlive {
        self.inner.keep_alive()
    }
}

/// DMA of a device that answers [`Stop::Pending`] with a fresh ticket where the test says.
///
/// Refreshing a window that is current is no access. One that waits closes the window, as the
/// contract of [`Dma::refresh`] has it.
#[derive(Clone, Debug)]
pub struct PendingDma<D> {
    inner: D,
    injector: Injector,
}
control!(PendingDma);

impl<D: Dma> Dma for PendingDma<D> {
    fn read(&mut self, iova: Iova, buf: &mut [u8]) -> Access<()> {
        self.injector.pass(Kind::Read, iova.raw())?;
        self.inner.read(iova, buf)
    }

    fn write(&mut self, iova: Iova, buf: &[u8]) -> Access<()> {
        self.injector.pass(Kind::Write, iova.raw())?;
        self.inner.write(iova, buf)
    }

    fn generation(&self) -> u64 {
        self.inner.generation()
    }

    fn window(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Window> {
        self.injector.pass(Kind::Window, iova.raw())?;
        self.inner.window(iova, len, perm)
    }

    fn refresh(&mut self, window: &mut Window) -> Access<()> {
        if window.is_current(self.generation()) {
            return Ok(());
        }
        window.close();
        self.injector.pass(Kind::Refresh, window.iova().raw())?;
        self.inner.refresh(window)
    }

    fn lease(
        &mut self,
        iova: Iova,
        len: u32,
        intent: impl Into<Intent>,
    ) -> Result<Lease, LeaseStop> {
        self.injector.pass(Kind::Lease, iova.raw())?;
        self.inner.lease(iova, len, intent)
    }

    fn host(&mut self, iova: Iova, len: u32, intent: Intent) -> Access<(Hva, u32)> {
        self.injector.pass(Kind::Host, iova.raw())?;
        self.inner.host(iova, len, intent)
    }

    fn locate(&mut self, iova: Iova, len: u32, perm: Perm) -> Access<Run> {
        self.injector.pass(Kind::Locate, iova.raw())?;
        self.inner.locate(iova, len, perm)
    }

    fn gather(&mut self, ranges: impl Iterator<Item = Wanted>) -> Access<()> {
        self.inner.gather(ranges)
    }

    fn has_lease_room(&self, leases: usize) -> bool {
        self.inner.has_lease_room(leases)
    }

    fn is_stale(&self, id: LeaseId) -> bool {
        self.inner.is_stale(id)
    }

    fn release(&mut self, id: LeaseId) {
        self.inner.release(id);
    }
}
