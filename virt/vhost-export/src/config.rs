//! What an export is told, and what it counts.

use vio::DeviceStats;

/// How a device is served.
#[derive(Clone, Debug)]
pub struct ExportConfig {
    /// Its name in the log and in statistics.
    pub name: String,
    /// Its share of a core beside others that have work, relative to theirs; at least 1.
    pub weight: u32,
    /// How long a call to a guest may wait for further completions under load, in nanoseconds; 0:
    /// not at all.
    pub call_delay_ns: u64,
    /// How long requests in flight may hold up the end of a connection before they are cancelled,
    /// and a stop, a reset or a change of memory, which wait for as long as it takes, before the
    /// log says so; and how long memory of theirs may be in use that an invalidation covers, before
    /// the device needs a reset. In nanoseconds.
    pub drain_limit_ns: u64,
    /// How long a translation that was asked for may take, before the device needs a reset; in
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
