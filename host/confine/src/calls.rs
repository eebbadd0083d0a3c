//! The filter of system calls (seccomp).

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

/// A system call that the filter allows: its number (`libc::SYS_…`) and the condition on its
/// arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: i64,
    /// Arguments with which it is allowed.
    pub when: When,
}

/// Arguments with which a call is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Any.
    Always,
    /// Arguments of mmap(2) that make a private, anonymous mapping without `PROT_EXEC`.
    PlainMemory,
    /// Arguments of mprotect(2) without `PROT_EXEC`.
    NotExecutable,
    /// Arguments of fallocate(2) with `FALLOC_FL_KEEP_SIZE`, and an offset and a length of at most
    /// so many bytes each. A filter cannot add offset and length: in a file of that size, up to as
    /// many bytes behind its end may be reserved.
    KeepsSize(u64),
}

/// Reason why a filter cannot be set.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// No filter program can be compiled for this architecture.
    #[error("no filter of system calls for {ARCH}: {0}")]
    Program(String),
    /// The kernel refuses to install the filter.
    #[error("the host refuses a filter of system calls (seccomp): {0}")]
    Refused(String),
}

/// Installs the filter on all threads: from now on any call but these kills the process.
///
/// # Errors
/// No filter is installed.
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

/// Returns the rules of a call, of which one has to match. An empty list matches every call.
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
