//! Errors as text.

use std::error::Error;
use std::iter;

/// An error and its causes, in one line: for a [`Refusal`](crate::backend::Refusal), or a log.
pub fn chain(error: &dyn Error) -> String {
    let causes = iter::successors(Some(error), |&error| error.source());
    let lines: Vec<_> = causes.map(ToString::to_string).collect();
    lines.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::ReceiveError;

    #[test]
    fn each_cause_is_said_once() {
        let below = std::io::Error::other("no luck");
        let error = ReceiveError::Socket(below);
        assert_eq!(chain(&error), "recvmsg failed: no luck");
    }
}
