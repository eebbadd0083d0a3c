//! A device that is served elsewhere: its interrupts follow the MSI-X table, its stops are bounded.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use guest_mem::{Gpa, GuestRam};
use vio::{ActivateError, QueueConfig, Remote, RemoteDevice, feature};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use guest_mem::NoIommu;
use machine::FunctionLines;
use platform::interrupt::{InterruptLines, Message};
use virtio_pci::VirtioFunction;
use virtio_pci::common::status::NEEDS_RESET;
use virtio_pci::function::{MSIX_PENDING, MSIX_TABLE};

use super::support::*;

/// Calls that the other side has received, and its answers.
#[derive(Default)]
struct Side {
    starts: u32,
    kicks: u32,
    is_stopping: bool,
    may_stop: bool,
    resumes: u32,
    resets: u32,
    has_events: bool,
    is_broken: bool,
    is_given_up: bool,
    /// Message of queue 0.
    message: Option<Message>,
    connects: u32,
    is_pending: bool,
    forgets: u32,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Side>>);

impl Shared {
    fn side(&self) -> MutexGuard<'_, Side> {
        self.0.lock().unwrap()
    }
}

struct Played {
    shared: Shared,
    events: EventFd,
}

impl RemoteDevice for Played {
    fn device_type(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        feature::VERSION_1
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        if offset == 0 {
            out[..8].copy_from_slice(&SECTORS.to_le_bytes());
        }
    }

    fn start(&mut self, _features: u64, queues: &[QueueConfig]) -> Result<(), ActivateError> {
        assert_eq!(queues.len(), 1);
        self.shared.side().starts += 1;
        Ok(())
    }

    fn kick(&mut self, _queue: u16) {
        self.shared.side().kicks += 1;
    }

    fn has_events(&self) -> bool {
        self.shared.side().has_events
    }

    fn take_events(&mut self) -> bool {
        let mut side = self.shared.side();
        side.has_events = false;
        side.is_broken
    }

    fn stop(&mut self) -> bool {
        let mut side = self.shared.side();
        side.is_stopping = true;
        side.may_stop || side.is_given_up
    }

    fn resume(&mut self) {
        let mut side = self.shared.side();
        side.is_stopping = false;
        side.resumes += 1;
    }

    fn reset(&mut self) {
        let mut side = self.shared.side();
        assert!(side.is_stopping, "a reset follows a stop");
        (side.is_stopping, side.is_broken, side.is_given_up) = (false, false, false);
        side.resets += 1;
    }

    fn abandon(&mut self) {
        self.shared.side().is_given_up = true;
    }

    fn needs_reset(&self) -> bool {
        let side = self.shared.side();
        side.is_broken || side.is_given_up
    }

    fn wake_fd(&self) -> RawFd {
        self.events.as_raw_fd()
    }
}

impl InterruptLines for Shared {
    fn connect(&mut self, lines: &[(u16, Option<Message>)]) {
        let [(0, message)] = *lines else {
            panic!("it has one line: {lines:?}");
        };
        let mut side = self.side();
        side.message = message;
        side.connects += 1;
    }

    fn is_pending(&self, _queue: u16) -> bool {
        self.side().is_pending
    }

    fn forget(&mut self, _queue: u16) {
        let mut side = self.side();
        side.is_pending = false;
        side.forgets += 1;
    }
}

/// A guest whose driver has started the device.
fn guest(limit: Duration) -> (Guest<ByHand>, Shared) {
    let shared = Shared::default();
    let device = Remote::new(Played {
        shared: shared.clone(),
        events: EventFd::new(EFD_NONBLOCK).unwrap(),
    });
    let ram = GuestRam::new(&[(Gpa::new(0), RAM)]).unwrap();
    let messages = Messages::default();
    let function = VirtioFunction::new(DISK, device).with_lines(Box::new(shared.clone()));
    let owner = owner_of(
        ("remote".into(), &ram, &messages),
        Units::None(NoIommu::new(16)),
        Functions::Remote(function),
        FunctionLines::default(),
    )
    .with_drain_limit(limit);
    let parts = Parts {
        ram,
        registers: Registers::Trap,
        messages,
    };
    let mut guest = Guest::new(ByHand::new(owner), parts);
    guest.start_driver();
    (guest, shared)
}

fn route((address, data): (u64, u32)) -> Message {
    Message { address, data }
}

const VECTOR_CONTROL: u64 = MSIX_TABLE + 16 + 12;

#[test]
fn a_started_queues_calls_are_its_vectors_message() {
    let (mut guest, shared) = guest(NO_LIMIT);
    assert_eq!(shared.side().starts, 1);
    assert_eq!(shared.side().message, Some(route(message(1))));
    // Moved by the driver, one word at a time: the route follows each.
    let moved = (0xfee0_5000_u64, 0x77_u32);
    guest.bar_write(MSIX_TABLE + 16, &moved.0.to_le_bytes());
    guest.bar_write(MSIX_TABLE + 24, &moved.1.to_le_bytes());
    assert_eq!(shared.side().message, Some(route(moved)));
    let connects = shared.side().connects;
    guest.bar_write(MSIX_TABLE + 24, &moved.1.to_le_bytes());
    guest.settle();
    assert_eq!(shared.side().connects, connects, "nothing has changed");
}

#[test]
fn calls_are_held_back_and_shown_as_pending_while_the_vector_is_masked() {
    let (mut guest, shared) = guest(NO_LIMIT);
    let control = guest.msix_control();
    shared.side().may_stop = true;
    type Mask = fn(&mut Guest<ByHand>, u16, bool);
    let masks: [Mask; 4] = [
        |guest, _, on| guest.bar_write(VECTOR_CONTROL, &u32::from(on).to_le_bytes()),
        |guest, control, on| guest.config_write(control, 2, if on { 0xc000 } else { 0x8000 }),
        |guest, control, on| guest.config_write(control, 2, if on { 0 } else { 0x8000 }),
        |guest, _, on| {
            let command = if on { 2 } else { 6 };
            let answer = guest.bus.ask_later(set_command(command));
            guest.settle();
            answer.try_take().expect("the device stops at once");
        },
    ];
    for (at, mask) in masks.into_iter().enumerate() {
        mask(&mut guest, control, true);
        assert_eq!(shared.side().message, None, "mask {at}");
        shared.side().is_pending = true;
        assert_eq!(guest.bar_read(MSIX_PENDING, 8), 0b10, "mask {at}");
        shared.side().is_pending = false;
        assert_eq!(guest.bar_read(MSIX_PENDING, 8), 0, "mask {at}");
        mask(&mut guest, control, false);
        assert_eq!(shared.side().message, Some(route(message(1))), "mask {at}");
    }
    assert_eq!(shared.side().resumes, 1, "after Bus Master was off");
}

#[test]
fn a_reset_stops_disconnects_and_forgets() {
    let (mut guest, shared) = guest(NO_LIMIT);
    guest.set_status(0);
    guest.settle();
    assert_ne!(guest.status(), 0, "the other side has not stopped");
    assert!(shared.side().is_stopping);
    shared.side().may_stop = true;
    guest.until("reset", |guest| guest.status() == 0);
    let side = shared.side();
    assert_eq!((side.resets, side.forgets, side.message), (1, 1, None));
}

#[test]
fn a_reset_waits_for_the_other_side_past_the_drain_limit() {
    let (mut guest, shared) = guest(LIMIT);
    guest.set_status(0);
    guest.settle();
    guest.bus.skew += 2 * u64::try_from(LIMIT.as_nanos()).unwrap();
    guest.settle();
    assert_ne!(guest.status(), 0, "the other side may still write memory");
    assert!(!shared.side().is_given_up);
    shared.side().may_stop = true;
    guest.until("reset", |guest| guest.status() == 0);
    assert_eq!(shared.side().resets, 1);
    // And it may be started again.
    guest.negotiate();
    assert_eq!(shared.side().starts, 2);
    assert_eq!(guest.status() & NEEDS_RESET, 0);
}

#[test]
fn a_device_that_breaks_tells_the_driver_once() {
    let (mut guest, shared) = guest(NO_LIMIT);
    guest.messages.take();
    (shared.side().is_broken, shared.side().has_events) = (true, true);
    guest.settle();
    assert_eq!(guest.messages.take(), [message(0)]);
    assert_ne!(guest.status() & NEEDS_RESET, 0);
    shared.side().may_stop = true;
    guest.negotiate();
    assert_eq!(guest.status() & NEEDS_RESET, 0);
}

#[test]
fn a_doorbell_that_exits_is_passed_on() {
    let (mut guest, shared) = guest(NO_LIMIT);
    let before = shared.side().kicks;
    guest.ring_doorbell();
    assert_eq!(shared.side().kicks, before + 1);
}
