//! The guest's handlers of interrupts and exceptions: they count them, and end those that want it.
//!
//! An exception that no attack expects is printed, and is the end.

use core::arch::{asm, global_asm};
use core::ffi::c_void;
use core::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};

use bare::{apic, processor::cpuid};

use crate::{end, print, time};

global_asm!(bare::stubs!(), include_str!("stubs.s"), options(att_syntax));

/// The vectors that the hypervisor delivers directly, low to high.
pub const LOW: u8 = 0x31;
/// The one that most attacks use.
pub const OWN: u8 = 0x41;
/// The highest of them.
pub const HIGH: u8 = 0x61;
/// The host's tick, unless the host has moved it.
pub const HOST: u8 = 0xf1;
/// Another vector of the host's class, higher than its tick.
pub const STRANGE: u8 = 0xf8;
/// The vector of the local APIC's spurious interrupts, which are not in service.
const SPURIOUS: u8 = 0xff;

const NMI: u8 = 2;
const NOT_PRESENT: u8 = 11;
const PROTECTION: u8 = 13;
/// The first vector that is not an exception's.
const EXCEPTIONS: u8 = 32;
/// The first vector of the host's class.
const HOST_CLASS: u8 = 0xf0;
/// Most faults of one interrupt: more are a loop.
const FAULTS_MAX: u32 = 1000;

static COUNTS: [AtomicU32; 256] = [const { AtomicU32::new(0) }; 256];
static STOLEN: AtomicU32 = AtomicU32::new(0);
static FAULT_CODE: AtomicU32 = AtomicU32::new(0);
static ORDER: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];
static ORDER_LEN: AtomicUsize = AtomicUsize::new(0);

/// Vectors whose handlers leave them in service.
static KEPT: [AtomicBool; 256] = [const { AtomicBool::new(false) }; 256];
/// Milliseconds that the handler of [`OWN`] takes, with interrupts on.
pub static HANDLER_MS: AtomicU32 = AtomicU32::new(0);
/// Whether the handler of [`OWN`] sends [`LOW`] and [`HIGH`], with interrupts on.
pub static IS_NESTING: AtomicBool = AtomicBool::new(false);
/// Whether an exception for a gate that is not present is expected.
pub static IS_FAULT_EXPECTED: AtomicBool = AtomicBool::new(false);

/// Stack of a handler, as stubs.s and the processor leave it.
#[repr(C)]
struct Frame {
    registers: [u64; 10],
    number: u64,
    code: u64,
    rip: u64,
    _code_segment: u64,
    _flags: u64,
    rsp: u64,
}

impl Frame {
    /// Offset at which stubs.s keeps rax.
    const RAX: usize = 9;
}

unsafe extern "C" {
    fn attacks_wrmsr(register: u32, value: u64) -> u32;
    fn attacks_attempt(code: extern "C" fn(*mut c_void), argument: *mut c_void) -> u32;
    static attacks_attempt_ended: u8;
    static attacks_attempt_stack: AtomicU64;
    static attacks_wrmsr_here: u8;
    static attacks_wrmsr_refused: u8;
    // Of modes.s: a change of mode that is refused.
    static attacks_modes_here: u8;
    static attacks_modes_refused: u8;
}

/// Masks the 8259s, turns the local APIC on, in x2APIC mode. Returns whether there is one.
///
/// # Safety
/// Once, with interrupts off and the tables loaded.
pub unsafe fn init() -> bool {
    // SAFETY: the caller's.
    unsafe { bare::pic::quiet(0x30) }
    if cpuid(1, 0)[2] & 1 << 21 == 0 {
        return false;
    }
    // SAFETY: x2APIC mode exists, and all vectors have handlers.
    unsafe {
        if bare::processor::rdmsr(apic::BASE) & apic::BASE_X2APIC != apic::BASE_X2APIC {
            apic::enable();
        }
        apic::write(apic::SPURIOUS, 0x100 | u64::from(SPURIOUS));
        apic::write(apic::TPR, 0);
    }
    true
}

/// Switches interrupts on, or off.
pub fn set_enabled(is_enabled: bool) {
    // SAFETY: all vectors have handlers. No `nomem`: what handlers change is read behind it.
    unsafe {
        if is_enabled {
            asm!("sti", options(nostack));
        } else {
            asm!("cli", options(nostack));
        }
    }
}

/// Writes a model-specific register of the local APIC. Returns whether the processor (or its
/// hypervisor) let it.
pub fn try_write(register: u32, value: u64) -> bool {
    // SAFETY: a refusal goes on behind the instruction; all vectors have handlers, and the local
    // APIC is the guest's.
    unsafe { attacks_wrmsr(register, value) != 0 }
}

/// Runs what may raise an exception: its vector, if it did. What `code` has begun then stays
/// undone, so it holds nothing that must be dropped.
pub fn attempt<F: FnMut()>(mut code: F) -> Result<(), u8> {
    extern "C" fn call<F: FnMut()>(argument: *mut c_void) {
        // SAFETY: `attempt` passes its closure, and waits for this.
        (unsafe { &mut *argument.cast::<F>() })();
    }
    // SAFETY: the closure is of this type. An exception ends the call as a return does, with the
    // registers that a call keeps.
    let ended = unsafe { attacks_attempt(call::<F>, (&raw mut code).cast()) };
    match ended {
        0 => Ok(()),
        vector => Err(vector as u8 - 1),
    }
}

/// Sets whether the handler of `vector` leaves it in service.
pub fn keep(vector: u8, is_kept: bool) {
    KEPT[usize::from(vector)].store(is_kept, Relaxed);
}

/// Ends all that is in service.
pub fn end_all() {
    for _ in 0..256 {
        if apic::words(apic::ISR).iter().all(|word| *word == 0) {
            break;
        }
        apic::eoi();
    }
}

/// Sends itself an interrupt.
pub fn send(vector: u8) {
    try_write(apic::SELF_IPI, u64::from(vector));
}

/// Returns the number of times that a vector's handler ran.
pub fn count(vector: u8) -> u32 {
    COUNTS[usize::from(vector)].load(Relaxed)
}

/// Returns the number of non-maskable interrupts.
pub fn non_maskable() -> u32 {
    count(NMI)
}

/// Returns the number of times that a gate was not present, and the last error code.
pub fn faults() -> (u32, u32) {
    (count(NOT_PRESENT), FAULT_CODE.load(Relaxed))
}

/// Returns the number of the host's interrupts that the thief took.
pub fn stolen() -> u32 {
    STOLEN.load(Relaxed)
}

/// Returns the order in which the first handlers of a nest began.
pub fn order() -> impl Iterator<Item = u32> {
    ORDER
        .iter()
        .map(|vector| vector.load(Relaxed))
        .take_while(|vector| *vector != 0)
}

/// Sends itself interrupts, one after another, each waited for, a second at most. Returns how many
/// came.
pub fn send_and_count(vector: u8, times: u32) -> u32 {
    (0..times).fold(0, |arrived, _| {
        let before = count(vector);
        send(vector);
        arrived + u32::from(time::until(1000, || count(vector) != before))
    })
}

/// Handles all of them, from stubs.s.
#[unsafe(no_mangle)]
extern "C" fn attacks_interrupt(frame: &mut Frame) {
    let vector = frame.number as u8;
    COUNTS[usize::from(vector)].fetch_add(1, Relaxed);
    match vector {
        NMI => {}
        ..EXCEPTIONS => exception(vector, frame),
        SPURIOUS => {}
        _ if frame.number > 0xff => {
            STOLEN.fetch_add(u32::from(vector >= HOST_CLASS), Relaxed);
            apic::eoi();
        }
        _ => interrupt(vector),
    }
}

fn interrupt(vector: u8) {
    if IS_NESTING.load(Relaxed) {
        if let Some(place) = ORDER.get(ORDER_LEN.fetch_add(1, Relaxed)) {
            place.store(u32::from(vector), Relaxed);
        }
        if vector == OWN {
            nest();
        }
    }
    let handler = HANDLER_MS.load(Relaxed);
    if vector == OWN && handler != 0 {
        set_enabled(true);
        time::wait(u64::from(handler));
        set_enabled(false);
    }
    if !KEPT[usize::from(vector)].load(Relaxed) {
        apic::eoi();
    }
}

/// Nests interrupts in the handler of [`OWN`]: the lower one must wait for its end, and the higher
/// one must not.
fn nest() {
    send(LOW);
    send(HIGH);
    set_enabled(true);
    time::until(1000, || count(HIGH) != 0);
    // Time for the lower one to come too early.
    time::wait(1);
    set_enabled(false);
}

fn exception(vector: u8, frame: &mut Frame) {
    // Instructions that may be refused, and where it goes on then.
    let refusals = [
        (
            &raw const attacks_wrmsr_here,
            &raw const attacks_wrmsr_refused,
        ),
        (
            &raw const attacks_modes_here,
            &raw const attacks_modes_refused,
        ),
    ];
    let refusal = refusals.iter().find(|(here, _)| frame.rip == *here as u64);
    if vector == PROTECTION
        && let Some((_, refused)) = refusal
    {
        frame.rip = *refused as u64;
        return;
    }
    // SAFETY: stubs.s has it, and this processor alone uses it.
    let attempted = unsafe { attacks_attempt_stack.load(Relaxed) };
    if attempted != 0 {
        frame.rip = &raw const attacks_attempt_ended as u64;
        frame.rsp = attempted;
        frame.registers[Frame::RAX] = u64::from(vector) + 1;
        return;
    }
    if vector == NOT_PRESENT && IS_FAULT_EXPECTED.load(SeqCst) && count(vector) < FAULTS_MAX {
        FAULT_CODE.store(frame.code as u32, Relaxed);
        return;
    }
    print(format_args!(
        "exception {vector} code {:#x} rip {:#x}",
        frame.code, frame.rip
    ));
    end()
}
