//! `--fault memory:punch`: guest memory whose pages a thread removes and restores while the guest
//! runs.

use anyhow::{Context, Result, bail};
use punch::{PunchedRam, Puncher};
use vio::balloon::BalloonIo;
use vmm::run::Reach;

use vmm::run::{Functions, Memory, OwnerHandle, Paging, Pieces};

/// Guest memory whose pages are removed and restored at random.
pub struct Punched {
    pieces: Pieces,
    ram: PunchedRam,
}

impl Punched {
    /// Creates the memory from the pieces of a machine.
    ///
    /// # Errors
    /// No descriptor is left for an eventfd.
    pub fn new(pieces: Pieces) -> Result<Self> {
        Ok(Self {
            ram: PunchedRam::new(pieces.ram.clone()).context("an eventfd")?,
            pieces,
        })
    }
}

impl<F: Functions> Memory<F> for Punched {
    type Ram = PunchedRam;

    fn ram(&self) -> PunchedRam {
        self.ram.clone()
    }

    fn balloon(&self, _: &Reach) -> Result<Box<dyn BalloonIo>> {
        bail!("memory that comes and goes has no balloon")
    }

    fn start(self, owner: OwnerHandle<F, PunchedRam>) -> Result<Option<Box<dyn Paging>>> {
        let puncher = Puncher::start(self.ram, self.pieces.slots, owner);
        Ok(Some(Box::new(Running(
            puncher.context("memory that comes and goes")?,
        ))))
    }
}

struct Running(Puncher);

impl Paging for Running {
    fn begin(&mut self) -> Result<()> {
        Ok(())
    }

    fn end(&self) {
        self.0.rest();
    }

    fn stop(self: Box<Self>) -> String {
        self.0.stop().to_string()
    }
}
