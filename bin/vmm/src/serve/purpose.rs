//! Purpose of making devices ready: a start, or a check.

/// Purpose of making devices ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be served.
    Start,
    /// To see whether they could be.
    Check,
}
