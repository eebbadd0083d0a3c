//! Kinds of the BARs that a guest sees.

use pci::bars::{BARS, BarKind, FIRST_BAR};

use super::list::word;
use super::unsupported::{BarReason, Unsupported};

/// Kinds of the BARs, by the type bits in the image and the sizes of the regions.
pub fn bar_kinds(
    image: &[u8],
    sizes: &[u64; BARS],
    unsupported: &mut Vec<Unsupported>,
) -> [BarKind; BARS] {
    let mut kinds = [BarKind::Absent; BARS];
    let mut bar = 0;
    while bar < BARS {
        let register = word(image, usize::from(FIRST_BAR) + 4 * bar);
        let size = sizes[bar];
        let is_wide = register & 0b111 == 0b100;
        let kind = bar_kind(register, size, bar);
        match kind {
            Ok(kind) => {
                kinds[bar] = kind;
                if matches!(kind, BarKind::Memory64(_)) {
                    kinds[bar + 1] = BarKind::Upper;
                }
            }
            Err(reason) => {
                let bar = bar as u8;
                unsupported.push(Unsupported::Bar { bar, reason });
            }
        }
        // The register behind a 64-bit BAR has no type bits of its own, also where the BAR is
        // hidden.
        bar += if is_wide && size != 0 { 2 } else { 1 };
    }
    kinds
}

fn bar_kind(register: u32, size: u64, bar: usize) -> Result<BarKind, BarReason> {
    if size == 0 {
        return Ok(BarKind::Absent);
    }
    let most = match register & 0b111 {
        0b000 => 1 << 31,
        0b100 if bar + 1 < BARS => 1 << 40,
        io if io & 1 != 0 => return Err(BarReason::Io),
        _ => return Err(BarReason::Type),
    };
    if !size.is_power_of_two() || !(16..=most).contains(&size) {
        return Err(BarReason::Size(size));
    }
    Ok(match register & 0b100 {
        0 => BarKind::Memory32(size as u32),
        _ => BarKind::Memory64(size),
    })
}
