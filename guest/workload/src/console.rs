//! Going in step with whoever reads and types on the console: lines are said, and waited for.
//!
//! UNSAFETY: tcdrain(3), which the standard library does not have.

use std::io::{self, Write};

/// Says a line, and waits until it has left the machine: what follows may stop the processor that
/// would send it.
#[expect(unsafe_code, reason = "no safe wrapper of tcdrain")]
pub fn say(line: &str) {
    let mut out = io::stdout().lock();
    // A console that is gone is noticed by the host.
    let _ = out
        .write_all(format!("{line}\n").as_bytes())
        .and_then(|()| out.flush());
    // SAFETY: takes a descriptor only; an error says that it is no terminal, which keeps nothing
    // back.
    unsafe { libc::tcdrain(libc::STDOUT_FILENO) };
}

/// Waits for a line of standard input, and answers it without its end.
///
/// # Errors
/// Nobody is there any more.
pub fn hear() -> Result<String, String> {
    let mut line = String::new();
    match io::stdin().read_line(&mut line) {
        Ok(0) => Err("the host has gone".into()),
        Ok(_) => Ok(line.trim_end().to_owned()),
        Err(error) => Err(format!("no answer from the host: {error}")),
    }
}
