//! The result of a verification, and the reasons why one could not be made.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::Serialize;

use crate::client::ClientError;

/// Messages kept about damage; the rest is counted.
const MAX_MESSAGES: usize = 20;

/// Result of a verification.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verdict {
    /// Requests acknowledged, by kind: read, write, flush, discard, write-zeroes.
    pub requests: [u64; 5],
    /// Blocks compared.
    pub checked: u64,
    /// Blocks that were not what was acknowledged.
    pub damaged: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Wake-ups lost.
    pub lost_wakeups: u64,
    /// Requests that never came back.
    pub unanswered: u64,
    /// Rings that stood elsewhere at the end than they should.
    pub wrong_bases: u64,
    /// Kills.
    pub kills: u32,
    /// Milliseconds from each kill to the first completion after it, on each disk.
    pub stalls_ms: Vec<f64>,
    /// The first messages about damage and errors.
    pub messages: Vec<String>,
}

impl Verdict {
    /// Whether nothing was wrong.
    pub const fn is_good(&self) -> bool {
        self.damaged == 0
            && self.errors == 0
            && self.lost_wakeups == 0
            && self.unanswered == 0
            && self.wrong_bases == 0
    }

    pub(crate) fn say(&mut self, message: impl FnOnce() -> String) {
        if self.messages.len() < MAX_MESSAGES {
            self.messages.push(message());
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [reads, writes, flushes, discards, zeroes] = self.requests;
        writeln!(
            f,
            "requests   {reads} reads, {writes} writes, {flushes} flushes, {discards} discards, \
             {zeroes} write-zeroes"
        )?;
        writeln!(
            f,
            "compared   {} blocks, {} damaged",
            self.checked, self.damaged
        )?;
        if self.kills > 0 {
            let mut stalls = self.stalls_ms.clone();
            stalls.sort_by(f64::total_cmp);
            let median = stalls.get(stalls.len() / 2).copied().unwrap_or(f64::NAN);
            let longest = stalls.last().copied().unwrap_or(f64::NAN);
            writeln!(
                f,
                "kills      {}, stalls of {median:.0} ms in the median, {longest:.0} ms at most",
                self.kills
            )?;
        }
        for message in &self.messages {
            writeln!(f, "           {message}")?;
        }
        write!(
            f,
            "errors     {} failed, {} lost wake-ups, {} never answered, {} rings elsewhere at the \
             end",
            self.errors, self.lost_wakeups, self.unanswered, self.wrong_bases
        )
    }
}

/// Reason why a verification could not be made.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum VerifyError {
    #[error("{socket}")]
    Client {
        socket: PathBuf,
        #[source]
        source: ClientError,
    },
    #[error("the journal")]
    Journal(#[source] io::Error),
    #[error("the server")]
    Server(#[source] io::Error),
    #[error("{0}: there is no room for a single block")]
    TooSmall(PathBuf),
}
