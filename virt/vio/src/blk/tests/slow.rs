//! A disk that is as slow as a test wants: that of `vio-faults`, which knows this crate and so
//! cannot be used by its own unit tests.

/// The end of a [`SlowDisk`] that the test has; usable from any thread.
pub use gate::GateControl as SlowControl;

gate::slow_disk!(crate);
