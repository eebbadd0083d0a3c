//! Interrupts from outside of the processor: a device's messages, and the I/O APIC's entries.
//!
//! The guest may choose the vector, whether it is masked, which of its processors, and for a pin
//! its trigger and polarity. The hardware's entry is *composed* from these: one processor of the
//! guest's, by its identifier, fixed; a message is an edge. If the guest names several processors,
//! the first of them is used, as for the lowest priority. No other bit of the guest's reaches the
//! hardware, so none has to be checked.

use super::{DenyReason, EXT_INT, FIXED, LOWEST_PRIORITY, Processors, delivery_mode};
use crate::Vector;
use crate::gate::FIRST_INTERRUPT;

/// Address to which interrupts are written.
const INTERRUPTS: u64 = 0xfee0_0000;

/// An interrupt message, as a device sends it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The address to which it is written; interrupts are at 0xfee0_0000.
    pub address: u64,
    /// The value that is written.
    pub data: u32,
}

impl Message {
    /// A fixed interrupt for the processor of identifier `to`, an edge.
    #[must_use]
    pub const fn fixed(to: u32, vector: Vector) -> Self {
        Self {
            address: INTERRUPTS | (to as u64 & 0xff) << 12,
            data: vector as u32,
        }
    }
}

/// Returns the guest's vector of a message, and the number of the processor that receives it, if it
/// is a fixed interrupt for one of the guest's.
///
/// # Errors
/// It is no interrupt message, or for another processor, of another kind, or has an exception's
/// vector.
pub fn message(message: Message, guests: &Processors) -> Result<(usize, Vector), DenyReason> {
    const LOGICAL: u64 = 1 << 2;
    let to = (message.address >> 12 & 0xff) as u32;
    if message.address >> 20 != INTERRUPTS >> 20 {
        // A write to memory, not an interrupt: it would be the device's DMA anyway. Not through an
        // entry of ours.
        return Err(DenyReason::Destination((message.address >> 12) as u32));
    }
    let targets = guests.of_byte(to, message.address & LOGICAL != 0);
    let index = targets.first().ok_or(DenyReason::Destination(to))?;
    Ok((index, fixed(message.data)?))
}

/// The vector of a message's data, or of the lower word of an I/O APIC's entry, if it is a fixed
/// interrupt.
fn fixed(data: u32) -> Result<Vector, DenyReason> {
    let vector = data as Vector;
    match delivery_mode(data) {
        FIXED | LOWEST_PRIORITY if vector < FIRST_INTERRUPT => Err(DenyReason::Exception(vector)),
        FIXED | LOWEST_PRIORITY => Ok(vector),
        other => Err(DenyReason::DeliveryMode(other)),
    }
}

/// An unmasked entry of the I/O APIC, as far as the guest may choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The number of the processor that gets it.
    pub to: usize,
    /// The vector; `None` for the 8259s' line, whose vectors are checked where they are set.
    pub vector: Option<Vector>,
    /// Active low, and a level: bits 13 and 15, where they are.
    line: u64,
}

impl Pin {
    /// Masked, in an entry.
    pub const MASKED: u64 = 1 << 16;
    const LINE: u64 = 1 << 13 | 1 << 15;

    /// Decodes the entry that the guest wrote; `None` if that is masked.
    ///
    /// # Errors
    /// As for a [`message`].
    pub fn of(entry: u64, guests: &Processors) -> Result<Option<Self>, DenyReason> {
        if entry & Self::MASKED != 0 {
            return Ok(None);
        }
        let (low, to) = (entry as u32, (entry >> 56) as u32);
        let targets = guests.of_byte(to, low >> 11 & 1 != 0);
        let index = targets.first().ok_or(DenyReason::Destination(to))?;
        let vector = match delivery_mode(low) {
            EXT_INT => None,
            _ => Some(fixed(low)?),
        };
        Ok(Some(Self {
            to: index,
            vector,
            line: entry & Self::LINE,
        }))
    }

    /// The entry for the chip, to the processor of identifier `id`, with the vector `real` in the
    /// place of the guest's.
    #[must_use]
    pub const fn entry(self, id: u32, real: Vector) -> u64 {
        let to = (id as u64 & 0xff) << 56;
        match self.vector {
            Some(_) => to | self.line | real as u64,
            None => to | self.line | (EXT_INT as u64) << 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(id: u32) -> Processors {
        Processors::new([id])
    }

    /// A message by the bits of the manual: destination, mode, whether it is a level, vector.
    fn does(message: Message) -> (u64, u32, u32, u32) {
        assert_eq!(message.address >> 20, 0xfee);
        assert_eq!(message.address & 0xfff, 0, "physical, no redirection");
        let data = message.data;
        (
            message.address >> 12 & 0xff,
            data >> 8 & 7,
            data >> 15 & 1,
            data & 0xff,
        )
    }

    #[test]
    fn e10_messages_are_fixed_and_for_the_guests_processor() {
        let of = |address: u64, data: u32| {
            message(Message { address, data }, &one(0)).map(|(_, vector)| vector)
        };
        assert_eq!(of(0xfee0_0000, 0x41), Ok(0x41));
        assert_eq!(of(0xfee0_1004, 0x41), Ok(0x41));
        assert_eq!(of(0xfee0_1000, 0x41), Err(DenyReason::Destination(1)));
        assert_eq!(of(0xfee0_2004, 0x41), Err(DenyReason::Destination(2)));
        assert_eq!(of(0xfee0_0000, 0x441), Err(DenyReason::DeliveryMode(4)));
        assert_eq!(of(0xfee0_0000, 0x241), Err(DenyReason::DeliveryMode(2)));
        assert_eq!(of(0xfee0_0000, 0x08), Err(DenyReason::Exception(8)));
        assert!(of(0x1000, 0x41).is_err() && of(1 << 32 | 0xfee0_0000, 0x41).is_err());
    }

    #[test]
    fn messages_are_made_for_this_processor_alone_and_edges_whatever_the_guests_say() {
        let mut accepted = 0;
        for own in [0, 1, 5] {
            for low in 0..=0xff_u64 << 4 {
                // Destination, redirection hint, mode; and of the data the mode, both trigger bits.
                let address = 0xfee0_0000 | low << 8 & 0xf_f000 | low & 0xc;
                for data in
                    (0..16).map(|bits| 0x41 | bits << 8 & 0x700 | bits << 11 & 0x4000 | 0x8000)
                {
                    let Ok((0, vector)) = message(Message { address, data }, &one(own)) else {
                        continue;
                    };
                    accepted += 1;
                    let made = Message::fixed(own, vector);
                    assert_eq!(does(made), (own.into(), 0, 0, 0x41));
                }
            }
        }
        assert!(accepted > 1000);
        // A broadcast, by either mode, is the guest's processor; its own words would reach all.
        assert_eq!(
            message(
                Message {
                    address: 0xfeef_f00c,
                    data: 0xc141
                },
                &one(0)
            ),
            Ok((0, 0x41))
        );
        assert_eq!(
            message(
                Message {
                    address: 0xfeef_f000,
                    data: 0x41
                },
                &one(0)
            ),
            Ok((0, 0x41))
        );
        assert_eq!(
            message(
                Message {
                    address: 0xfee0_3004,
                    data: 0x41
                },
                &one(0)
            ),
            Ok((0, 0x41))
        );
    }

    #[test]
    fn entries_of_the_io_apic_are_made_with_their_line_and_nothing_else_of_the_guests() {
        let own = 3;
        for bit in 0..64 {
            // All ones in the reserved bits, one at a time, over a good entry.
            let entry = 3 << 56 | 0x52 | 1 << bit;
            let Ok(Some(pin)) = Pin::of(entry, &one(own)) else {
                continue;
            };
            let real = pin.entry(own, 0x77);
            let line = entry & (1 << 13 | 1 << 15);
            match pin.vector {
                Some(vector) => {
                    assert_eq!(vector, entry as u8);
                    assert_eq!(real, 3 << 56 | line | 0x77, "bit {bit}");
                }
                None => assert_eq!(real, 3 << 56 | line | 0x700, "bit {bit}"),
            }
        }
        let of = |entry: u64| Pin::of(entry, &one(0)).map(|pin| pin.map(|pin| pin.vector));
        // A broadcast, physical and logical, and to another.
        assert_eq!(of(0xff << 56 | 0x41), Ok(Some(Some(0x41))));
        assert_eq!(of(0xff << 56 | 0x841), Ok(Some(Some(0x41))));
        assert_eq!(of(1 << 56 | 0x41), Err(DenyReason::Destination(1)));
        assert_eq!(of(2 << 56 | 0x841), Err(DenyReason::Destination(2)));
        assert_eq!(of(0x441), Err(DenyReason::DeliveryMode(4)));
        assert_eq!(of(0x741), Ok(Some(None)));
        assert_eq!(of(0x0e), Err(DenyReason::Exception(0x0e)));
        assert_eq!(of(0x1_0441), Ok(None));
    }

    #[test]
    fn of_several_processors_the_first_that_is_named_gets_it() {
        let guests = Processors::new([0, 1]);
        let of = |address: u64| {
            message(
                Message {
                    address,
                    data: 0x41,
                },
                &guests,
            )
        };
        assert_eq!(of(0xfee0_0000), Ok((0, 0x41)));
        assert_eq!(of(0xfee0_1000), Ok((1, 0x41)));
        assert_eq!(of(0xfee0_2000), Err(DenyReason::Destination(2)));
        assert_eq!(of(0xfeef_f000), Ok((0, 0x41)));
        assert_eq!(of(0xfee0_2004), Ok((1, 0x41)));
        assert_eq!(of(0xfee0_3004), Ok((0, 0x41)));
        let of = |entry: u64| Pin::of(entry, &guests).map(|pin| pin.map(|pin| pin.to));
        assert_eq!(of(1 << 56 | 0x41), Ok(Some(1)));
        assert_eq!(of(6 << 56 | 0x841), Ok(Some(1)));
        assert_eq!(of(2 << 56 | 0x41), Err(DenyReason::Destination(2)));
    }
}
