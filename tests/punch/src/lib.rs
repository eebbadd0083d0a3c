//! Guest memory with holes: a thread really takes pages of a running machine away, and brings each
//! back when an access needs it. No swapper: the content of absent pages waits in this process. It
//! shows that nothing else in the machine minds.
//!
//! * [`PunchedRam`]: the memory as the machine's owner reaches it; what is absent is asked for by a
//!   ticket.
//! * [`Puncher`]: the thread, the machine's only pager.
//!
//! One page's way out: the owner releases it (no lease and no window reaches it, and its accesses
//! wait from then on); it is unmapped from the guest, whose accesses wait as faults from then on.
//! Now its content cannot change any more: it is read, and its part of the memory file is punched
//! out. And back: it is written into the file, mapped for the guest, whose faults that wakes, and
//! shown to the owner with the ticket that has asked for it. A page that is in the file although it
//! was punched out has been reached past all this, and is counted.
//!
//! Every page is mapped for the guest before the machine starts, so that only what was taken away
//! faults.
//!
//! UNSAFETY: registers memory slots' mappings with userfaultfd, and unmaps pages of theirs.

mod counts;
mod memory;
mod puncher;

pub use counts::Counts;
pub use memory::{PunchedRam, Use};
pub use puncher::Puncher;
