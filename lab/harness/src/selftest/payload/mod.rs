//! The forced-sleep soak: a sidecore that sleeps whenever it can, and a guest that goes on only if
//! its own store to a register has woken the sidecore.
//!
//! Register pages have no eventfd, so a sleeping owner is woken by *arming* them, in `shared` by
//! write protection and in `logged` by removing the log. A lost wake-up hangs Linux for ever: it
//! spins on the status word with interrupts off. This soak acts as that driver in 64-bit user mode,
//! which every `/dev/kvm` runs, software KVM too, at full speed.
//!
//! * `program`: the guest, about thirty instructions.
//! * `machine`: the virtual machine around it, made of the parts of `exitless run`: the unit behind
//!   its front end, the owner, a sidecore with `force_sleep_every(1)`, the vCPU loop.
//! * `watch`: waits for enough sleeps, and distinguishes a lost wake-up from a slow host.
//!
//! Stores find the owner asleep, falling asleep (its last poll must find them) and awake, since the
//! program waits a random time between submissions. Each of these is counted in its column of
//! [`PayloadReport`].
//!
//! Called by `exitless-lab payload`, `exitless-lab selftest --soak` and by this module's tests.
//! Left out: more than one vCPU, functions with rings (their doorbells have descriptors), other
//! registers than IQT.

mod machine;
mod program;
mod unit;
mod watch;

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use kvm::KvmError;

/// How the small guest reaches the IOMMU's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RegisterMode {
    /// Every access exits to the sidecore.
    Trap,
    /// Reads do not exit; writes are logged inside the kernel.
    Logged,
    /// Plain memory: nothing exits.
    Shared,
}

/// Time without progress after which a wake-up counts as lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// Result of a soak.
#[derive(Clone, Debug, Serialize)]
pub struct PayloadReport {
    /// `trap`, `logged` or `shared`.
    pub mode: String,
    /// Queue submissions completed: an IOTLB flush and a WAIT each.
    pub iterations: u64,
    /// Times that the sidecore was asleep.
    pub sleeps: u64,
    /// Times that it was about to sleep and its last poll, after arming, found a store.
    pub sleeps_refused: u64,
    /// Average time of falling asleep and waking up, without the sleep, in microseconds.
    pub arming_us: f64,
    /// Wakes by the register page's descriptor.
    pub wakes_fd: u64,
    /// Wakes by a message: a write that exited.
    pub wakes_mailbox: u64,
    /// Stores that waited at the write-protected page.
    pub gate_faults: u64,
    /// Stores taken from KVM's log.
    pub logged: u64,
    /// Stores that exited to user space.
    pub traps: u64,
    /// Wake-ups lost: 0, or 1 if the soak ended with it.
    pub lost: u64,
    /// Wall-clock time, in seconds.
    pub seconds: f64,
    /// Submissions per second, waits between them included; for information.
    pub iterations_per_s: f64,
    /// Whether KVM is implemented in software: the host has neither vmx nor svm.
    pub is_software_kvm: bool,
    /// State in which a wake-up was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dump: Option<String>,
}

impl fmt::Display for PayloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<6} {} sleeps, {} lost: {} submissions in {:.1} s ({:.0}/s, arming {:.0} us); \
             wakes: {} by the page, {} by a message, \
             {} sleeps called off by the last look; stores: {} gate faults, {} logged, {} exits",
            self.mode,
            self.sleeps,
            self.lost,
            self.iterations,
            self.seconds,
            self.iterations_per_s,
            self.arming_us,
            self.wakes_fd,
            self.wakes_mailbox,
            self.sleeps_refused,
            self.gate_faults,
            self.logged,
            self.traps,
        )?;
        match &self.dump {
            Some(dump) => write!(f, "\n{dump}"),
            None => Ok(()),
        }
    }
}

/// Reason why a mode cannot be soaked on this host.
#[derive(Debug, thiserror::Error)]
pub enum Unsupported {
    /// No KVM, no permission, or a capability is absent.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The register page cannot be write-protected.
    #[error("a register page in shared memory cannot wake a sleeper here")]
    Userfaultfd(#[source] std::io::Error),
}

/// Checks that this host can soak `mode`.
pub fn supported(mode: RegisterMode) -> Result<(), Unsupported> {
    machine::supported(mode)
}

/// Submits until the sidecore has slept `sleeps` times, or a wake-up is lost.
///
/// # Errors
/// [`Unsupported`], a host that refuses a call, a guest that crashes, or a unit that has not done
/// exactly the submitted work. A lost wake-up is no error: it is in the report.
pub fn run(mode: RegisterMode, sleeps: u64) -> Result<PayloadReport> {
    machine::soak(mode, sleeps, PATIENCE, |owner| owner)
}

/// Arguments of the hidden `exitless-lab payload`.
#[derive(Args, Debug)]
pub struct PayloadArgs {
    /// How the guest reaches the IOMMU's registers; all three if absent.
    #[arg(long, value_enum)]
    mode: Option<RegisterMode>,

    /// Sleeps to force.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    sleeps: u64,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `exitless-lab payload`: 0 if no wake-up was lost, 1 otherwise.
pub fn main(args: &PayloadArgs) -> Result<u8> {
    let modes = match &args.mode {
        Some(mode) => std::slice::from_ref(mode),
        None => RegisterMode::value_variants(),
    };
    let mut lost = 0;
    for mode in modes {
        let report = run(*mode, args.sleeps)?;
        lost += report.lost;
        if args.json {
            println!("{}", serde_json::to_string(&report)?);
        } else {
            println!("{report}");
        }
    }
    Ok(u8::from(lost > 0))
}
