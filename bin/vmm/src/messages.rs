//! Standard error, without waiting for its reader.
//!
//! A pipe that no process empties would otherwise hold the thread that prints: a sidecore with a
//! line of the log, a vCPU with its registers, the main thread with the last message. Before
//! [`start`] messages are written directly, as everywhere in this program; after it they are handed
//! to a thread, and those that find no room are counted and left out.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use console::sink::Sink;

use crate::log_line::{Format, Line};

static SINK: OnceLock<Sink> = OnceLock::new();
/// Name of the program, which its messages begin with.
static PROGRAM: OnceLock<String> = OnceLock::new();
/// Form of the messages; text until it is set.
static FORMAT: OnceLock<Format> = OnceLock::new();
/// Messages left out since that was last reported.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Starts the thread of messages: from now on none waits. To be called after the signals have been
/// blocked, for a thread is started.
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

/// Sets the name of the program. Once, before the first message.
pub fn set_program(name: &str) {
    // Once is enough.
    let _ = PROGRAM.set(name.to_owned());
}

/// Returns the name of the program.
pub fn program() -> &'static str {
    PROGRAM.get().map_or("exitless", String::as_str)
}

/// Sets the form in which messages are written. Once, before the first.
pub fn set_format(format: Format) {
    // Once is enough.
    let _ = FORMAT.set(format);
}

/// Says what has no level: a line, or a table.
pub fn own(message: &str) {
    write(&Line {
        level: None,
        target: program(),
        message: message.trim_end(),
        fields: &[],
    });
}

/// Answers a key at the terminal.
pub fn answer(text: &str) {
    match format() {
        // In raw mode it ends its own lines.
        Format::Text => print(text),
        Format::Json => own(text.trim_start()),
    }
}

/// Ends the line that a guest may have left open on the same terminal.
pub fn end_line() {
    if format() == Format::Text {
        print("\n");
    }
}

fn format() -> Format {
    FORMAT.get().copied().unwrap_or(Format::Text)
}

/// Writes a line of the log.
pub fn write(line: &Line<'_>) {
    print(&line.written(program(), format()));
}

/// Writes `text`, which ends its own lines.
fn print(text: &str) {
    let Some(sink) = SINK.get() else {
        // Nothing is left to say it to if standard error is gone.
        let _ = io::stderr().write_all(text.as_bytes());
        return;
    };
    // Relaxed: a statistic.
    let lost = LOST.swap(0, Ordering::Relaxed);
    if lost > 0 {
        let line = Line {
            level: None,
            target: program(),
            message: &format!("{lost} messages were not read and are lost"),
            fields: &[],
        };
        let line = line.written(program(), format());
        if !sink.offer(line.as_bytes()) {
            LOST.fetch_add(lost, Ordering::Relaxed);
        }
    }
    if !sink.offer(text.as_bytes()) {
        LOST.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until every message has been written, at most for `limit`.
pub fn finish(limit: Duration) {
    if let Some(sink) = SINK.get() {
        sink.flush(limit);
    }
}

/// Most characters of an error. It names what was given, which may be of any length.
const MOST: usize = 8000;

/// Returns `text`, or its beginning and its end if it is long.
pub fn short(text: &str) -> String {
    let len = text.chars().count();
    if len <= MOST {
        return text.to_owned();
    }
    let begin: String = text.chars().take(MOST / 2).collect();
    let end: String = text.chars().skip(len - MOST / 2).collect();
    format!("{begin} … {end}")
}

/// One line on standard error, as `eprintln!` has it.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::messages::own(&format!($($arg)*))
    };
}
pub(crate) use say;
