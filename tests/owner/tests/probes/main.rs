//! Four systems that the machine library does not know, plugged into it from outside, and
//! evictions: all that they need is here, and nothing of it in the library.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod evict;
mod passthrough;
mod remapping;
mod subscriber;
mod viommu;

use std::sync::{Arc, Mutex};

use guest_mem::{Gpa, GuestRam, PhysMem, SourceId};
use machine::{CommandId, CommandResult, Op, Owner, Request, ResolveFunction, ResolveUnit, Target};
use pci::config::Identity;
use platform::interrupt::{InterruptPin, InterruptSink, Message};
use sidecore::{Nanos, PollContext, Poller, Reply, Wakes};

/// A function without configuration space whose BAR has one register.
trait Plain {
    /// The register is written.
    fn write(&mut self, value: u64);
    /// A command is over.
    fn answer(&mut self, _: CommandId, _: CommandResult) {}
    /// The message of its one interrupt line.
    fn connected(&mut self, _: Option<Message>) {}
}

/// Makes a [`Plain`] one a function.
macro_rules! plain {
    ($name:ty, $command:ty, $slot:expr) => {
        impl machine::Function<$command> for $name {
            fn source(&self) -> SourceId {
                SourceId::new(0, $slot, 0)
            }

            fn shape(&self) -> machine::FunctionShape {
                machine::FunctionShape {
                    bars: Default::default(),
                    doorbells: Some((0, 0..8)),
                    hears_invalidations: false,
                    is_iommu: false,
                }
            }

            fn config_read(&mut self, _: u16, _: u8) -> u32 {
                u32::MAX
            }

            fn config_write(
                &mut self,
                _: u16,
                _: u8,
                _: u32,
                _: &guest_mem::KeepAlive,
                _: &mut machine::Effects<$command>,
            ) {
            }

            fn bar_read(&mut self, _: u8, _: u64, _: &mut [u8]) {}

            fn bar_write(
                &mut self,
                _: u8,
                _: u64,
                data: &[u8],
                _: &guest_mem::KeepAlive,
                _: &mut machine::Effects<$command>,
            ) {
                $crate::Plain::write(self, u64::from_le_bytes(data.try_into().unwrap()));
            }

            fn command_done(
                &mut self,
                id: machine::CommandId,
                result: machine::CommandResult,
                _: &mut machine::Effects<$command>,
            ) {
                $crate::Plain::answer(self, id, result);
            }

            fn connect(&mut self, lines: &[(u16, Option<platform::interrupt::Message>)]) {
                let [(0, message)] = *lines else {
                    panic!("it has one line: {lines:?}");
                };
                $crate::Plain::connected(self, message);
            }
        }
    };
}
use plain;

/// Interrupts that would have reached a local APIC, with their requesters.
#[derive(Default)]
struct Sent(Mutex<Vec<(SourceId, Message)>>);

impl InterruptSink for Sent {
    fn send(&self, from: SourceId, message: Message) {
        self.0.lock().unwrap().push((from, message));
    }
}

impl Sent {
    fn take(&self) -> Vec<(SourceId, Message)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// The level of the pin, as its interrupt controller sees it.
#[derive(Clone, Default)]
struct Pin(Arc<Mutex<bool>>);

impl InterruptPin for Pin {
    fn set(&mut self, level: bool) {
        *self.0.lock().unwrap() = level;
    }
}

/// A storage controller's.
const IDENTITY: Identity = Identity {
    vendor: 0x1234,
    device: 0x5678,
    class: 0x01_08_02,
    revision: 0,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// 1 MiB.
fn ram() -> GuestRam {
    GuestRam::new(&[(Gpa::new(0), 1 << 20)]).unwrap()
}

/// An owner called by hand.
struct ByHand<U: ResolveUnit, F, M = GuestRam> {
    owner: Owner<U, F, M>,
    ram: M,
    sent: Arc<Sent>,
    now: u64,
}

impl<U: ResolveUnit, F: ResolveFunction<U::Command>> ByHand<U, F> {
    fn new() -> Self {
        Self::over(ram())
    }
}

impl<U, F, M> ByHand<U, F, M>
where
    U: ResolveUnit,
    F: ResolveFunction<U::Command>,
    M: PhysMem + Clone,
{
    fn over(ram: M) -> Self {
        let sent = Arc::<Sent>::default();
        Self {
            owner: Owner::new("probe", ram.clone(), sent.clone()),
            ram,
            sent,
            now: 1,
        }
    }
}

impl<U, F, M> ByHand<U, F, M>
where
    U: ResolveUnit + 'static,
    U::Command: Send,
    F: ResolveFunction<U::Command> + 'static,
    M: PhysMem + Send + 'static,
{
    fn poll(&mut self) {
        let mut wakes = Wakes::by_hand();
        let _ = self
            .owner
            .poll(&mut PollContext::new(Nanos(self.now), 1600, &mut wakes));
    }

    fn message(&mut self, request: Request<Owner<U, F, M>>) {
        let mut wakes = Wakes::by_hand();
        let mut turn = PollContext::new(Nanos(self.now), 1600, &mut wakes);
        self.owner.message(request, &mut turn);
    }

    /// A vCPU's access, whose answer may have to wait.
    fn access(&mut self, target: Target, op: Op) -> Option<u64> {
        let (reply, answer) = Reply::pair();
        self.message(Request::Access { target, op, reply });
        answer.try_take()
    }

    fn write(&mut self, target: Target, bar: u8, offset: u64, value: u64) {
        let len = 8;
        let op = Op::Write {
            bar,
            offset,
            len,
            value,
        };
        self.access(target, op).unwrap();
    }

    fn config_write(&mut self, function: usize, reg: u16, len: u8, value: u32) {
        let op = Op::ConfigWrite { reg, len, value };
        self.access(Target::Function(function), op).unwrap();
    }

    fn put(&self, gpa: u64, words: &[u64]) {
        for (at, word) in (0..).zip(words) {
            self.ram
                .write(Gpa::new(gpa + 8 * at), &word.to_le_bytes())
                .unwrap();
        }
    }

    fn get(&self, gpa: u64) -> u64 {
        self.ram.read_u64(Gpa::new(gpa)).unwrap()
    }
}
