//! Places of BARs when the guest starts: below 4 GiB, with a window beyond only in a machine that
//! needs it.

use anyhow::bail;
use pci::bus::{BarWindows, PciBus};
use platform::layout;

/// Places all BARs, and answers in which windows: below 4 GiB if they fit there, otherwise with the
/// window beyond, which a guest of so many address bits and with RAM up to `ram_end` must be able
/// to have.
///
/// # Errors
/// They do not fit, and why there is no window beyond.
pub fn place_bars(bus: &PciBus, address_bits: u8, ram_end: u64) -> anyhow::Result<BarWindows> {
    let below = BarWindows {
        low: layout::PCI_WINDOW..layout::PCI_WINDOW_END,
        high: 0..0,
    };
    let Err(full) = bus.place_bars(&below) else {
        return Ok(below);
    };
    let high = layout::PCI_WINDOW_HIGH;
    let needed = u64::BITS - (high.end - 1).leading_zeros();
    if u32::from(address_bits) < needed {
        bail!(
            "{full} below 4 GiB, and addresses beyond take {needed} bits, of which this host gives \
             guests {address_bits}"
        );
    }
    if ram_end > high.start {
        bail!(
            "{full} below 4 GiB, and --memory reaches into the window beyond, which begins at \
             {:#x}",
            high.start
        );
    }
    let windows = BarWindows { high, ..below };
    bus.place_bars(&windows)?;
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pci::bars::{BARS, BarKind};
    use pci::host_bridge::HostBridge;
    use pci::port::FunctionPort;

    use super::*;

    /// A function of one 64-bit BAR of so many bytes.
    struct OneBar(u64);

    impl FunctionPort for OneBar {
        fn bar_kinds(&self) -> [BarKind; BARS] {
            let mut kinds = [BarKind::Absent; BARS];
            (kinds[0], kinds[1]) = (BarKind::Memory64(self.0), BarKind::Upper);
            kinds
        }

        fn config_read(&self, _: u16, _: u8) -> u32 {
            0
        }

        fn config_write(&self, _: u16, _: u8, _: u32) {}

        fn bar_read(&self, _: u8, _: u64, _: &mut [u8]) {}

        fn bar_write(&self, _: u8, _: u64, _: &[u8]) {}
    }

    #[test]
    fn a_window_beyond_4_gib_is_there_only_if_a_bar_needs_it_and_the_guest_can_have_it() {
        const GIB: u64 = 1 << 30;
        let high = layout::PCI_WINDOW_HIGH;
        let place = |bytes, bits, ram_end| {
            let bus = PciBus::new(Arc::new(HostBridge::default()));
            bus.plug(bus.reserve().unwrap(), Arc::new(OneBar(bytes)));
            place_bars(&bus, bits, ram_end)
                .map(|windows| windows.high)
                .map_err(|error| error.to_string())
        };
        // Small enough: whatever the guest could have.
        for (bits, ram_end) in [(36, GIB), (48, GIB), (48, high.end)] {
            assert_eq!(place(GIB / 4, bits, ram_end), Ok(0..0));
        }
        for bits in [39, 48] {
            for bytes in [GIB, 16 * GIB, 64 * GIB] {
                assert_eq!(place(bytes, bits, high.start), Ok(high.clone()));
            }
        }
        for (bytes, bits, ram_end, why) in [
            (
                GIB,
                38,
                GIB,
                "take 39 bits, of which this host gives guests 38",
            ),
            (16 * GIB, 36, GIB, "of which this host gives guests 36"),
            (
                16 * GIB,
                48,
                high.start + 1,
                "--memory reaches into the window",
            ),
            (
                128 * GIB,
                48,
                GIB,
                "no room for 0x2000000000 bytes of slot 1",
            ),
        ] {
            let error = place(bytes, bits, ram_end).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
