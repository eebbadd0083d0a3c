//! Single steps of the mode machine.
