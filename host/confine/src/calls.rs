//! The filter of system calls (seccomp).

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

/// A system call that is allowed: its number (`libc::SYS_…`), and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: i64,
    /// With which arguments.
    pub when: When,
}

/// Arguments with which a call is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Any.
    Always,
    /// Those of mmap(2) for private memory of the process's own, not to be executed.
    PlainMemory,
    /// Those of mprotect(2) that make nothing executable.
    NotExecutable,
    /// Those of fallocate(2) that keep a file's size, from an offset and with a length of at most
    /// so many bytes each. A filter cannot add: space may be reserved for as many bytes behind the
    /// end of a file of that size.
    KeepsSize(u64),
}

/// Reason why a filter cannot be set.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// No program can be made of it, on this machine.
    #[error("no filter of system calls for {ARCH}: {0}")]
    Program(String),
    /// The kernel refuses it.
    #[error("the host refuses a filter of system calls (seccomp): {0}")]
    Refused(String),
}

/// From now on any call but these ends the process, whichever of its threads makes it.
///
/// # Errors
/// Nothing has changed.
pub fn allow_only(calls: &[Call]) -> Result<(), FilterError> {
    let program = |error: seccompiler::BackendError| FilterError::Program(error.to_string());
    let mut rules = BTreeMap::new();
    for call in calls {
        rules.insert(call.number, conditions(call.when).map_err(program)?);
    }
    let arch = TargetArch::try_from(ARCH).map_err(program)?;
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        arch,
    );
    let filter: BpfProgram = filter.and_then(TryInto::try_into).map_err(program)?;
    let refused = |error: seccompiler::Error| FilterError::Refused(error.to_string());
    apply_filter_all_threads(&filter).map_err(refused)
}

/// Rules of which one has to match; none: all calls do.
fn conditions(when: When) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let masked = |argument, mask: i32, value: i32| {
        SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(u64::from(mask as u32)),
            u64::from(value as u32),
        )
    };
    let at_most = |argument, most| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Le, most)
    };
    let not_executable = masked(2, libc::PROT_EXEC, 0)?;
    let wanted = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE;
    Ok(match when {
        When::Always => Vec::new(),
        When::NotExecutable => vec![SeccompRule::new(vec![not_executable])?],
        When::PlainMemory => {
            let plain = masked(3, wanted | libc::MAP_SHARED, wanted)?;
            vec![SeccompRule::new(vec![not_executable, plain])?]
        }
        When::KeepsSize(most) => {
            let kinds = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
            let mode = masked(1, !kinds, libc::FALLOC_FL_KEEP_SIZE)?;
            let (offset, len) = (at_most(2, most)?, at_most(3, most)?);
            vec![SeccompRule::new(vec![mode, offset, len])?]
        }
    })
}
