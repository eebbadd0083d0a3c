//! Line exchange with the host over the console, which keeps guest and host in step.
//!
//! UNSAFETY: tcdrain(3), which the standard library does not have.

use std::io::{self, Write};

/// Prints a line, and waits until it has left the machine: the next action may stop the processor
/// that would send it.
#[expect(unsafe_code, reason = "no safe wrapper of tcdrain")]
pub fn say(line: &str) {
    let mut out = io::stdout().lock();
    // If the console is gone, the host notices it.
    let _ = out
        .write_all(format!("{line}\n").as_bytes())
        .and_then(|()| out.flush());
    // SAFETY: takes a descriptor only; the one error is that it is no terminal, which buffers
    // nothing.
    unsafe { libc::tcdrain(libc::STDOUT_FILENO) };
}

/// Waits for a line of standard input, and returns it without its end.
///
/// # Errors
/// The host has closed its end, or reading failed.
pub fn hear() -> Result<String, String> {
    let mut line = String::new();
    match io::stdin().read_line(&mut line) {
        Ok(0) => Err("the host has gone".into()),
        Ok(_) => Ok(line.trim_end().to_owned()),
        Err(error) => Err(format!("no answer from the host: {error}")),
    }
}
