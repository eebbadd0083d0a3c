//! Changes by the user while the pager runs: the limit, the store's size.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, anyhow};
use sidecore::Handle;
use swap::pager::Message;
use swap::store::Growth;

use super::STORE_FILE;
use super::status::Status;
use crate::messages::say;
use crate::run::file_watch::follow;
use crate::values::size;

/// Has the store grow to the size in `file`, at the start and whenever the file has been written.
pub fn follow_size(file: PathBuf, growth: Growth, changes: Changes) -> Result<()> {
    let growth = Mutex::new(growth);
    follow(STORE_FILE, file, move |text| {
        let bytes = size::bytes(text)?;
        // A growth that has failed half way has left it as it was.
        let mut growth = growth.lock().unwrap_or_else(PoisonError::into_inner);
        match growth.grow(bytes)? {
            0 => Ok(()),
            added => changes.make(Message::AddSlots(added as usize)),
        }
    })
}

/// Sender of the user's changes to a pager that runs.
pub struct Changes {
    pager: Handle<Message>,
    status: Arc<Status>,
}

impl Changes {
    pub fn new(pager: Handle<Message>, status: Arc<Status>) -> Self {
        Self { pager, status }
    }

    /// Sends the pager a change, and reports its outcome to the user.
    pub fn make(&self, change: Message) -> Result<()> {
        let ended = || anyhow!("the pager has ended");
        let look = || self.pager.call(Message::Report).map_err(|_| ended());
        let before = look()?;
        self.pager.send(change).map_err(|_| ended())?;
        if let Some(said) = self.status.changed(&before, &look()?) {
            say!("{said}");
        }
        Ok(())
    }
}
