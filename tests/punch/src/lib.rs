//! Guest memory with holes: a thread removes pages of a running machine and restores each when an
//! access needs it. There is no swapper: the content of absent pages is kept in this process. This
//! tests that the rest of the machine tolerates absent pages.
//!
//! * [`PunchedRam`]: the memory as the machine's owner accesses it; an access to an absent page
//!   returns a ticket.
//! * [`Puncher`]: the thread, which is the machine's only pager.
//!
//! To remove a page: the owner releases it (no lease and no window refers to it, and its later
//! accesses wait). It is unmapped from the guest, whose later accesses fault and wait. Now its
//! content cannot change: it is read, and a hole is punched into the memory file. To restore it:
//! the content is written into the file, the page is mapped for the guest, which wakes its faults,
//! and is made present for the owner with the ticket that waits for it. If the file has data for a
//! page that was punched out, that page was accessed past this protocol; such pages are counted.
//!
//! Every page is mapped for the guest before the machine starts, so that only removed pages fault.
//!
//! UNSAFETY: registers mappings of memory slots with userfaultfd, and unmaps pages of them.

mod counts;
mod memory;
mod puncher;

pub use counts::Counts;
pub use memory::{PunchedRam, Use};
pub use puncher::Puncher;
