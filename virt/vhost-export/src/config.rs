//! Configuration of an export, and its counters.

use vio::DeviceStats;

/// Parameters by which a device is served.
#[derive(Clone, Debug)]
pub struct ExportConfig {
    /// Its name in the log and in statistics.
    pub name: String,
    /// Its share of a core beside others that have work, relative to theirs; at least 1.
    pub weight: u32,
    /// Longest delay of a call to a guest, which waits for further completions under load, in
    /// nanoseconds; 0: no delay.
    pub call_delay_ns: u64,
    /// Limit of the wait for requests in flight, in nanoseconds. At the end of a connection they
    /// are cancelled after it. A stop, a reset or a change of memory waits for as long as it takes,
    /// and is logged after it. If memory of theirs that an invalidation covers is still in use
    /// after it, the device needs a reset.
    pub drain_limit_ns: u64,
    /// Longest wait for a translation that was asked for, before the device needs a reset; in
    /// nanoseconds.
    pub miss_limit_ns: u64,
}

impl ExportConfig {
    /// The defaults: weight 1, 20 µs (what it takes to wake a guest), 1 s, 900 ms.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            weight: 1,
            call_delay_ns: 20_000,
            drain_limit_ns: 1_000_000_000,
            miss_limit_ns: 900_000_000,
        }
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportStats {
    /// Front ends that connected.
    pub connections: u64,
    /// Front ends turned away because another one was there, or no descriptor was free.
    pub turned_away: u64,
    /// Kicks taken up.
    pub kicks: u64,
    /// Calls made.
    pub calls: u64,
    /// Times that a front end broke the protocol of its socket: a request that was refused, or
    /// bytes that are none. What its guest's driver does wrong with its rings is in `device`.
    pub violations: u64,
    /// Translations asked for.
    pub misses: u64,
    /// Translations that came.
    pub iotlb_updates: u64,
    /// Invalidations of translations.
    pub iotlb_invalidations: u64,
    /// Requests cancelled because they held the end of a connection up.
    pub cancelled: u64,
    /// Of the device.
    pub device: DeviceStats,
}
