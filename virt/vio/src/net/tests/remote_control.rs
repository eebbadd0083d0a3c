//! The control queue of a device whose other queues are served elsewhere.

use super::*;
use crate::net::control::class;
use crate::{ActivateError, Interrupt, QueueConfig, Remote, RemoteDevice};

const PAIRS: u16 = 4;
const CONTROL: Gpa = Gpa::new(0x3_0000);
const DATA: u64 = 0x20_0000;
const ANSWER: u64 = 0x3_f000;
const FEATURES: u64 = feature::VERSION_1 | net_feature::CTRL_VQ | net_feature::MQ;

/// Record of the calls of the other side.
#[derive(Default)]
struct Side {
    started: Vec<u16>,
    kicked: Vec<u16>,
    pairs: Vec<u16>,
    interrupts: Vec<u16>,
    resets: u32,
    refuses: bool,
}

#[derive(Clone, Default)]
struct Played(Arc<Mutex<Side>>);

impl RemoteDevice for Played {
    fn device_type(&self) -> u16 {
        1
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[256; 2 * PAIRS as usize + 1]
    }

    fn read_config(&self, _offset: u64, _out: &mut [u8]) {}

    fn start(&mut self, _features: u64, queues: &[QueueConfig]) -> Result<(), ActivateError> {
        let mut side = self.0.lock().unwrap();
        if side.refuses {
            return Err(ActivateError::QueueMemory { index: 0 });
        }
        side.started = queues.iter().map(|queue| queue.index).collect();
        Ok(())
    }

    fn kick(&mut self, queue: u16) {
        self.0.lock().unwrap().kicked.push(queue);
    }

    fn has_events(&self) -> bool {
        false
    }

    fn take_events(&mut self) -> bool {
        false
    }

    fn stop(&mut self) -> bool {
        true
    }

    fn resume(&mut self) {}

    fn reset(&mut self) {
        self.0.lock().unwrap().resets += 1;
    }

    fn abandon(&mut self) {}

    fn needs_reset(&self) -> bool {
        false
    }

    fn wake_fd(&self) -> RawFd {
        7
    }

    fn pairs(&self) -> u16 {
        PAIRS
    }

    fn set_pairs(&mut self, pairs: u16) {
        self.0.lock().unwrap().pairs.push(pairs);
    }

    fn interrupt(&mut self, queue: u16) {
        self.0.lock().unwrap().interrupts.push(queue);
    }

    fn doorbell(&self, queue: u16) -> Option<RawFd> {
        Some(100 + RawFd::from(queue))
    }
}

/// The owner's interrupts: none of a queue is to come this way.
#[derive(Default)]
struct OwnIrq {
    config: u32,
}

impl Interrupt for OwnIrq {
    fn queue(&mut self, index: u16) {
        panic!("queue {index} interrupts by the other side's way");
    }

    fn config(&mut self) {
        self.config += 1;
    }
}

struct World {
    mem: ArrayMem,
    side: Played,
    remote: Remote,
    control: AnyDriver<ArrayMem>,
    index: u16,
    irq: OwnIrq,
}

impl World {
    fn new(features: u64, queues: u16, index: u16) -> Self {
        let mem = ArrayMem::new(4 << 20);
        let side = Played::default();
        let mut remote = Remote::new(side.clone());
        let control = AnyDriver::new(mem.clone(), CONTROL, index, 16, features);
        let mut configs: Vec<_> = (0..queues)
            .map(|index| {
                let base = Gpa::new(0x30_0000 + u64::from(index) * 0x1_0000);
                AnyDriver::<ArrayMem>::new(mem.clone(), base, index, 16, features).config()
            })
            .collect();
        configs.push(control.config());
        remote
            .activate(features, &configs, mem.keep_alive())
            .unwrap();
        Self {
            mem,
            side,
            remote,
            control,
            index,
            irq: OwnIrq::default(),
        }
    }

    fn side(&self) -> std::sync::MutexGuard<'_, Side> {
        self.side.0.lock().unwrap()
    }

    fn command(&mut self, class: u8, command: u8, data: &[u8]) -> Option<u8> {
        let bytes = [&[class, command][..], data].concat();
        self.mem.put(Gpa::new(DATA), &bytes);
        self.mem.put(Gpa::new(ANSWER), &[0xee]);
        self.control
            .add(&[(DATA, bytes.len() as u32)], &[(ANSWER, 1)]);
        let mut dma = FlatDma::new(self.mem.clone());
        assert!(self.remote.has_work(&mut dma));
        let _ = self.remote.poll(&mut dma, &mut self.irq, 0);
        self.control.used()?;
        let mut answer = [0];
        self.mem.read(Gpa::new(ANSWER), &mut answer).unwrap();
        Some(answer[0])
    }
}

#[test]
fn the_driver_chooses_pairs_and_the_other_side_is_told_of_that_alone() {
    let mut it = World::new(FEATURES, 2 * PAIRS, 2 * PAIRS);
    assert_eq!(it.side().started, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(it.remote.wake_fds(), [7, 100 + RawFd::from(it.index)]);
    assert_eq!(it.command(class::MQ, 0, &[3, 0]), Some(0));
    assert_eq!(it.side().pairs, [3]);
    assert_eq!(it.side().interrupts, [it.index]);
    for (class, command, data) in [
        (class::MQ, 0, &[0, 0][..]),
        (class::MQ, 0, &[PAIRS as u8 + 1, 0]),
        (class::MQ, 0, &[1]),
        (class::MQ, 1, &[1, 0]),
        // Not offered.
        (class::RX, 0, &[1]),
        (class::MAC, 1, &GUEST_MAC),
        (class::GUEST_OFFLOADS, 0, &[0; 8]),
        (99, 99, &[]),
    ] {
        assert_eq!(
            it.command(class, command, data),
            Some(1),
            "{class} {command}"
        );
    }
    assert_eq!(it.side().pairs, [3]);
    it.remote.kick(it.index);
    it.remote.kick(0);
    assert_eq!(it.side().kicked, [0]);
}

#[test]
fn without_several_pairs_the_control_queue_is_the_third() {
    let mut it = World::new(feature::VERSION_1 | net_feature::CTRL_VQ, 2, 2);
    assert_eq!(it.side().started, [0, 1]);
    assert_eq!(it.command(class::MQ, 0, &[2, 0]), Some(1), "not accepted");
    assert!(it.side().pairs.is_empty());
}

#[test]
fn a_stopped_device_carries_out_nothing_and_a_reset_one_begins_anew() {
    let mut it = World::new(FEATURES, 2 * PAIRS, 2 * PAIRS);
    it.remote.set_service(Service::Stopped);
    it.control.add(&[(DATA, 4)], &[(ANSWER, 1)]);
    let mut dma = FlatDma::new(it.mem.clone());
    let _ = it.remote.poll(&mut dma, &mut it.irq, 0);
    assert_eq!(it.control.used(), None);
    it.remote.reset();
    assert_eq!(it.remote.wake_fds(), [7]);
    assert_eq!(it.side().resets, 1);
    let mut again = World::new(FEATURES, 2 * PAIRS, 2 * PAIRS);
    assert_eq!(again.command(class::MQ, 0, &[2, 0]), Some(0));
}

#[test]
fn a_broken_control_queue_breaks_the_device() {
    let mut it = World::new(FEATURES, 2 * PAIRS, 2 * PAIRS);
    it.control.add(&[(DATA, 1)], &[(ANSWER, 1)]);
    let mut dma = FlatDma::new(it.mem.clone());
    let _ = it.remote.poll(&mut dma, &mut it.irq, 0);
    let _ = it.remote.poll(&mut dma, &mut it.irq, 0);
    assert!(it.remote.needs_reset());
    assert_eq!(it.irq.config, 1);
}

#[test]
fn activation_that_the_other_side_refuses_begins_nothing() {
    let mem = ArrayMem::new(4 << 20);
    let side = Played::default();
    side.0.lock().unwrap().refuses = true;
    let mut remote = Remote::new(side.clone());
    let control = AnyDriver::<ArrayMem>::new(mem.clone(), CONTROL, 2 * PAIRS, 16, FEATURES);
    let queues = [control.config()];
    assert!(
        remote
            .activate(FEATURES, &queues, mem.keep_alive())
            .is_err()
    );
    assert_eq!(remote.wake_fds(), [7]);
    side.0.lock().unwrap().refuses = false;
    remote
        .activate(FEATURES, &queues, mem.keep_alive())
        .unwrap();
}
