//! Failures of the store and the images, until the failed operations are retried.
//!
//! ```text
//!  none ── save_failed, fetch_failed ──▶ some: nothing is saved after the former ── take ──▶ none
//! ```

use super::pages::Page;

/// Reads and writes that failed, and have not been retried.
#[derive(Debug, Default)]
pub(super) struct Failures {
    is_store_failed: bool,
    /// Pages that are still being fetched.
    fetches: Vec<Page>,
}

impl Failures {
    /// Records that the store was full, or a slot could not be written.
    pub fn save_failed(&mut self) {
        self.is_store_failed = true;
    }

    /// Records that the page could not be fetched. It stays in that state: no vCPU and no device
    /// accesses its content.
    pub fn fetch_failed(&mut self, page: Page) {
        self.fetches.push(page);
    }

    pub fn is_store_failed(&self) -> bool {
        self.is_store_failed
    }

    pub fn any(&self) -> bool {
        self.is_store_failed || !self.fetches.is_empty()
    }

    /// Clears the failures for a retry: returns the pages that are to be fetched.
    pub fn take(&mut self) -> Vec<Page> {
        self.is_store_failed = false;
        std::mem::take(&mut self.fetches)
    }
}
