//! Configuration of a device and its queues by the driver, and the errors of activation.

pub use virtqueue::config::{QueueConfig, feature};

/// Reason why a device refuses DRIVER_OK. The transport answers with DEVICE_NEEDS_RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    /// Features that were not offered, or VERSION_1 missing.
    #[error("the driver accepted features {features:#x} where {offered:#x} are offered")]
    Features {
        /// Accepted by the driver.
        features: u64,
        /// Offered by the device.
        offered: u64,
    },
    /// A size that is zero, no power of two (packed: above 32768), or above the maximum.
    #[error("queue {index} has size {size}, the maximum is {max}")]
    QueueSize {
        /// Queue number.
        index: u16,
        /// Size written by the driver.
        size: u16,
        /// The device's maximum.
        max: u16,
    },
    /// A ring address that is misaligned or wraps.
    #[error("queue {index} has a misaligned or wrapping ring address")]
    QueueAddress {
        /// Queue number.
        index: u16,
    },
    /// A ring that does not lie in guest memory, of a device that is served elsewhere and could not
    /// fault later.
    #[error("queue {index} has a ring outside guest memory")]
    QueueMemory {
        /// Queue number.
        index: u16,
    },
    /// A queue number the device does not have, or one given twice.
    #[error("queue {index} does not exist or is given twice")]
    QueueIndex {
        /// Queue number.
        index: u16,
    },
    /// Requests of the former activation are still in flight.
    #[error("{in_flight} requests are still in flight")]
    NotQuiesced {
        /// Number of these requests.
        in_flight: u32,
    },
}

/// Whether a device may have queues of at most `size` entries, of which it needs `least`.
pub(crate) fn is_queue_size(size: u16, least: u16) -> bool {
    size.is_power_of_two() && (least..=1024).contains(&size)
}

/// Checks the features that a driver has accepted.
pub(crate) fn check_features(offered: u64, features: u64) -> Result<(), ActivateError> {
    if features & !offered != 0 || features & feature::VERSION_1 == 0 {
        return Err(ActivateError::Features { features, offered });
    }
    Ok(())
}
