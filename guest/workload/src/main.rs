//! (head comment to be written)
fn main() {}
