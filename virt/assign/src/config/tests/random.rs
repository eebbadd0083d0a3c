//! Images of any bytes, with headers of capabilities thrown in, and any accesses.

use proptest::prelude::*;
use seeded::Random;

use super::*;

const STANDARD_SHOWN: [u16; 5] = [0x01, 0x05, 0x09, 0x10, 0x11];

/// An image that is not refused at once, and sizes of its BARs.
fn image(seed: u64, is_extended: bool, planted: u64) -> (Image, [u64; BARS]) {
    let random = &mut Random::new(seed);
    let len = if is_extended { 4096 } else { 256 };
    let mut bytes: Vec<u8> = (0..len)
        .map(|_| random.bits() as u8 & random.bits() as u8)
        .collect();
    bytes[0x0e] = (random.bits() as u8) & 0x80;
    bytes[0x06] |= 0x10;
    bytes[0x3d] = 0;
    let mut at = 0x34;
    for _ in 0..planted {
        // Mostly somewhere behind the header, at times anywhere; and mostly an id that is shown.
        let next = match random.below(8) {
            0 => random.bits() as u8,
            _ => 0x40 + 4 * random.below(48) as u8,
        };
        bytes[at] = next;
        let header = usize::from(next & !3);
        bytes[header] = match random.below(4) {
            0 => random.bits() as u8,
            _ => STANDARD_SHOWN[random.below(5) as usize] as u8,
        };
        if random.chance(0.8) {
            bytes[header + 3] = 0;
            bytes[header + 2] &= 0x1f;
        }
        // A table and pending bits that may fit a BAR.
        if bytes[header] == 0x11 && header < 0xf4 && random.chance(0.9) {
            for word in [4, 8] {
                let place = (0x800 * random.below(4) + random.below(3)) as u32;
                bytes[header + word..header + word + 4].copy_from_slice(&place.to_le_bytes());
            }
        }
        at = header + 1;
    }
    bytes[0x0e] &= 0x80;
    bytes[0] = 0x36;
    let mut at = 0x100;
    for _ in 0..planted.min(if is_extended { 48 } else { 0 }) {
        let next = 4 * random.below(1024) as usize;
        let id = match random.below(3) {
            0 => 3,
            1 => random.below(0x30) as u32,
            _ => random.bits() as u32 & 0xffff,
        };
        let header = id | 0x1_0000 | (next as u32) << 20;
        bytes[at..at + 4].copy_from_slice(&header.to_le_bytes());
        at = if next >= 0x100 { next } else { 0x100 };
    }
    let sizes = std::array::from_fn(|_| match random.below(4) {
        0 => 0,
        1 => random.bits() >> random.below(64),
        _ => 1 << random.below(34),
    });
    bytes[0x3d] = 0;
    (Image(bytes), sizes)
}

/// Returns the bits that a guest may change, from the visible space: an independent copy of the
/// table's rows.
fn allowed(guest: &GuestConfig) -> Vec<u32> {
    let mut allowed = vec![0_u32; 1024];
    allowed[1] = 0x0406;
    allowed[3] = 0xffff;
    allowed[0xf] = 0xff;
    for (bar, kind) in guest.bar_kinds().iter().enumerate() {
        let mask = match kind {
            BarKind::Absent => 0,
            BarKind::Memory32(size) => u64::from(!(size - 1)),
            BarKind::Memory64(size) => !(size - 1),
            BarKind::Upper => continue,
        };
        allowed[4 + bar] = mask as u32;
        if let Some(upper) = allowed[4..10].get_mut(bar + 1)
            && matches!(kind, BarKind::Memory64(_))
        {
            *upper = (mask >> 32) as u32;
        }
    }
    for (id, at) in listed(guest, Space::Standard) {
        let word = usize::from(at) / 4;
        match id {
            0x01 => allowed[word + 1] |= 3,
            0x05 => {
                let control = read(guest, at) >> 16;
                let vectors = 1_u64 << (control >> 1 & 7);
                allowed[word] |= 0x71 << 16;
                allowed[word + 1] |= !3;
                let mut data = word + 2;
                if control & 0x80 != 0 {
                    allowed[data] |= u32::MAX;
                    data += 1;
                }
                allowed[data] |= 0xffff;
                if control & 0x100 != 0 {
                    allowed[data + 1] |= ((1_u64 << vectors) - 1) as u32;
                }
            }
            0x10 => allowed[word + 2] |= 0x79ff,
            0x11 => allowed[word] |= 0xc000_0000,
            _ => {}
        }
    }
    allowed
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_image_gives_a_space_that_keeps_the_rules(
        seed: u64,
        is_extended: bool,
        planted in 0_u64..60,
        can_reset: bool,
        accesses in prop::collection::vec((0_u16..4096, 0_usize..3, any::<u32>()), 0..40),
    ) {
        let (image, bar_sizes) = image(seed, is_extended, planted);
        let mut guest = guest(&image, bar_sizes, can_reset);
        // The lists end, and have the visible capabilities of the table, where the device has them.
        let standard = listed(&guest, Space::Standard);
        for (id, at) in &standard {
            prop_assert!(STANDARD_SHOWN.contains(id));
            prop_assert_eq!(u16::from(image.0[usize::from(*at)]), *id);
        }
        let extended = listed(&guest, Space::Extended);
        prop_assert!(extended.is_empty() || extended == [(3, 0x100)]);
        prop_assert_eq!(guest.read(0x30, 4, |_| 0), 0);
        prop_assert_eq!(guest.read(0x3d, 1, |_| 0), 0);
        prop_assert_eq!(guest.read(0x0e, 1, |_| 0), 0);
        // No other bit changes by any write.
        let allowed = allowed(&guest);
        let before = all(&guest);
        let lens = [1, 2, 4];
        for (reg, len, value) in &accesses {
            let old = guest.watched();
            let effects = guest.write(*reg, lens[*len], *value);
            let now = guest.watched();
            prop_assert_eq!(effects.command, (old.command != now.command).then_some(now.command));
            prop_assert_eq!(effects.msi.is_some(), old.msi != now.msi);
            prop_assert!(can_reset || !effects.function_reset);
        }
        for word in 0..1024 {
            guest.write(4 * word, 4, u32::MAX);
        }
        let mut changed = all(&guest);
        for word in 0..1024 {
            guest.write(4 * word, 4, 0);
        }
        for ((changed, before), cleared) in changed.iter_mut().zip(&before).zip(all(&guest)) {
            *changed = *changed ^ before | cleared ^ before;
        }
        for (word, (changed, allowed)) in changed.iter().zip(&allowed).enumerate() {
            prop_assert_eq!(changed & !allowed, 0, "at {:#x}", 4 * word);
        }
        // Only named bits are read through.
        for (reg, len, _) in &accesses {
            let len = lens[*len];
            let differ = guest.read(*reg, len, |_| 0) ^ guest.read(*reg, len, |_| u32::MAX);
            for bit in (0..8 * u16::from(len)).filter(|bit| differ >> bit & 1 == 1) {
                let at = 8 * reg + bit;
                let is_named = guest.read_through().iter().any(|through| {
                    let first = 8 * through.at;
                    at >= first && at < first + 32 && through.mask >> (at - first) & 1 == 1
                });
                prop_assert!(is_named, "bit {} at {:#x}", bit, reg);
            }
        }
        // A space that was reset is as it was.
        guest.write(0x04, 2, 0);
        for bar in 0..6 {
            guest.write(0x10 + 4 * bar, 4, 0);
        }
        guest.reset();
        prop_assert_eq!(all(&guest), before);
        let areas = crate::areas::Areas::new(guest.bar_sizes(), guest.msix(), &Default::default());
        prop_assert_eq!(areas.pieces(0, 0, 8).map(|piece| piece.bytes.end).max(), Some(8));
    }

    /// Any bytes are either refused or accepted without a panic.
    #[test]
    fn any_bytes_do_no_harm(seed: u64, is_extended: bool, sizes: [u64; BARS]) {
        let random = &mut Random::new(seed);
        let len = if is_extended { 4096 } else { 256 };
        let image: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
        let device = Device { image: &image, bar_sizes: sizes, can_reset: true };
        if let Err(refusal) = GuestConfig::new(&device) {
            prop_assert!(!refusal.to_string().is_empty());
        }
    }
}

/// The images above do reach each kind of outcome: else the properties would say little.
#[test]
fn random_images_have_all_kinds() {
    let (mut seen, mut faults, mut loops, mut outside, mut serials) = ([0; 5], 0, 0, 0, 0);
    for seed in 0..6000 {
        let (image, sizes) = image(seed, seed % 2 == 0, seed % 60);
        let guest = guest(&image, sizes, true);
        for (id, _) in listed(&guest, Space::Standard) {
            for (count, shown) in seen.iter_mut().zip(STANDARD_SHOWN) {
                *count += u32::from(id == shown);
            }
        }
        for reason in guest.unsupported() {
            match reason {
                Unsupported::Malformed { .. } => faults += 1,
                Unsupported::List {
                    broken: Broken::Loop(_),
                    ..
                } => loops += 1,
                Unsupported::List {
                    broken: Broken::Outside(_),
                    ..
                } => outside += 1,
                _ => {}
            }
        }
        serials += listed(&guest, Space::Extended).len();
    }
    let all = [&seen[..], &[faults, loops, outside, serials as u32]].concat();
    assert!(all.iter().all(|count| *count >= 50), "{all:?}");
}
