//! Failures of a command.

use std::io;

use crate::options;

/// Reason for the failure of a command.
pub enum Failure {
    /// The command line is malformed.
    Usage(String),
    /// The run failed, or found an error.
    Run(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Run(error.to_string())
    }
}

impl From<options::Wrong> for Failure {
    fn from(wrong: options::Wrong) -> Self {
        Self::Usage(wrong.0)
    }
}
