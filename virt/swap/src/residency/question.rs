//! Question to the owner: pages to release.
//!
//! ```text
//!  none ── ask ──▶ open ── answered ──▶ none
//! ```
//! There is one question at a time. Until it is answered the owner may or may not have released its
//! pages.

use super::pages::Page;

/// Reason why the owner is asked for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Too many pages are in memory.
    Reclaim,
    /// The guest has discarded them.
    Discard,
}

/// The question that has not been answered, if there is one.
#[derive(Debug, Default)]
pub(super) struct Question {
    open: Option<(Vec<Page>, Cause)>,
}

impl Question {
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Returns whether the owner is being asked for the page, and so may have released it.
    pub fn has(&self, page: Page) -> bool {
        let mut asked = self.open.iter().flat_map(|(pages, _)| pages);
        asked.any(|asked| *asked == page)
    }

    /// Asks for these pages.
    pub fn ask(&mut self, pages: Vec<Page>, cause: Cause) {
        debug_assert!(!self.is_open(), "one at a time");
        self.open = Some((pages, cause));
    }

    /// Closes the question, and returns its pages in the order of the bits of the owner's answer;
    /// none without a question.
    pub fn answered(&mut self) -> (Vec<Page>, Cause) {
        self.open.take().unwrap_or((Vec::new(), Cause::Reclaim))
    }
}
