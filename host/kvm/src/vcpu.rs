//! One vCPU: its thread, and the loop around `KVM_RUN`.
//!
//! Each exit to user space is answered on the vCPU's own thread, through the buses, and counted by
//! cause in that vCPU's counters. Between two entries the thread checks once (one acquire load)
//! whether it has to pause or to end.
//!
//! UNSAFETY: a pointer to the vCPU's `kvm_run` page for [`kick`](crate::kick).

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use kvm_ioctls::{VcpuExit, VcpuFd};
use platform::bus::Bus;
use platform::ioapic::Ioapic;

use crate::Vcpu;
use crate::control::{Control, End, Next};
use crate::exits::{ExitCause, ExitLedger};
use crate::kick::{RunPage, Thread};

/// Resources that every vCPU thread works with.
#[derive(Clone)]
pub struct Machine {
    /// Guest-physical addresses outside RAM.
    pub memory: Arc<Bus>,
    /// I/O ports.
    pub ports: Arc<Bus>,
    /// Receives ends of interrupt.
    pub ioapic: Arc<Ioapic>,
    /// Where exits are counted.
    pub exits: ExitLedger,
    /// Pause and end.
    pub control: Arc<Control>,
    /// Prints a line for the user, without waiting for its reader.
    pub say: fn(&str),
}

/// Starts the thread of vCPU `index`, on host CPU `cpu` if given.
pub fn spawn(
    mut vcpu: Vcpu,
    index: usize,
    cpu: Option<usize>,
    machine: Machine,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(format!("vcpu{index}"))
        .spawn(move || {
            let _panic = EndOnPanic {
                control: machine.control.clone(),
                index,
            };
            if let Some(cpu) = cpu
                && let Err(error) = sidecore::pin_this_thread(cpu)
            {
                let what = format!("vCPU {index} cannot be pinned to CPU {cpu}: {error}");
                return machine.control.end(End::Host(what));
            }
            let vcpu = vcpu.fd_mut();
            let page: *mut _ = vcpu.get_kvm_run();
            // SAFETY: `vcpu` is dropped after the guard: it is a captured variable, the guard a
            // later local.
            let _page = unsafe { RunPage::enter(page) };
            let thread = Thread::current();
            machine.control.join(thread);
            run(vcpu, index, &machine);
            if machine.control.wants_registers() {
                let text = describe(vcpu, index, "stopped at");
                (machine.say)(&format!("{text}\n"));
            }
            machine.control.leave(thread);
        })
}

/// A panic of a vCPU thread ends the machine rather than leaving it with one vCPU less.
struct EndOnPanic {
    control: Arc<Control>,
    index: usize,
}

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.leave(Thread::current());
            let what = format!("the thread of vCPU {} panicked", self.index);
            self.control.end(End::Host(what));
        }
    }
}

fn run(vcpu: &mut VcpuFd, index: usize, machine: &Machine) {
    let counters = machine.exits.of(index);
    // The last entry left nothing to be completed by the next.
    let mut is_complete = true;
    loop {
        match machine.control.next(index) {
            Next::Run => {}
            Next::Inspect(question) => {
                question(vcpu);
                continue;
            }
            Next::VcpuWork(visit) => {
                visit(vcpu, is_complete);
                continue;
            }
            Next::Stop => return,
        }
        let ran = vcpu.run();
        is_complete = ran.is_err();
        let cause = match ran {
            Ok(exit) => match answer(exit, machine) {
                Ok(cause) => cause,
                Err(trouble) => {
                    counters.count(ExitCause::Other);
                    return machine
                        .control
                        .end(End::Crash(describe(vcpu, index, &trouble)));
                }
            },
            Err(error) => match error.errno() {
                libc::EINTR => {
                    // Cleared before `next` looks: a kick that comes later sets it again.
                    vcpu.set_kvm_immediate_exit(0);
                    ExitCause::Interrupted
                }
                // A vCPU that waits for INIT or SIPI was woken by something else.
                libc::EAGAIN => ExitCause::Interrupted,
                _ => {
                    let what = format!("KVM_RUN failed: {error}");
                    return machine.control.end(End::Host(describe(vcpu, index, &what)));
                }
            },
        };
        counters.count(cause);
    }
}

/// Answers one exit; an error names a state the vCPU cannot leave.
fn answer(exit: VcpuExit<'_>, machine: &Machine) -> Result<ExitCause, String> {
    Ok(match exit {
        VcpuExit::MmioRead(address, data) => {
            ExitCause::of_memory(machine.memory.read(address, data))
        }
        VcpuExit::MmioWrite(address, data) => {
            ExitCause::of_memory(machine.memory.write(address, data))
        }
        VcpuExit::IoIn(port, data) => ExitCause::of_port(machine.ports.read_port(port, data)),
        VcpuExit::IoOut(port, data) => ExitCause::of_port(machine.ports.write_port(port, data)),
        VcpuExit::IoapicEoi(vector) => {
            machine.ioapic.end_of_interrupt(vector);
            ExitCause::IoapicEoi
        }
        VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::Hlt => ExitCause::Interrupted,
        // On AMD, KVM has reset the vCPU by now.
        VcpuExit::Shutdown => {
            return Err("triple fault (on AMD the registers are those after a reset)".into());
        }
        VcpuExit::SystemEvent(kind, _) => return Err(format!("system event {kind}")),
        VcpuExit::FailEntry(reason, cpu) => {
            return Err(format!(
                "the processor refused to enter the guest ({reason:#x}, CPU {cpu})"
            ));
        }
        VcpuExit::InternalError => return Err("KVM gave up (KVM_EXIT_INTERNAL_ERROR)".into()),
        other => return Err(format!("unexpected exit {other:?}")),
    })
}

/// Describes the error and the registers, for the one message that a user gets.
fn describe(vcpu: &mut VcpuFd, index: usize, trouble: &str) -> String {
    let mut text = format!("vCPU {index}: {trouble}");
    if trouble.contains("INTERNAL_ERROR") {
        // SAFETY: the exit reason says that the kernel filled this member of the union.
        let internal = unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal };
        let data = &internal.data[..(internal.ndata as usize).min(internal.data.len())];
        let _ = write!(text, "\n  suberror {} data {data:x?}", internal.suberror);
    }
    if let (Ok(r), Ok(s)) = (vcpu.get_regs(), vcpu.get_sregs()) {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n  rip {:016x} rsp {:016x} rflags {:08x}\
             \n  rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}\
             \n  rsi {:016x} rdi {:016x} rbp {:016x} r8  {:016x}\
             \n  cs {:04x} cr0 {:08x} cr2 {:016x} cr3 {:016x} cr4 {:08x} efer {:x}",
            r.rip,
            r.rsp,
            r.rflags,
            r.rax,
            r.rbx,
            r.rcx,
            r.rdx,
            r.rsi,
            r.rdi,
            r.rbp,
            r.r8,
            s.cs.selector,
            s.cr0,
            s.cr2,
            s.cr3,
            s.cr4,
            s.efer,
        );
    }
    text
}
