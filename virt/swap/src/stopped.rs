//! A stopped vCPU's registers for the pager, and the pager's answer.
//!
//! The vCPU waits for the answer only for a limited time, and then continues by itself. From that
//! moment its registers are stale, and must not be acted on. An atomic flag decides between the
//! pager, which acts on them, and the vCPU, which continues: the first one to set it wins.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::overwrite::Registers;

/// Registers of a stopped vCPU, for the pager.
#[derive(Debug)]
pub struct Stopped {
    registers: Registers,
    is_taken: Arc<AtomicBool>,
    answer: Sender<Option<Registers>>,
}

/// The vCPU's side of a [`Stopped`].
#[derive(Debug)]
pub struct Answer {
    is_taken: Arc<AtomicBool>,
    answer: Receiver<Option<Registers>>,
}

impl Stopped {
    /// Creates both sides for a vCPU with these registers.
    pub fn new(registers: Registers) -> (Self, Answer) {
        let (tell, answer) = channel();
        let is_taken = Arc::<AtomicBool>::default();
        let stopped = Self {
            registers,
            is_taken: is_taken.clone(),
            answer: tell,
        };
        (stopped, Answer { is_taken, answer })
    }

    /// Returns the registers, if the vCPU has not continued. It then waits until it is
    /// [answered](Self::answer), or this is dropped.
    pub(crate) fn take(&self) -> Option<Registers> {
        take(&self.is_taken).then_some(self.registers)
    }

    /// Makes the vCPU continue with these registers, or with its own.
    pub(crate) fn answer(self, registers: Option<Registers>) {
        // A vCPU that has continued executes the instruction itself.
        let _ = self.answer.send(registers);
    }
}

impl Answer {
    /// Waits up to `patience` for the pager to act, and if it acts, until it has finished. Returns
    /// the registers to continue with, if they are others.
    pub fn wait(self, patience: Duration) -> Option<Registers> {
        match self.answer.recv_timeout(patience) {
            Ok(registers) => registers,
            Err(_) if take(&self.is_taken) => None,
            // The pager never waits, so an answer comes; an error means that the pager has ended.
            Err(_) => self.answer.recv().ok().flatten(),
        }
    }
}

/// Sets the flag; returns whether it was clear.
fn take(is_taken: &AtomicBool) -> bool {
    // Relaxed: the two swaps only decide which side is first; the answer comes by the channel.
    !is_taken.swap(true, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const REGISTERS: Registers = Registers {
        rip: 0x1000,
        rax: 0,
        rcx: 0,
        rsi: 0,
        rdi: 0,
        rflags: 2,
        cr0: 0,
        cr3: 0,
        cr4: 0,
        efer: 0,
        dr7: 0,
        pkru: None,
        cpl: 0,
        cs_l: true,
        cs_d: false,
        is_at_instruction: true,
    };
    const NOT_LONG: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn stale_registers_are_ignored_after_the_vcpu_has_resumed() {
        let (stopped, answer) = Stopped::new(REGISTERS);
        assert_eq!(answer.wait(NOT_LONG), None);
        assert_eq!(stopped.take(), None);
    }

    #[test]
    fn vcpu_waits_until_the_pager_has_finished_acting_on_its_registers() {
        let (stopped, answer) = Stopped::new(REGISTERS);
        assert_eq!(stopped.take(), Some(REGISTERS));
        let vcpu = thread::spawn(move || answer.wait(NOT_LONG));
        thread::sleep(20 * NOT_LONG);
        assert!(!vcpu.is_finished());
        stopped.answer(Some(REGISTERS));
        assert_eq!(vcpu.join().expect("no panic"), Some(REGISTERS));
    }

    #[test]
    fn vcpu_resumes_when_the_pager_drops_its_registers() {
        let (stopped, answer) = Stopped::new(REGISTERS);
        assert_eq!(stopped.take(), Some(REGISTERS));
        drop(stopped);
        assert_eq!(answer.wait(LONG), None);
    }
}
