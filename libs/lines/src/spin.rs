//! Waiting for another core that is about to answer.

/// Looks without a pause, as a [`Spin`] begins with: a pause can take longer than a line takes to
/// come (140 cycles on a Xeon of 2019, against 270 for a line's round trip), and the answer is seen
/// that much later.
#[cfg(not(any(feature = "probe", loom, shuttle)))]
const EAGER: u32 = 256;

/// A wait in a loop: the first looks follow each other at once, later ones with a
/// [pause](crate::spin_loop) between, so that a long wait leaves the core to its sibling thread.
/// Under loom, shuttle and the probe every look hands over.
#[derive(Debug, Default)]
pub struct Spin {
    looks: u32,
}

impl Spin {
    /// Called between two looks. Gives the number of looks so far, which wraps.
    #[inline]
    pub fn wait(&mut self) -> u32 {
        self.looks = self.looks.wrapping_add(1);
        #[cfg(any(feature = "probe", loom, shuttle))]
        crate::spin_loop();
        #[cfg(not(any(feature = "probe", loom, shuttle)))]
        if self.looks > EAGER {
            crate::spin_loop();
        }
        self.looks
    }
}
