//! Findings of an unmaskable tick, and their consequences (§3.7.2).
//!
//! A guest in direct mode can keep the processor without a single exit: with interrupts masked, or with an assigned vector in
//! service for ever, which blocks all of its class and below. Only an interrupt that cannot be masked still exits.

use crate::Vector;

/// Ticks in a row, at which each finds the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// That a vector is held in service.
    pub held: u32,
    /// That interrupts are masked.
    pub masked: u32,
}

impl Default for Limits {
    /// With a tick of 20 ms: 0.2 s, and 0.1 s. The latter costs a guest a few exits that masks interrupts at five ticks by chance.
    fn default() -> Self {
        Self {
            held: 10,
            masked: 5,
        }
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Fine,
    /// End what is in service, and inject from now on.
    ForceEoi(Vector),
    /// Inject while the guest masks interrupts: those of the host's then exit all the same.
    Inject,
}

/// What the ticks found so far.
#[derive(Clone, Debug, Default)]
pub struct Watchdog {
    limits: Limits,
    held: Option<(Vector, u32)>,
    masked: u32,
}

impl Watchdog {
    /// With other limits.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// A tick: whether the guest, in direct mode, has interrupts masked, and the highest vector of its own that is really in service.
    pub fn tick(&mut self, masked: bool, in_service: Option<Vector>) -> Verdict {
        self.masked = if masked { self.masked + 1 } else { 0 };
        self.held = match (in_service, self.held) {
            (Some(vector), Some((same, ticks))) if vector == same => Some((vector, ticks + 1)),
            (vector, _) => vector.map(|vector| (vector, 1)),
        };
        if self.masked >= self.limits.masked {
            self.masked = 0;
            return Verdict::Inject;
        }
        match self.held {
            Some((vector, ticks)) if ticks >= self.limits.held => {
                self.held = None;
                Verdict::ForceEoi(vector)
            }
            _ => Verdict::Fine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_every_tick_finds_is_acted_upon() {
        let mut dog = Watchdog::new(Limits { held: 3, masked: 4 });
        // In a handler now and then, masked now and then: an honest guest.
        for _ in 0..100 {
            assert_eq!(dog.tick(true, Some(0x41)), Verdict::Fine);
            assert_eq!(dog.tick(true, None), Verdict::Fine);
            assert_eq!(dog.tick(false, Some(0x41)), Verdict::Fine);
            assert_eq!(dog.tick(false, Some(0x51)), Verdict::Fine);
        }
        assert_eq!(dog.tick(false, Some(0x41)), Verdict::Fine);
        assert_eq!(dog.tick(false, Some(0x41)), Verdict::Fine);
        assert_eq!(dog.tick(false, Some(0x41)), Verdict::ForceEoi(0x41));
        assert_eq!(dog.tick(false, None), Verdict::Fine);
        for _ in 0..3 {
            assert_eq!(dog.tick(true, None), Verdict::Fine);
        }
        assert_eq!(dog.tick(true, None), Verdict::Inject);
    }
}
