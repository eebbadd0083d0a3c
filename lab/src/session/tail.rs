//! The end of the emulated host's console, kept for error messages.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Number of bytes kept: some hundred lines, enough for a kernel's oops.
const KEPT: usize = 32 << 10;

/// The last bytes of some streams, in the order of their arrival.
#[derive(Debug)]
pub(super) struct Tail {
    state: Mutex<State>,
    changed: Condvar,
    echo: bool,
}

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    open: usize,
}

impl Tail {
    /// Creates it. With `echo` the streams also go to standard error.
    pub(super) fn new(echo: bool) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            echo,
        }
    }

    /// Collects a stream until it ends, in a thread of its own.
    pub(super) fn follow(self: &Arc<Self>, mut stream: impl Read + Send + 'static) {
        self.locked().open += 1;
        let tail = Arc::clone(self);
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count) = stream.read(&mut buffer) {
                if count == 0 {
                    break;
                }
                tail.add(&buffer[..count]);
            }
            tail.locked().open -= 1;
            tail.changed.notify_all();
        });
    }

    /// Waits until all followed streams have ended, or the limit has expired.
    pub(super) fn wait_for_end(&self, limit: Duration) {
        // After a timeout the text so far is used.
        let _ = self
            .changed
            .wait_timeout_while(self.locked(), limit, |state| state.open > 0);
    }

    /// Returns the bytes kept, without control sequences.
    pub(super) fn text(&self) -> String {
        let bytes: Vec<u8> = self.locked().bytes.iter().copied().collect();
        plain(&String::from_utf8_lossy(&bytes))
    }

    fn add(&self, data: &[u8]) {
        if self.echo {
            // Nothing can be done about a closed standard error.
            let _ = io::stderr().write_all(data);
        }
        let bytes = &mut self.locked().bytes;
        bytes.extend(data);
        let excess = bytes.len().saturating_sub(KEPT);
        bytes.drain(..excess);
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes sequences of firmware and consoles that control a terminal.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                // ESC [ parameters final, or ESC and one character.
                if chars.next() == Some('[') {
                    chars.by_ref().find(|c| ('@'..='~').contains(c));
                }
            }
            '\r' => {}
            c if c.is_control() && c != '\n' && c != '\t' => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_is_kept() {
        let tail = Arc::new(Tail::new(false));
        tail.follow(io::Cursor::new(
            [vec![b'a'; KEPT], b"the end\n".to_vec()].concat(),
        ));
        tail.wait_for_end(Duration::from_secs(10));
        let text = tail.text();
        assert_eq!(text.len(), KEPT);
        assert!(text.ends_with("aaathe end\n"));
    }

    #[test]
    fn terminal_sequences_are_dropped() {
        assert_eq!(
            plain("\u{1b}c\u{1b}[?7l\u{1b}[2Jpanic\r\n\u{1b}[0;1mx\u{7}"),
            "panic\nx"
        );
    }
}
