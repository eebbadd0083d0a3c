//! Busy-waiting for another core that is about to answer.

/// Number of checks without a pause between them with which a [`Spin`] begins. A pause can take
/// longer than the transfer of a cache line (140 cycles on a Xeon of 2019, against 270 for a line's
/// round trip), and delays the detection of the answer by as much.
#[cfg(not(any(feature = "probe", loom, shuttle)))]
const EAGER: u32 = 256;

/// Counter of the checks of a wait loop. The first checks follow each other at once; later ones
/// have a [pause](crate::spin_loop) between them, so that a long wait leaves the core to its
/// sibling thread. Under loom, shuttle and the probe every check calls `spin_loop`, which lets
/// another thread run.
#[derive(Debug, Default)]
pub struct Spin {
    looks: u32,
}

impl Spin {
    /// Waits between two checks. Returns the number of checks so far, which wraps.
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
