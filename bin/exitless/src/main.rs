//! Entry point; the library has the program.

use std::process::ExitCode;

fn main() -> ExitCode {
    exitless::main()
}
