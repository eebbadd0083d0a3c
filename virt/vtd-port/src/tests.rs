//! Tests of stores to the protected page, with a thread of this process as the vCPU.

use guest_mem::{Gpa, GuestRam, RegPage, RegisterPage, SlotMapping};
use vtd::spec::registers::IQT;
use vtd::{Config, Event, Sink, Unit};

use super::*;

struct Nowhere;

impl Sink for Nowhere {
    fn msi(&mut self, _: u64, _: u32) {}
    fn event(&mut self, _: Event) {}
}

/// Waits, at most 10 s, for `fd` to become readable.
fn wait_readable(fd: RawFd) {
    let mut wanted = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd.
    assert_eq!(unsafe { libc::poll(&mut wanted, 1, 10_000) }, 1);
}

/// A vCPU's thread needs some time from the end of the protection to its store. An owner that
/// protects the page again in that time blocks it again: a guest whose sidecore slept at its first
/// idle sweep succeeded at every 90th attempt.
#[test]
fn after_a_fault_the_owner_asks_not_to_sleep_until_the_store_has_come() {
    let page = RegisterPage::new().unwrap();
    let mapping = Arc::new(SlotMapping::of_page(page.memfd()).unwrap());
    let iqt = (mapping.hva().raw() + u64::from(IQT)) as *mut u32;
    let ram = GuestRam::new(&[(Gpa::new(0), 4096)]).unwrap();
    let mut port = VtdPort::shared(Unit::new(Config::default()), page.clone(), mapping);
    let Some(fd) = port.wake_fd() else {
        eprintln!("skipped: no userfaultfd here");
        return;
    };
    port.arm().unwrap();
    let address = iqt.addr();
    let vcpu = std::thread::spawn(move || {
        let iqt = std::ptr::with_exposed_provenance_mut::<u32>(address);
        // SAFETY: an aligned word of the mapping, which `port` keeps; other accesses of it are
        // atomic or the kernel's.
        unsafe { std::ptr::write_volatile(iqt, 32) };
    });
    wait_readable(fd);
    assert_eq!(page.load32(IQT), 0, "the store waits");
    port.disarm().unwrap();
    assert_eq!(port.gate_faults(), 1);
    assert_eq!(port.deadline(), Some(0), "a store is due");
    vcpu.join().unwrap();
    assert_eq!(page.load32(IQT), 32);
    port.poll_unit(&ram, 1, &mut Nowhere);
    assert_eq!(port.deadline(), None, "the store has been taken");
}

#[test]
fn a_store_that_never_comes_is_not_waited_for_for_ever() {
    let mut due = Some(Due {
        stores: 1,
        writes: 0,
        until: None,
    });
    let unit = Unit::new(Config::default());
    await_stores(&mut due, &unit, 5);
    await_stores(&mut due, &unit, 5 + DUE_LIMIT - 1);
    assert!(due.is_some());
    await_stores(&mut due, &unit, 5 + DUE_LIMIT);
    assert!(due.is_none());
}

/// Without userfaultfd nothing wakes a sleeping owner, so it may not sleep, and `keeps_awake`
/// returns the reason.
#[test]
fn an_owner_that_may_never_sleep_knows_why() {
    let page = RegisterPage::new().unwrap();
    let mapping = Arc::new(SlotMapping::of_page(page.memfd()).unwrap());
    let mut port = VtdPort::shared(Unit::new(Config::default()), page, mapping);
    let is_watched = port.wake_fd().is_some();
    assert_eq!(port.keeps_awake().is_none(), is_watched);
    if let Front::Shared { gate, .. } = &mut port.front {
        *gate = Gate::Absent("no permission".into());
    }
    assert_eq!(port.keeps_awake(), Some("no permission"));
    assert_eq!(port.arm().unwrap_err().to_string(), "no permission");
    let trap = VtdPort::trap(Unit::new(Config::default()));
    assert_eq!(trap.keeps_awake(), None);
}
