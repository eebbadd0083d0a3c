//! How a command ends that does not succeed.

use std::io;

use crate::options;

/// Why a command did not succeed.
pub enum Failure {
    /// The command line makes no sense.
    Usage(String),
    /// What was to be done was not, or is wrong.
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
