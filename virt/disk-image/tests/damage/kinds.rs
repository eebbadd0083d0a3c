//! Kinds of damage, and their effects.

use super::support::forge::Forged;

pub const FAR: u64 = 1 << 40;
pub const HALF_READ: &str = "QEMU takes what a file lacks of its last cluster for zeroes";

/// Effect on a reader or a writer.
#[derive(Clone, Copy)]
pub enum Effect {
    /// It is not opened; a word of the message.
    Refused(&'static str),
    /// Reads of these clusters fail.
    Fails(&'static [u64]),
    /// Everything reads right.
    Fine,
}
pub use Effect::{Fails, Fine, Refused};

/// Findings of `qemu-img check`.
#[derive(Clone, Copy)]
pub enum Qemu {
    Something,
    /// Nothing, and why.
    Nothing(&'static str),
}
pub use Qemu::{Nothing, Something};

/// Image before the damage.
#[derive(Clone, Copy)]
pub enum Image {
    V2,
    V3,
    /// Version 3 with compressed data at its end.
    Packed,
}

pub use Image::{Packed, V2, V3};

/// One thing wrong with an image, and its effects.
pub struct Damage {
    pub what: &'static str,
    pub image: Image,
    pub make: fn(&mut Forged),
    pub reading: Effect,
    pub writing: Effect,
    pub qemu: Qemu,
}

/// Damage that `qemu-img check` finds and that hinders neither reading nor writing, unless one of
/// the methods says so.
pub fn damage(image: Image, what: &'static str, make: fn(&mut Forged)) -> Damage {
    Damage {
        what,
        image,
        make,
        reading: Fine,
        writing: Fine,
        qemu: Something,
    }
}

impl Damage {
    /// Neither a reader nor a writer opens it.
    pub fn refused(self, word: &'static str) -> Self {
        self.reading(Refused(word)).writing(Refused(word))
    }

    /// A reader misses clusters, a writer is refused.
    pub fn loses(self, clusters: &'static [u64], word: &'static str) -> Self {
        self.reading(Fails(clusters)).writing(Refused(word))
    }

    /// A writer is refused, and a reader misses nothing.
    pub fn refused_for_writing(self, word: &'static str) -> Self {
        self.writing(Refused(word))
    }

    /// Both open it, and miss clusters.
    pub fn fails(self, clusters: &'static [u64]) -> Self {
        self.reading(Fails(clusters)).writing(Fails(clusters))
    }

    pub fn reading(mut self, reading: Effect) -> Self {
        self.reading = reading;
        self
    }

    pub fn writing(mut self, writing: Effect) -> Self {
        self.writing = writing;
        self
    }

    /// `qemu-img check` finds nothing, and why.
    pub fn unseen(mut self, why: &'static str) -> Self {
        self.qemu = Nothing(why);
        self
    }
}
