//! The program inside the test guest (subcommands follow with the library).
fn main() {}
