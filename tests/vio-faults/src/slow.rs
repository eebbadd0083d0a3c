//! A disk whose operations wait until the test releases them.

/// The test's end of a [`SlowDisk`]; usable from any thread.
pub use gate::GateControl as SlowControl;

gate::slow_disk!(vio);
