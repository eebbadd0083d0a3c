//! Waiting for storage at the end.
//!
//! A request that the kernel holds (a file of a FUSE or network file system whose server does not
//! answer, a suspended device-mapper target) cannot be taken back, and an end in order waits for
//! it: a write that was acknowledged to the guest is then on the disk. A message names the disk, so
//! that the user can mend it, or send another signal.
//!
//! A process that leaves with such a request is gone for all but the kernel. The kernel may keep
//! the rest of the process, and its files with it, until the request ends: no signal, SIGKILL
//! included, ends a wait for a suspended device, or for a FUSE server that has a buffered write or
//! an fsync in hand. Reads through the page cache and direct I/O do not keep the process.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::signals;
use super::{LOOK, STATUS_AT_ONCE};
use crate::messages::say;

/// Time that storage may take before it is named, and the time until it is named again.
const NAMED_AFTER: Duration = Duration::from_secs(1);
const NAMED_AGAIN: Duration = Duration::from_secs(30);
/// Names of disks whose end is awaited, by a key of the caller's.
pub type Names<K> = BTreeMap<K, String>;

/// Waits until everything in `names` has come out of `ended`, each by `take`, which answers its
/// key. `look` is called now and then, and may end the process. Ends early if nothing more can
/// come.
pub fn wait<K: Ord, T>(
    mut names: Names<K>,
    ended: &Receiver<T>,
    mut take: impl FnMut(T) -> K,
    mut look: impl FnMut(),
) {
    let mut say_at = Instant::now() + NAMED_AFTER;
    while !names.is_empty() {
        match ended.recv_timeout(LOOK) {
            Ok(one) => {
                names.remove(&take(one));
            }
            Err(RecvTimeoutError::Timeout) => look(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if Instant::now() >= say_at && !names.is_empty() {
            say_at = Instant::now() + NAMED_AGAIN;
            signals::next_ends_at_once();
            say!("{}", notice(&names));
        }
    }
}

fn notice<K>(names: &Names<K>) -> String {
    let mut text = "waiting for storage that does not answer: ".to_owned();
    for (at, name) in names.values().take(8).enumerate() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{}{name}", if at == 0 { "" } else { ", " });
    }
    if names.len() > 8 {
        let _ = write!(text, " and {} more", names.len() - 8);
    }
    let _ = write!(
        text,
        " (a signal ends this at once, with status {STATUS_AT_ONCE})"
    );
    text
}

/// Drops things that may take long, each on a thread of its own, and waits for that.
#[derive(Default)]
pub struct Dropping {
    names: Names<u64>,
    ended: Option<(std::sync::mpsc::Sender<u64>, Receiver<u64>)>,
}

impl Dropping {
    /// Begins to drop `what`, which is called `name`.
    pub fn begin(&mut self, name: String, what: impl Send + 'static) {
        let (tell, _) = self.ended.get_or_insert_with(channel);
        let tell = tell.clone();
        let number = self.names.len() as u64;
        self.names.insert(number, name);
        let close = move || {
            drop(what);
            // The receiver may have stopped waiting.
            let _ = tell.send(number);
        };
        // Without a thread it is dropped with the closure, here.
        let thread = std::thread::Builder::new().name("close".into());
        if thread.spawn(close).is_err() {
            self.names.remove(&number);
        }
    }

    /// Waits until all has been dropped.
    pub fn wait(self) {
        if let Some((tell, ended)) = self.ended {
            drop(tell);
            wait(self.names, &ended, |number| number, || {});
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_names_what_is_waited_for() {
        let names: Names<u64> = (0..10).map(|at| (at, format!("disk{at}"))).collect();
        let text = notice(&names);
        assert!(text.contains("disk0, disk1"), "{text}");
        assert!(text.contains("disk7 and 2 more"), "{text}");
        assert!(text.contains("status 5"), "{text}");
    }

    #[test]
    fn wait_returns_after_values_dropped_on_other_threads() {
        let shared = std::sync::Arc::new(());
        let mut dropping = Dropping::default();
        for number in 0..3 {
            dropping.begin(number.to_string(), std::sync::Arc::clone(&shared));
        }
        dropping.wait();
        assert_eq!(std::sync::Arc::strong_count(&shared), 1);
    }
}
