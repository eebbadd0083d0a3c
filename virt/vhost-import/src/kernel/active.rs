//! The driver's rings, started and stopped in the kernel.

use std::os::fd::AsFd;

use guest_mem::Iova;

use crate::error::ImportError;
use crate::handshake::{RingFds, ring};
use crate::shared::Activation;

use super::{KernelBackEnd, KernelRing};

/// The driver's rings.
#[derive(Debug)]
pub(super) struct Active {
    pub activation: Activation,
    /// Position at which each goes on.
    bases: Vec<u16>,
    /// They are to be served; else they are stopped.
    pub is_wanted: bool,
    pub is_serving: bool,
    pub is_broken: bool,
}

impl Active {
    pub fn new(activation: Activation) -> Self {
        Self {
            bases: vec![0; activation.rings.len()],
            activation,
            is_wanted: true,
            is_serving: false,
            is_broken: false,
        }
    }

    /// They are to be served, and are not.
    pub fn is_startable(&self) -> bool {
        self.is_wanted && !self.is_broken && !self.is_serving
    }

    /// Has the kernel serve them.
    pub fn start(
        &mut self,
        back_end: &mut impl KernelBackEnd,
        fds: &RingFds,
    ) -> Result<(), ImportError> {
        // From the first of them on the kernel may take buffers.
        self.is_serving = true;
        for (place, base) in self.activation.rings.iter().zip(&self.bases) {
            let at = usize::from(place.index);
            back_end.start_ring(&KernelRing {
                index: place.index,
                size: place.size,
                base: *base,
                desc: Iova::new(place.desc),
                avail: Iova::new(place.avail),
                used: Iova::new(place.used),
                kick: fds.kick[at].as_fd(),
                call: fds.call[at].as_fd(),
                err: fds.err.as_fd(),
            })?;
            // A doorbell rung while the ring was stopped was consumed without a look at the ring.
            ring(&fds.kick[at]);
        }
        Ok(())
    }

    /// Stops them, if they are served, and notes where each stands.
    pub fn stop(&mut self, back_end: &mut impl KernelBackEnd) -> Result<(), ImportError> {
        if !self.is_serving {
            return Ok(());
        }
        for (place, base) in self.activation.rings.iter().zip(&mut self.bases) {
            *base = back_end.stop_ring(place.index)?;
        }
        self.is_serving = false;
        Ok(())
    }
}
