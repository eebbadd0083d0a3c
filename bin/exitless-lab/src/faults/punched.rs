//! Memory whose pages a thread takes away and brings back while the guest runs:
//! `--fault memory:punch`.

use anyhow::{Context, Result, bail};
use punch::{PunchedRam, Puncher};
use vio::balloon::BalloonIo;
use vmm::run::Reach;

use vmm::run::{Functions, Memory, OwnerHandle, Paging, Pieces};

/// Memory that comes and goes.
pub struct Punched {
    pieces: Pieces,
    ram: PunchedRam,
}

impl Punched {
    /// Creates it of these pieces.
    ///
    /// # Errors
    /// No more descriptors.
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
