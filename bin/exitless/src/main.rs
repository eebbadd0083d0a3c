//! See the library, which is all of it.

use std::process::ExitCode;

fn main() -> ExitCode {
    exitless::main()
}
