//! Log of an export about its front end: a bounded number of lines, whatever the front end does.

use sidecore::Nanos;
use vio::LogRateLimit;

/// The budget of one export.
#[derive(Debug)]
pub(crate) struct Log {
    name: String,
    budget: LogRateLimit,
}

impl Log {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            budget: LogRateLimit::default(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether a line may be logged now.
    pub(crate) fn admits(&self) -> bool {
        let admitted = self.budget.admits_at(Nanos::now().0);
        if let Some(suppressed @ 1..) = admitted {
            tracing::warn!(export = %self.name, "{suppressed} lines about this front end were left \
                 out");
        }
        admitted.is_some()
    }
}

/// A line of `tracing` at a level, about an export, if its budget allows.
macro_rules! say {
    ($log:expr, $level:ident, $($line:tt)+) => {{
        let log = &$log;
        if log.admits() {
            tracing::$level!(export = %log.name(), $($line)+);
        }
    }};
}
pub(crate) use say;
