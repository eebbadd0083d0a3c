//! Answer of `PAGEMAP_SCAN` on stores, asked as in its manual: for pages that were stored to.
//!
//! Some kernels leave out those that are not mapped any more ([`scan`]). This crate does not ask in
//! this way; the result is for information only.

use std::fs::File;
use std::io;

use guest_mem::Hva;

use super::Trial;
use super::clean::Pages;
use crate::Protection;
use crate::scan::{self, PRESENT, Query, WRITTEN};

/// Answer of the request for a page that was stored to and then unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagemapScan {
    /// It was stored to.
    Truthful,
    /// It was not stored to, which is wrong.
    MissesUnmapped,
}

/// Stores to a page, unmaps it, and asks.
pub(super) fn ask(trial: &Trial) -> io::Result<PagemapScan> {
    const PAGE: u64 = Trial::LAST;
    trial.fill(PAGE, 1)?;
    trial.map(PAGE, Protection::WriteProtected)?;
    trial.store(PAGE, 2)?;
    trial.unmap(PAGE)?;
    Ok(match is_written(&trial.pagemap, trial.address(PAGE))? {
        true => PagemapScan::Truthful,
        false => PagemapScan::MissesUnmapped,
    })
}

/// Returns whether the page is in the list of those that were stored to. The query asks for
/// `PRESENT` as well: a list of written pages alone is made by another function of the kernel,
/// which was always right.
fn is_written(pagemap: &File, page: Hva) -> io::Result<bool> {
    let query = Query {
        inverted: 0,
        all_of: WRITTEN,
        any_of: 0,
        told: WRITTEN | PRESENT,
    };
    let mut runs = [[0; 3]];
    let runs = scan::scan(pagemap, page, 1, query, &mut runs)?;
    Ok(runs
        .iter()
        .any(|[_, _, categories]| categories & WRITTEN != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Features, Source, Stores, Uffd};

    /// Control for the other results: a page that was stored to and is mapped is in the list, one
    /// that was not is not.
    #[test]
    fn mapped_pages_are_told_apart() {
        if Uffd::open(Source::User, Features::WRITE_PROTECT_ASYNC).is_err() {
            return eprintln!("skipped: no asynchronous write protection");
        }
        let trial = Trial::new(Stores::Traced).expect("a trial");
        for is_stored in [false, true] {
            let page = Trial::FIRST + u64::from(is_stored);
            trial.fill(page, 1).unwrap();
            trial.map(page, Protection::WriteProtected).unwrap();
            if is_stored {
                trial.store(page, 2).unwrap();
            }
            match is_written(&trial.pagemap, trial.address(page)) {
                Ok(found) => assert_eq!(found, is_stored),
                Err(error) => return eprintln!("skipped: {error}"),
            }
        }
    }
}
