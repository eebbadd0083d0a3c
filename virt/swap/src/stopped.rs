//! A vCPU that has left the guest and says where it stands, and what it is told.
//!
//! It waits for that only so long, and goes on by itself then. From that moment what it said is no
//! longer so, and nothing may be done because of it: whoever is first, the pager to act on it or
//! the vCPU to go on, has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::overwrite::Registers;

/// A vCPU that stands there, for the pager.
#[derive(Debug)]
pub struct Stopped {
    registers: Registers,
    is_taken: Arc<AtomicBool>,
    answer: Sender<Option<Registers>>,
}

/// The same, for the vCPU.
#[derive(Debug)]
pub struct Answer {
    is_taken: Arc<AtomicBool>,
    answer: Receiver<Option<Registers>>,
}

impl Stopped {
    /// A vCPU with these registers.
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

    /// Where it stands, if it does still; then it does until it is [answered](Self::answer), or
    /// this is dropped.
    pub(crate) fn take(&self) -> Option<Registers> {
        take(&self.is_taken).then_some(self.registers)
    }

    /// Has it go on with these registers, or as it was.
    pub(crate) fn answer(self, registers: Option<Registers>) {
        // One that has not waited stands where it stood, and does the same itself.
        let _ = self.answer.send(registers);
    }
}

impl Answer {
    /// Waits so long for the pager to act, and then until it has: the registers that the vCPU is to
    /// go on with, if they are others.
    pub fn wait(self, patience: Duration) -> Option<Registers> {
        match self.answer.recv_timeout(patience) {
            Ok(registers) => registers,
            Err(_) if take(&self.is_taken) => None,
            // The pager waits for nobody; one that has ended is an error.
            Err(_) => self.answer.recv().ok().flatten(),
        }
    }
}

/// Whether it had not been taken.
fn take(is_taken: &AtomicBool) -> bool {
    // Relaxed: of the two swaps one is first, and it decides nothing else; what is told comes by
    // the channel.
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
    fn what_a_vcpu_said_that_has_gone_on_is_nobodys_to_act_on() {
        let (stopped, answer) = Stopped::new(REGISTERS);
        assert_eq!(answer.wait(NOT_LONG), None);
        assert_eq!(stopped.take(), None);
    }

    #[test]
    fn a_vcpu_waits_for_what_is_done_because_of_it() {
        let (stopped, answer) = Stopped::new(REGISTERS);
        assert_eq!(stopped.take(), Some(REGISTERS));
        let vcpu = thread::spawn(move || answer.wait(NOT_LONG));
        thread::sleep(20 * NOT_LONG);
        assert!(!vcpu.is_finished());
        stopped.answer(Some(REGISTERS));
        assert_eq!(vcpu.join().expect("no panic"), Some(REGISTERS));
    }

    #[test]
    fn one_that_nobody_answers_any_more_goes_on() {
        let (stopped, answer) = Stopped::new(REGISTERS);
        assert_eq!(stopped.take(), Some(REGISTERS));
        drop(stopped);
        assert_eq!(answer.wait(LONG), None);
    }
}
