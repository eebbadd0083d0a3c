//! Standard error, without waiting for whoever reads it.
//!
//! A pipe that nobody empties would otherwise hold the thread that has something to say: a sidecore with a line of log, a vCPU with
//! its registers, the main thread with the last words. Before [`start`] messages are written directly, as everywhere in this
//! program; after it they are handed to a thread, and those that find no room are counted and left out.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use console::sink::Sink;

static SINK: OnceLock<Sink> = OnceLock::new();
/// Messages left out since that was last said.
static LOST: AtomicU64 = AtomicU64::new(0);

/// From now on no message waits. To be called after the signals have been blocked, for a thread is started.
///
/// # Errors
/// No thread, or no descriptor.
pub fn start() -> io::Result<()> {
    let stderr = std::fs::File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let sink = Sink::start("messages", stderr)?;
    // Once is enough.
    let _ = SINK.set(sink);
    Ok(())
}

/// Says `text`, which ends its own lines.
pub fn print(text: &str) {
    let Some(sink) = SINK.get() else {
        // Nobody can be told that standard error is gone.
        let _ = io::stderr().write_all(text.as_bytes());
        return;
    };
    // Relaxed: a statistic.
    let lost = LOST.swap(0, Ordering::Relaxed);
    if lost > 0
        && !sink.offer(format!("exitless: {lost} messages were not read and are lost\n").as_bytes())
    {
        LOST.fetch_add(lost, Ordering::Relaxed);
    }
    if !sink.offer(text.as_bytes()) {
        LOST.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until everything said has been written, at most for `limit`.
pub fn finish(limit: Duration) {
    if let Some(sink) = SINK.get() {
        sink.flush(limit);
    }
}

/// For the log: each write is one message.
#[derive(Clone, Copy, Debug, Default)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        print(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One line on standard error, as `eprintln!` has it.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::messages::print(&format!("exitless: {}\n", format_args!($($arg)*)))
    };
}
pub(crate) use say;
