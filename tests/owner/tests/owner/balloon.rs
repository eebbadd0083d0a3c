//! A balloon as a function behind the emulated unit: page numbers, its target, and a reset while
//! pages are being dropped.

use std::sync::{Arc, Mutex};

use guest_mem::{Gpa, GuestRam, Ticket};
use machine::FunctionLines;
use vio::balloon::{Balloon, BalloonConfig, BalloonIo, PageRange};
use virtio_pci::VirtioFunction;
use virtio_pci::function::{COMMON, DEVICE};
use vtd_port::VtdPort;

use super::support::*;

const TICKET: Ticket = Ticket(77);

#[derive(Debug, Default)]
struct Record {
    inflated: Vec<PageRange>,
    resets: u32,
    /// The next pages are being dropped until the ticket is done.
    waits: bool,
}

/// Recorder of the calls of a balloon.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Record>>);

impl BalloonIo for Recorder {
    fn inflated(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        let mut record = self.0.lock().unwrap();
        if std::mem::take(&mut record.waits) {
            return Err(TICKET);
        }
        record.inflated.extend(pages);
        Ok(())
    }

    fn deflated(&mut self, _: &[PageRange]) {}

    fn reported(&mut self, _: &[PageRange]) -> Result<(), Ticket> {
        Ok(())
    }

    fn reset(&mut self) {
        self.0.lock().unwrap().resets += 1;
    }
}

/// A guest whose driver has started the balloon's first queue, through the unit's translation.
fn guest() -> (Guest<ByHand>, Recorder) {
    let recorder = Recorder::default();
    let config = BalloonConfig {
        queue_size: QUEUE_SIZE,
        ..BalloonConfig::default()
    };
    let regions = [(Gpa::new(0), RAM)];
    let mut device = Balloon::new(config, &regions, Box::new(recorder.clone())).unwrap();
    // What these guests know their device by.
    device.set_target(SECTORS as u32);
    let ram = GuestRam::new(&regions).unwrap();
    let messages = Messages::default();
    let owner = owner_of(
        ("balloon".into(), &ram, &messages),
        Units::Vtd(VtdPort::trap(vtd::Unit::new(vtd::Config::default()))),
        Functions::Balloon(VirtioFunction::new(DISK, device)),
        FunctionLines::default(),
    );
    let parts = Parts {
        ram,
        registers: Registers::Trap,
        messages,
    };
    let mut guest = Guest::new(ByHand::new(owner), parts);
    guest.boot();
    guest.start_driver();
    (guest, recorder)
}

impl Guest<ByHand> {
    /// Puts page `number` into the balloon.
    fn inflate(&mut self, number: u32) {
        self.put(DATA, &number.to_le_bytes());
        self.driver.add(&[(DATA + IOVA, 4)], &[]);
        self.ring_doorbell();
    }
}

fn ask<R: Send + 'static>(
    guest: &mut Guest<ByHand>,
    question: impl FnOnce(&mut Balloon) -> R + Send + 'static,
) -> R {
    guest.bus.ask(|reply| {
        Request::ask(reply, |owner| match owner.function(0) {
            Some(Functions::Balloon(function)) => question(function.device_mut()),
            _ => panic!("the balloon is function 0"),
        })
    })
}

#[test]
fn a_driver_inflates_and_is_notified_of_new_targets() {
    let (mut guest, recorder) = guest();
    assert_eq!(guest.config_read(0, 4), 0x1045_1af4);
    assert_eq!(guest.bar_read(COMMON + 0x12, 2), 4, "queues");
    guest.inflate(0x123);
    guest.wait_used();
    let inflated = recorder.0.lock().unwrap().inflated.clone();
    let page = PageRange {
        gpa: Gpa::new(0x12_3000),
        pages: 1,
    };
    assert_eq!(inflated, [page], "not what the unit would make of it");
    guest.bar_write(DEVICE + 4, &1_u32.to_le_bytes());
    assert_eq!(ask(&mut guest, |balloon| balloon.actual()), 1);

    let generation = guest.bar_read(COMMON + 0x15, 1);
    guest.settle();
    guest.messages.take();
    ask(&mut guest, |balloon| balloon.set_target(7));
    guest.settle();
    assert_eq!(guest.messages.take(), [message(0)]);
    assert_eq!(guest.bar_read(DEVICE, 8), 7 | 1 << 32);
    assert_ne!(guest.bar_read(COMMON + 0x15, 1), generation);
}

#[test]
fn a_reset_waits_until_pages_are_dropped() {
    let (mut guest, recorder) = guest();
    let resets = recorder.0.lock().unwrap().resets;
    recorder.0.lock().unwrap().waits = true;
    guest.inflate(0x123);
    guest.settle();
    guest.set_status(0);
    guest.settle();
    assert_ne!(guest.status(), 0, "the guest could use the page again");
    assert_eq!(recorder.0.lock().unwrap().resets, resets);
    guest.bus.message(Request::TicketDone(TICKET, Ok(())));
    guest.until("reset", |guest| guest.status() == 0);
    assert_eq!(recorder.0.lock().unwrap().resets, resets + 1);
    assert_eq!(guest.driver.used(), None);
    guest.restart_driver();
    guest.inflate(0x124);
    guest.wait_used();
    assert_eq!(recorder.0.lock().unwrap().inflated.len(), 1);
}
