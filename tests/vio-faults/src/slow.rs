//! A disk that is as slow as a test wants.

/// The end of a [`SlowDisk`] that the test has; usable from any thread.
pub use gate::GateControl as SlowControl;

gate::slow_disk!(vio);
