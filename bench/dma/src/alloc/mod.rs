//! IOVA allocation: the loops over every allocator of `iova`, Linux's own and its other peers.

use std::env;
use std::path::Path;
use std::sync::OnceLock;

use dma_linux::Linux;
use iova::{Aperture, ApertureError, IovaPfn};

pub mod freeing;
pub mod limits;
pub mod loops;
pub mod peers;
pub mod section;
pub mod subject;

/// First page that allocators hand out: page 0 is left out, drivers take it for "none".
pub const FIRST_PAGE: u64 = 1;
/// Last page, inclusive.
pub const LAST_PAGE: u64 = (1 << 36) - 1;
/// Last page below 4 GiB.
pub const LAST_BELOW_4G: u64 = (1 << 20) - 1;

/// The allocator that the targets are about, and that mappers here allocate from.
pub type Best = iova::ChunkAllocator;

/// The space of every allocator here: [`FIRST_PAGE`] to [`LAST_PAGE`], nothing reserved.
///
/// # Errors
/// None: the space has pages.
pub fn space() -> Result<Aperture, ApertureError> {
    Aperture::new(IovaPfn::new(FIRST_PAGE), IovaPfn::new(LAST_PAGE), &[])
}

/// Linux's allocator and tables, if `EXITLESS_LINUX_IOVA` names what `scripts/linux-iova.sh` built;
/// says why not, once.
pub fn linux() -> Option<&'static Linux> {
    static FOUND: OnceLock<Option<&'static Linux>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let path = env::var_os("EXITLESS_LINUX_IOVA").filter(|path| !path.is_empty());
        let Some(path) = path else {
            println!(
                "Linux: void: EXITLESS_LINUX_IOVA names no library (scripts/linux-iova.sh builds \
                 it)"
            );
            return None;
        };
        match Linux::load(Path::new(&path)) {
            Ok(linux) => Some(linux),
            Err(error) => {
                println!("Linux: void: {error:#}");
                None
            }
        }
    })
}
