//! State of a stopped vCPU, for the swapper's Preventer: read on the vCPU's own thread, outside the
//! guest.

use std::time::Duration;

use kvm_bindings::KVM_MP_STATE_RUNNABLE;
use kvm_ioctls::VcpuFd;
use sidecore::Handle;
use swap::overwrite::Registers;
use swap::pager::Message;
use swap::stopped::Stopped;

/// Time that a vCPU waits for the pager to act. After that, the vCPU executes its instruction
/// itself.
const PATIENCE: Duration = Duration::from_millis(100);

/// Sends the pager the registers of `vcpu`, and has the vCPU go on where the pager says.
pub fn tell(vcpu: &VcpuFd, is_complete: bool, pager: &Handle<Message>) {
    let Some(registers) = registers(vcpu, is_complete) else {
        return;
    };
    let (stopped, answer) = Stopped::new(registers);
    if pager.send(Message::Stopped(stopped)).is_err() {
        return;
    }
    if let Some(after) = answer.wait(PATIENCE) {
        go_on(vcpu, &after);
    }
}

fn registers(vcpu: &VcpuFd, is_complete: bool) -> Option<Registers> {
    // Without all of this state the pager decides nothing, and the vCPU goes on.
    let general = vcpu.get_regs().ok()?;
    let special = vcpu.get_sregs().ok()?;
    let events = vcpu.get_vcpu_events().ok()?;
    let debug = vcpu.get_debug_regs().ok()?;
    let state = vcpu.get_mp_state().ok()?;
    let is_quiet = events.exception.injected == 0
        && events.exception.pending == 0
        && events.interrupt.injected == 0
        && events.interrupt.shadow == 0
        && events.nmi.injected == 0
        && events.triple_fault.pending == 0
        && events.smi.smm == 0;
    Some(Registers {
        rip: general.rip,
        rax: general.rax,
        rcx: general.rcx,
        rsi: general.rsi,
        rdi: general.rdi,
        rflags: general.rflags,
        cr0: special.cr0,
        cr3: special.cr3,
        cr4: special.cr4,
        efer: special.efer,
        dr7: debug.dr7,
        pkru: None,
        cpl: special.ss.dpl,
        cs_l: special.cs.l != 0,
        cs_d: special.cs.db != 0,
        is_at_instruction: is_complete && is_quiet && state.mp_state == KVM_MP_STATE_RUNNABLE,
    })
}

fn go_on(vcpu: &VcpuFd, after: &Registers) {
    let Ok(mut general) = vcpu.get_regs() else {
        return;
    };
    general.rip = after.rip;
    general.rcx = after.rcx;
    general.rsi = after.rsi;
    general.rdi = after.rdi;
    general.rflags = after.rflags;
    // If KVM refuses, the vCPU does the same itself.
    let _ = vcpu.set_regs(&general);
}
