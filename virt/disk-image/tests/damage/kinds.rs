//! What a kind of damage is, and what becomes of it.

use super::support::forge::Forged;

pub const FAR: u64 = 1 << 40;
pub const HALF_READ: &str = "QEMU takes what a file lacks of its last cluster for zeroes";

/// What becomes of it.
#[derive(Clone, Copy)]
pub enum Effect {
    /// It is not opened; a word of what is said.
    Refused(&'static str),
    /// Reads of these clusters fail.
    Fails(&'static [u64]),
    /// Everything reads right.
    Fine,
}
pub use Effect::{Fails, Fine, Refused};

/// What `qemu-img check` finds.
#[derive(Clone, Copy)]
pub enum Qemu {
    Something,
    /// Nothing, and why.
    Nothing(&'static str),
}
pub use Qemu::{Nothing, Something};

/// What is damaged.
#[derive(Clone, Copy)]
pub enum Image {
    V2,
    V3,
    /// Version 3 with compressed data at its end.
    Packed,
}

pub struct Damage {
    pub what: &'static str,
    pub image: Image,
    pub make: fn(&mut Forged),
    pub reading: Effect,
    pub writing: Effect,
    pub qemu: Qemu,
}

/// Damage that hinders reading and writing in one way.
pub fn both(
    what: &'static str,
    image: Image,
    make: fn(&mut Forged),
    word: &'static str,
    qemu: Qemu,
) -> Damage {
    Damage {
        what,
        image,
        make,
        reading: Refused(word),
        writing: Refused(word),
        qemu,
    }
}

/// Damage of a mapping: a reader misses clusters, a writer is refused.
pub fn mapping(
    what: &'static str,
    image: Image,
    make: fn(&mut Forged),
    clusters: &'static [u64],
    word: &'static str,
    qemu: Qemu,
) -> Damage {
    Damage {
        what,
        image,
        make,
        reading: Fails(clusters),
        writing: Refused(word),
        qemu,
    }
}

/// Damage that is a writer's concern alone.
pub fn writing(
    what: &'static str,
    image: Image,
    make: fn(&mut Forged),
    word: &'static str,
    qemu: Qemu,
) -> Damage {
    Damage {
        what,
        image,
        make,
        reading: Fine,
        writing: Refused(word),
        qemu,
    }
}
