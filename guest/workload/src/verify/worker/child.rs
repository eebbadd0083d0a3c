//! A child process that checks the pages as they were at the fork, and stores to its own copies.

use std::io::{PipeWriter, Write};

use super::{Done, Worker};
use crate::child::{Child, ChildExit};
use crate::memory::PAGE;
use crate::verify::content::{Base, Content, Found, Patch, Wrong};

/// Number of pages that a child checks; a part of them is overwritten by it.
pub(super) const SHARE: usize = 48;
const SHARE_CHANGED: usize = 8;

impl Worker<'_> {
    pub(super) fn fork(&mut self) -> Done {
        let shared = self.shared;
        let _one = shared.children.lock().expect("who forks does not panic");
        let share: Vec<(usize, Content)> = (0..SHARE)
            .map(|_| {
                let page = self.any_page();
                (page, self.pages[page].content())
            })
            .collect();
        let started = {
            let _none = shared
                .direct_requests
                .write()
                .expect("who requests does not panic");
            Child::start(|say| self.look_as_child(&share, say))
        };
        let child = started.map_err(|error| format!("no child process: {error}"))?;
        // While the child checks their content at the fork.
        for (page, _) in share.iter().step_by(2) {
            self.fill_page(*page);
            self.check_page(*page)?;
        }
        match child.wait() {
            Ok((ChildExit::Status(0), _)) => {}
            Ok((ChildExit::Status(1), said)) => return Err(self.complain_of_child(&share, &said)),
            Ok((ChildExit::Killed(signal), _)) => {
                return Err(format!(
                    "a child was killed by signal {signal}: memory is short; take a smaller --mib"
                ));
            }
            Ok((ended, _)) => return Err(format!("a child ended with {ended:?}")),
            Err(error) => return Err(format!("no word of a child: {error}")),
        }
        self.verified += (SHARE + SHARE_CHANGED) as u64;
        for (page, _) in &share {
            self.check_page(*page)?;
        }
        Ok(SHARE)
    }

    /// Runs in the child, which neither allocates nor locks: sends the number of a wrong page, and
    /// its content.
    pub(super) fn look_as_child(&mut self, share: &[(usize, Content)], say: &mut PipeWriter) -> u8 {
        let seed = self.shared.seed;
        for (number, (page, content)) in (0_u32..).zip(share) {
            self.want(*content);
            let found = self.memory.bytes(*page..page + 1);
            if found != self.wanted.bytes() {
                // If that fails, the parent is gone.
                let _ = say
                    .write_all(&number.to_le_bytes())
                    .and_then(|()| say.write_all(found));
                return 1;
            }
        }
        for (page, _) in &share[..SHARE_CHANGED] {
            let bytes = self.memory.bytes_mut(*page..page + 1);
            child_content(*page).render(seed, bytes);
        }
        for (number, (page, _)) in (0_u32..).zip(&share[..SHARE_CHANGED]) {
            let wanted = self.wanted.bytes_mut();
            child_content(*page).render(seed, wanted);
            let found = self.memory.bytes(*page..page + 1);
            if found != wanted {
                let number = number + SHARE as u32;
                let _ = say
                    .write_all(&number.to_le_bytes())
                    .and_then(|()| say.write_all(found));
                return 1;
            }
        }
        0
    }

    /// Describes a wrong page that the child has sent.
    pub(super) fn complain_of_child(&self, share: &[(usize, Content)], said: &[u8]) -> String {
        let seed = self.shared.seed;
        let (number, found) = match said.split_first_chunk::<4>() {
            Some((number, found)) if found.len() == PAGE => (u32::from_le_bytes(*number), found),
            _ => return "a page is wrong in a child, which could not say which".into(),
        };
        let (page, content, whose) = match (number as usize).checked_sub(SHARE) {
            Some(index) => {
                let page = share[index].0;
                (page, child_content(page), " of the child itself")
            }
            None => {
                let (page, content) = share[number as usize];
                (page, content, "")
            }
        };
        let mut wanted = vec![0; PAGE];
        content.render(seed, &mut wanted);
        let Some(wrong) = Wrong::between(&wanted, found, 0) else {
            return format!("{}: wrong in a child, and right now", self.page_place(page));
        };
        format!(
            "{}, in a child process: {wrong}; wanted {content}{whose}, found {}; its past in the \
             parent: {}; \
             seen by fork in operation {} of thread {}, seed {seed}",
            self.page_place(page),
            Found::identify(found, seed),
            self.pages[page].past(),
            self.operation,
            self.part.thread,
        )
    }
}

/// Content of a page that a child overwrites.
fn child_content(page: usize) -> Content {
    let patch = Patch::over(None, 0, PAGE, u32::MAX - page as u32);
    let base = Base::Zero;
    Content {
        base,
        patch: Some(patch),
    }
}
